// What stands beside charts and jobs: tiles, shards, engines, workers, trainers.

import { call } from "./api.js";
import { $, ask, h, keyed, put, show, toast } from "./dom.js";
import * as f from "./format.js";

const SHARDS_SHOWN = 14;

const TILES = [
  ["Throughput", (s, p) => [f.number(p.samples), "samples/s", `${f.number(p.tokens)} tokens/s`]],
  ["Rows left", (s) => [f.count(s.rows_left), "", left(s)]],
  ["Batches", (s) => [f.count(s.depth.running), "running", `${f.count(s.depth.queued)} queued, ${f.count(s.depth.waiting)} waiting`]],
  ["Stored", (s, p) => [f.bytes(p.bytes), "/s", p.raw_bytes ? `${f.ratio(p.bytes, p.raw_bytes)} of raw` : "nothing lately"]],
  ["Unconsumed", (s) => unconsumed(s.unconsumed)],
  ["Production", (s, p) => production(s.governor, p)],
  ["Extraction's limit", (s) => limit(s.governor)],
];

function left(status) {
  if (!status.rows_left) return "nothing to do";
  if (status.paused) return "paused";
  return status.eta_s === null ? "no estimate yet" : `about ${f.duration(status.eta_s)}`;
}

function unconsumed(found) {
  if (!found) return [f.none, "", "not counted"];
  const unit = found.bound_bytes ? `of ${f.bytes(found.bound_bytes)}` : "";
  const whose = found.slowest.length ? `for ${found.slowest.join(", ")}` : "no consumer yet";
  return [f.bytes(found.bytes), unit, found.shards ? `${f.count(found.shards)} shards ${whose}` : "consumers are up to date", over(found) ? "warn" : "plain"];
}

/** One shard alone is never too much. */
export const over = (found) => Boolean(found?.bound_bytes) && found.shards > 1 && found.bytes >= found.bound_bytes;

/** What waits for a consumer. */
export function holds(status, name) {
  const held = [];
  if (over(status.unconsumed) && status.unconsumed.slowest.includes(name)) held.push("feeding");
  if (status.retention?.held_by.includes(name)) held.push("deletion");
  return held;
}

function production(governor, point) {
  const slower = governor?.slowdown;
  if (slower) {
    const by = (slower - 1) * 100;
    const words = `${f.ms(point.itl_p95_s)} between tokens`;
    return [`${by > 0 ? "+" : ""}${f.number(by, 2)} %`, "p95", words, slower > 1.05 ? "warn" : "good"];
  }
  if (point.itl_p95_s) return [f.ms(point.itl_p95_s), "", point.mixed ? "between tokens, p95 of all" : "between tokens, p95"];
  return [f.none, "", "no traffic lately"];
}

function limit(governor) {
  if (!governor) return [f.none, "", "no governor"];
  if (governor.stopped) return ["0", "ms a step", "stopped", "bad"];
  return [governor.busy_ms === null ? f.none : f.number(governor.busy_ms), "ms a step", governor.mode];
}

export function tiles(status, point) {
  keyed(
    $("tiles"),
    TILES,
    (tile) => tile[0],
    (tile) => h("div", { class: "card tile" }, h("h2", {}, tile[0]), h("p", { class: "big" }, h("span"), h("small")), h("p", { class: "muted" })),
    (element, tile) => {
      const [value, unit, words, kind] = tile[1](status, point);
      put(element.children[1].firstElementChild, value);
      put(element.children[1].lastElementChild, unit);
      put(element.children[2], words);
      element.dataset.kind = kind ?? "plain";
    },
  );
}

/** The newest shards; `add` takes one as it lands. */
export function shards() {
  const kept = [];
  let total = 0;
  let fresh = false;
  const body = $("shards-table").tBodies[0];

  function row(shard) {
    const cell = (label, name, ...text) => h("td", { "data-label": label, class: name }, ...text);
    const meter = h("div", { class: "meter", role: "img", "aria-label": `${f.ratio(shard.bytes, shard.raw_bytes)} of raw` }, h("i", { class: "amber" }));
    meter.firstElementChild.style.width = `${shard.raw_bytes ? Math.min(100, (100 * shard.bytes) / shard.raw_bytes) : 0}%`;
    return h(
      "tr",
      { class: fresh ? "landed" : "" },
      cell("Number", "n", f.count(shard.seq)),
      h("th", { scope: "row", class: "name", title: shard.shard }, shard.shard),
      cell("Samples", "n", f.count(shard.samples)),
      cell("Tokens", "n", f.count(shard.tokens)),
      cell("Size", "n", f.bytes(shard.bytes)),
      shard.gone ? cell("Of raw", "share", h("span", { class: "muted", title: shard.gone }, "gone")) : cell("Of raw", "share", meter, h("span", {}, f.ratio(shard.bytes, shard.raw_bytes))),
      cell("Landed", "n when"),
    );
  }

  return {
    add(shard) {
      if (kept.some((one) => one.seq === shard.seq)) return;
      kept.unshift(shard);
      kept.sort((a, b) => b.seq - a.seq);
      kept.length = Math.min(kept.length, SHARDS_SHOWN);
    },
    draw(head, now) {
      total = head;
      keyed(body, kept, (shard) => shard.seq, row, (element, shard) => put(element.lastElementChild, f.ago(shard.created_at, now)));
      fresh = true;
      show($("shards-empty"), kept.length === 0);
      show($("shards-table"), kept.length > 0);
      put($("shards-count"), total ? `${f.count(total)} in the ledger` : "");
    },
    clear: () => {
      kept.length = 0;
      fresh = false;
    },
  };
}

/** A button of an item: `[label, name, click]`. */
function action([label, name, click] = ["", "", () => {}]) {
  return h("p", { class: "orders", hidden: true }, h("button", { type: "button", "aria-label": name, click }, label));
}

function listed(id, items, key, none, facts) {
  const title = $(id).parentElement.querySelector("h2");
  const all = items.length ? items.map((item) => ({ key: key(item), ...facts(item) })) : [{ key: "", name: none, lines: [] }];
  keyed(
    $(id),
    all,
    (one) => one.key,
    (one) => h("li", {}, h("div", { class: "head" }, h("strong"), h("span", { class: "pill" })), h("p", { class: "muted" }), action(one.action)),
    (element, one) => {
      put(element.firstElementChild.firstElementChild, one.name);
      const pill = element.firstElementChild.lastElementChild;
      show(pill, Boolean(one.pill));
      put(pill, one.pill);
      pill.dataset.kind = one.kind ?? "plain";
      put(element.children[1], one.lines.filter(Boolean).join(" · "));
      if (!one.offered && element.children[2].contains(document.activeElement)) title.focus({ preventScroll: true });
      show(element.children[2], Boolean(one.offered));
      element.classList.toggle("none", one.key === "");
    },
    () => title,
  );
}

export function engines(status) {
  listed("engine-list", status.engines, (e) => e.url, "Not looked at yet.", (engine) => ({
    name: engine.url,
    pill: { on: engine.set_aside ? "set aside" : "capturing", off: "not capturing" }[engine.capture] ?? engine.capture,
    kind: engine.capture !== "on" ? "bad" : engine.set_aside ? "warn" : "good",
    lines: [
      engine.detail,
      engine.set_aside && `others go first for a while: ${engine.set_aside}`,
      engine.layers && `layers ${engine.layers.join(", ")}`,
      engine.in_flight !== null && `${f.count(engine.in_flight)} in flight`,
      engine.held > 0 && `${f.count(engine.held)} held back for production`,
      engine.latency && `${f.ms(engine.latency.itl_p95)} between tokens, ${f.ms(engine.latency.ttft_p95)} to the first (p95, ${engine.latency.requests === "production" ? "production" : "all requests"})`,
      engine.fingerprint_id && `fingerprint ${engine.fingerprint_id.slice(0, 16)}`,
    ],
  }));
}

export function workers(status, now) {
  const busy = status.workers.filter((worker) => worker.state === "busy").length;
  put($("workers-count"), status.workers.length ? `${busy} of ${status.workers.length} busy` : "");
  listed("worker-list", status.workers, (w) => w.name, "None is running: start one with taphouse-extractor worker.", (worker) => ({
    name: worker.name,
    pill: worker.state,
    kind: worker.state === "busy" ? "good" : "quiet",
    lines: [worker.batch, worker.last_heartbeat && `heard of ${f.ago(worker.last_heartbeat, now)}`],
  }));
}

async function forget(name) {
  const text = "Nothing waits for it any more: feeding and deletion go on without it. If it comes back, it is registered again.";
  const sure = await ask(`Forget ${name}?`, text, "Forget it");
  if (!$("trainer-list").contains(document.activeElement)) $("trainers").focus(); // the button that asked went meanwhile
  if (!sure) return;
  try {
    await call("POST", `v1/consumers/${encodeURIComponent(name)}/forget`);
  } catch (error) {
    toast(`Forget: ${error.message}`);
  }
}

/** Whether nothing was heard of a consumer that has not ended. */
export const silent = (one, now) => !one.ended && one.updated_at !== null && now - one.updated_at > 300;

/** Those who read the ledger; `admin` may forget one that ended or fell silent. */
export function trainers(status, now, admin) {
  put($("retention"), retention(status.retention));
  listed("trainer-list", status.consumers, (c) => c.name, "None has written yet.", (one) => {
    const behind = one.lag === null ? null : one.lag ? `${f.count(one.lag)} shards behind` : "up with the ledger";
    const quiet = silent(one, now);
    const phase = one.phase ?? "training";
    const held = holds(status, one.name);
    return {
      name: one.name,
      action: ["Forget", `Forget ${one.name}`, () => forget(one.name)],
      offered: admin && (one.ended || quiet),
      pill: one.ended ? "ended" : quiet ? "silent" : phase,
      kind: one.ended ? (held.length ? "warn" : "quiet") : quiet ? "warn" : phase === "training" ? "good" : "plain",
      lines: [one.ended ?? (quiet && phase !== "training" && phase), one.refused > 0 && `${f.count(one.refused)} shards refused`, one.step !== null && `step ${f.count(one.step)}`, `loss ${f.number(one.loss, 4)}`, `accuracy ${f.percent(one.accuracy)}`, behind, held.length && `holds back ${held.join(" and ")}`, `wrote ${f.ago(one.updated_at, now)}`],
    };
  });
}

function retention(said) {
  if (!said) return "";
  if (said.mode === "keep") return "All shards are kept.";
  const when = said.mode === "consumed" ? "once consumed" : `after ${f.duration(said.age_s)}`;
  return `Shards are deleted ${when}${said.held ? `; ${said.held}` : ""}.`;
}
