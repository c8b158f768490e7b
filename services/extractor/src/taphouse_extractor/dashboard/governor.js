// The governor: what it allows and why, and an admin's orders.

import { call } from "./api.js";
import { $, ask, put, show, toast } from "./dom.js";
import * as f from "./format.js";

const SURE = ["Stop extraction?", "No batch is fed and nothing is captured until someone orders Auto or Pin. Production goes on.", "Stop extraction"];

export function governor() {
  let now = null;
  const form = $("governor-form");

  async function order(mode) {
    const body = mode === "pinned" ? { mode, busy_ms: Number($("pin").value) } : { mode };
    if (mode === "stopped" && !(await ask(...SURE))) return;
    try {
      draw(await call("POST", "v1/governor", body), true);
    } catch (error) {
      toast(`Governor: ${error.message}`);
    }
  }

  function draw(view, orders) {
    now = view;
    const mode = $("governor-mode");
    put(mode, view ? view.mode : "none");
    mode.dataset.kind = { auto: "good", pinned: "warn", stopped: "bad" }[view?.mode] ?? "quiet";
    const limit = view?.stopped ? "Extraction stands still: " : view && view.busy_ms !== null ? `Up to ${f.number(view.busy_ms)} ms of a step: ` : "";
    put($("governor-reason"), view ? limit + view.reason : "No governor leads: the engine's own settings are in force.");
    show(form, orders);
    for (const button of form.querySelectorAll("[data-mode]")) button.setAttribute("aria-pressed", String(button.dataset.mode === view?.mode));
    if (!$("pin").value && document.activeElement !== $("pin") && view?.busy_ms) $("pin").value = String(Number(view.busy_ms.toPrecision(3)));
  }

  for (const button of form.querySelectorAll("[data-mode]")) button.addEventListener("click", () => order(button.dataset.mode));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if ($("pin").value === "") toast("Pin: say how many milliseconds of a step");
    else order("pinned");
  });
  return { draw, now: () => now };
}
