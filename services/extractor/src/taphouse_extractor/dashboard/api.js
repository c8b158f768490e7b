// Requests to the service. Paths are relative: the page works below any prefix of a proxy.

const KEY = "taphouse.token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export function headers(more = {}) {
  const value = token.get();
  return value ? { ...more, Authorization: `Bearer ${value}` } : more;
}

/** What the service said was wrong, in its own words. */
export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the service answered ${answer.status}`;
  }
}

/** JSON of a route; throws an Error with the service's own message. */
export async function call(method, path, body) {
  const extra = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, { method, headers: headers(extra), body: body && JSON.stringify(body), cache: "no-store" });
  } catch {
    throw new Error("the service can't be reached");
  }
  if (!answer.ok) throw new Error(await refusal(answer));
  return answer.json();
}

/** The lines of a JSONL route, each parsed. */
export async function lines(path) {
  let answer;
  try {
    answer = await fetch(path, { headers: headers(), cache: "no-store" });
    if (answer.ok) return (await answer.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line));
  } catch {
    throw new Error("the service can't be reached");
  }
  throw new Error(await refusal(answer));
}
