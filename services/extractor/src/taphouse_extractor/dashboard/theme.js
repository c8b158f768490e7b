// Light, dark, or as the system has it; kept in this browser.

import { $, put } from "./dom.js";

const KEY = "taphouse.theme";
const ORDER = ["auto", "light", "dark"];

export function themes(changed) {
  const button = $("theme");
  const set = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    put(button, `Theme: ${name}`);
    button.dataset.now = name;
    changed();
  };
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(button.dataset.now) + 1) % ORDER.length];
    localStorage.setItem(KEY, next);
    set(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const kept = localStorage.getItem(KEY);
  set(ORDER.includes(kept) ? kept : "auto");
}
