// The jobs: progress, what may be done to each in its state, and one job's failures.

import { call, lines } from "./api.js";
import { $, ask, h, keyed, put, show, toast } from "./dom.js";
import * as f from "./format.js";

const SHOWN = 8;
const PAGE = 50;
const ACTIONS = {
  pause: { label: "Pause" },
  resume: { label: "Resume" },
  retry: { label: "Retry failed", when: (job) => job.failed > 0 },
  cancel: {
    label: "Cancel",
    danger: true,
    sure: (job) => [`Cancel ${title(job)}?`, "Sealed shards stay. Rows that have no outcome are skipped.", "Cancel the job"],
  },
};

/** What undoes an action: where the one was, the other is. */
const OPPOSITE = { pause: "resume", resume: "pause" };
const FINAL = ["done", "failed", "cancelled"];

const title = (job) => job.name || job.id;

/** The table of jobs. `allowed(job)` names the actions offered. */
export function jobs(allowed) {
  let all = [];
  let everything = false;
  let open = null;
  const body = $("jobs-table").tBodies[0];

  async function act(name, job) {
    const action = ACTIONS[name];
    if (action.sure) {
      const sure = await ask(...action.sure(job));
      const row = body.querySelector(`[data-key="${job.id}"]`);
      if (!row?.contains(document.activeElement)) after(row, name).focus(); // the button that asked went meanwhile
      if (!sure) return;
    }
    try {
      replace(await call("POST", `v1/jobs/${encodeURIComponent(job.id)}/${name}`));
    } catch (error) {
      toast(`${action.label}: ${error.message}`);
    }
  }

  function replace(job) {
    all = all.map((one) => (one.id === job.id ? { ...job, failures: one.failures } : one));
    draw();
  }

  function draw() {
    const shown = everything ? all : all.slice(0, SHOWN);
    keyed(body, shown, (job) => job.id, (job) => row(job, look), (element, job) => update(element, job, offered(job), act), () => $("jobs"));
    show($("jobs-empty"), all.length === 0);
    show($("jobs-table"), all.length > 0);
    const active = all.filter((job) => !FINAL.includes(job.state)).length;
    put($("jobs-count"), all.length ? `${active} unfinished` : "");
    show($("jobs-more"), all.length > SHOWN);
    put($("jobs-more"), everything ? "Show fewer" : `Show all ${all.length}`);
  }

  const offered = (job) => allowed(job).filter((name) => ACTIONS[name] && (ACTIONS[name].when?.(job) ?? true));

  async function look(id) {
    open = id;
    put($("job-title"), title(all.find((job) => job.id === id) ?? { id }));
    $("job-body").replaceChildren(h("p", { class: "muted" }, "Asking the service …"));
    if (!$("job").open) $("job").showModal();
    try {
      const job = await call("GET", `v1/jobs/${encodeURIComponent(id)}`);
      if (open === id) $("job-body").replaceChildren(...detail(job));
    } catch (error) {
      if (open === id) $("job-body").replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  $("jobs-more").addEventListener("click", () => {
    everything = !everything;
    draw();
  });
  $("job-close").addEventListener("click", () => $("job").close());
  $("job").addEventListener("close", () => (open = null));

  return {
    set(listed) {
      all = listed;
      draw();
    },
    draw,
  };
}

function row(job, look) {
  const cell = (label, name, ...children) => h("td", { "data-label": label, class: name }, ...children);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("button", { type: "button", class: "link", click: () => look(job.id) }, title(job)), job.name ? h("small", { class: "muted" }, job.id) : null),
    cell("State", "state", h("span", { class: "pill" }), h("small", { class: "reason" })),
    cell("Progress", "progress", h("div", { class: "meter", role: "img" }, h("i", { class: "ok" }), h("i", { class: "bad" }), h("i", { class: "off" })), h("small", { class: "muted" })),
    cell("Rate", "n rate"),
    cell("Left", "n left"),
    cell("Stored", "n stored", h("span"), h("small", { class: "muted" })),
    h("td", { class: "actions" }),
  );
}

/** What has the focus once a row's action is gone: its opposite, the first of the others, or the job's name. */
function after(row, action) {
  if (!row) return $("jobs");
  const button = (name) => row.querySelector(`[data-action="${name}"]`);
  return button(action) ?? button(OPPOSITE[action]) ?? row.querySelector(".actions button") ?? row.querySelector(".link");
}

/** Whether it ended before every row was tried: the service counts what is left as skipped. */
const cut = (job) => job.state === "cancelled" || (job.state === "failed" && job.finished_at === null);

/** How far it got, in words. */
function reached(job) {
  const over = job.succeeded + job.failed + (cut(job) ? 0 : job.skipped);
  const more = [
    job.failed && `${f.count(job.failed)} failed`,
    job.skipped && !cut(job) && `${f.count(job.skipped)} skipped`,
    job.state === "cancelled" && "cancelled",
  ];
  return [`${f.count(over)} of ${f.count(job.rows)} rows`, ...more].filter(Boolean).join(", ");
}

function update(element, job, offered, act) {
  const [, state, progress, rate, left, stored, actions] = element.children;
  const pill = state.firstElementChild;
  put(pill, job.state);
  pill.dataset.kind = { running: "good", done: "good", failed: "bad", cancelled: "quiet", paused: "warn" }[job.state] ?? "plain";
  put(state.lastElementChild, job.reason);
  const told = reached(job);
  const [ok, bad, off] = progress.firstElementChild.children;
  for (const [bar, part] of [[ok, job.succeeded], [bad, job.failed], [off, cut(job) ? 0 : job.skipped]]) bar.style.width = `${job.rows ? (100 * part) / job.rows : 0}%`;
  progress.firstElementChild.setAttribute("aria-label", told);
  put(progress.lastElementChild, told);
  const still = job.state === "paused" || FINAL.includes(job.state);
  put(rate, still || !job.rate ? f.none : `${f.number(job.rate)}/s`);
  put(left, still ? f.none : f.duration(job.eta_s));
  put(stored.firstElementChild, job.bytes ? f.bytes(job.bytes) : f.none);
  put(stored.lastElementChild, job.raw_bytes ? `${f.ratio(job.bytes, job.raw_bytes)} of raw` : "");
  element.job = job;
  keyed(
    actions,
    offered,
    (name) => name,
    (name) => h("button", { type: "button", class: ACTIONS[name].danger ? "danger" : "", "aria-label": `${ACTIONS[name].label} ${title(job)}`, "data-action": name, click: () => act(name, element.job) }, ACTIONS[name].label),
    () => {},
    (button) => after(element, button.dataset.action),
  );
}

function detail(job) {
  const options = Object.entries(job.options).filter(([, value]) => value !== null && value !== false && value !== "");
  const facts = [
    ["Id", job.id],
    ["State", job.reason ? `${job.state}: ${job.reason}` : job.state],
    ["Rows", `${f.count(job.rows)}: ${f.count(job.succeeded)} succeeded, ${f.count(job.failed)} failed, ${f.count(job.skipped)} ${cut(job) ? "not extracted" : "skipped"}`],
    ["Batches", Object.entries(job.batches).filter(([, value]) => value).map(([name, value]) => `${f.count(value)} ${name}`).join(", ") || f.none],
    ["Tokens", f.count(job.tokens)],
    ["Shards", `${f.count(job.shards)}, ${f.bytes(job.bytes)} of ${f.bytes(job.raw_bytes)} raw`],
    ["Options", options.map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")],
    ["Came with", [job.owner, job.tenant && `tenant ${job.tenant}`].filter(Boolean).join(", ") || f.none],
    ["Enqueued", new Date(job.created_at * 1000).toLocaleString()],
    ["Fingerprint", job.fingerprint_id ?? f.none],
  ];
  const list = h("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  return [list, h("h3", { id: "failures-title" }, "Rows that made no sample"), failures(job)];
}

/** Rows that made no sample, a page at a time; rows of a cancelled job that were never tried are not listed. */
function failures(job) {
  if (!job.failures.length) return h("p", { class: "muted" }, "None.");
  const total = job.state === "cancelled" ? null : job.failed + job.skipped;
  const body = h("tbody");
  const said = h("span", { class: "muted", role: "status" });
  const [back, on] = [["Previous", -PAGE], ["Next", PAGE]].map(([label, step]) =>
    h("button", { type: "button", "aria-label": `${label} failures`, click: () => turn(first + step) }, label),
  );
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "failures-title" }, failureTable(body));
  let first = 0;

  async function turn(to) {
    first = Math.max(0, to);
    put(said, "Asking the service …");
    try {
      const found = await lines(`v1/jobs/${encodeURIComponent(job.id)}/failures?skip=${first}&limit=${PAGE + 1}`);
      const shown = found.slice(0, PAGE);
      body.replaceChildren(...shown.map(failureRow));
      scroll.scrollTop = 0;
      put(said, shown.length ? `${f.count(first + 1)}–${f.count(first + shown.length)}${total === null ? "" : ` of ${f.count(total)}`}` : "No more.");
      const held = document.activeElement;
      back.disabled = first === 0;
      on.disabled = found.length <= PAGE;
      if (held === on && on.disabled) back.focus(); // a disabled button would let go of the focus
      else if (held === back && back.disabled) on.focus();
    } catch (error) {
      put(said, error.message);
    }
  }

  turn(0);
  return h("div", {}, scroll, h("p", { class: "pager" }, back, said, on));
}

function failureTable(body) {
  const head = h("tr", {}, ...["Row", "Id", "Outcome", "Reason"].map((name) => h("th", { scope: "col", class: name === "Row" ? "n" : null }, name)));
  return h("table", { class: "table" }, h("thead", {}, head), body);
}

const failureRow = (one) =>
  h("tr", {}, h("td", { class: "n" }, f.count(one.row)), h("td", {}, one.id ?? f.none), h("td", {}, one.skipped ? "skipped" : "failed"), h("td", { class: "why" }, one.reason));
