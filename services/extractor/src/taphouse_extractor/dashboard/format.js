// Numbers as people read them: the same words as the `taphouse` command's.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const none = "–";

export const count = (value) => (value === null || value === undefined ? none : whole.format(value));

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return none;
  if (Math.abs(value) >= 1000) return whole.format(value);
  return Number(value.toPrecision(digits)).toString();
}

export function bytes(value) {
  if (value === null || value === undefined) return none;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${unit ? value.toFixed(value < 10 ? 2 : 1) : value.toFixed(0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return none;
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${Math.round(s / 86400)} days`;
}

export const ago = (then, now) => (then === null || then === undefined ? none : `${duration(now - then)} ago`);
export const ms = (seconds) => (seconds === null || seconds === undefined ? none : `${number(seconds * 1000)} ms`);
export const ratio = (part, of) => (of ? (part / of).toFixed(3) : none);
export const percent = (share) => (share === null || share === undefined ? none : `${(share * 100).toFixed(1)} %`);
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
