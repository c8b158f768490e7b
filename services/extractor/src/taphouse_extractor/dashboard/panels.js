// What stands beside charts and jobs: tiles, shards, engines, workers, trainers.

import { $, h, keyed, put, show } from "./dom.js";
import * as f from "./format.js";

const SHARDS_SHOWN = 14;

const TILES = [
  ["Throughput", (s, p) => [f.number(p.samples), "samples/s", `${f.number(p.tokens)} tokens/s`]],
  ["Rows left", (s) => [f.count(s.rows_left), "", s.rows_left ? `about ${f.duration(s.eta_s)}` : "nothing to do"]],
  ["Batches", (s) => [f.count(s.depth.running), "running", `${f.count(s.depth.queued)} queued, ${f.count(s.depth.waiting)} waiting`]],
  ["Stored", (s, p) => [f.bytes(p.bytes), "a second", p.raw_bytes ? `${f.ratio(p.bytes, p.raw_bytes)} of raw` : "nothing lately"]],
  ["Production", (s, p) => production(s.governor, p)],
  ["Extraction's limit", (s) => limit(s.governor)],
];

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

function listed(id, items, key, none, facts) {
  const all = items.length ? items.map((item) => ({ key: key(item), ...facts(item) })) : [{ key: "", name: none, lines: [] }];
  keyed(
    $(id),
    all,
    (one) => one.key,
    () => h("li", {}, h("div", { class: "head" }, h("strong"), h("span", { class: "pill" })), h("p", { class: "muted" })),
    (element, one) => {
      put(element.firstElementChild.firstElementChild, one.name);
      const pill = element.firstElementChild.lastElementChild;
      show(pill, Boolean(one.pill));
      put(pill, one.pill);
      pill.dataset.kind = one.kind ?? "plain";
      put(element.lastElementChild, one.lines.filter(Boolean).join(" · "));
      element.classList.toggle("none", one.key === "");
    },
  );
}

export function engines(status) {
  listed("engine-list", status.engines, (e) => e.url, "Not looked at yet.", (engine) => ({
    name: engine.url,
    pill: { on: "capturing", off: "not capturing" }[engine.capture] ?? engine.capture,
    kind: engine.capture === "on" ? "good" : "bad",
    lines: [
      engine.detail,
      engine.layers && `layers ${engine.layers.join(", ")}`,
      engine.in_flight !== null && `${f.count(engine.in_flight)} captures in flight`,
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

export function trainers(status, now) {
  listed("trainer-list", status.consumers, (c) => c.name, "None has written yet.", (one) => {
    const behind = one.lag === null ? null : one.lag ? `${f.count(one.lag)} shards behind` : "up with the ledger";
    const silent = !one.ended && one.updated_at !== null && now - one.updated_at > 300;
    return {
      name: one.name,
      pill: one.ended ? "ended" : silent ? "silent" : "training",
      kind: one.ended ? "quiet" : silent ? "warn" : "good",
      lines: [one.ended, one.step !== null && `step ${f.count(one.step)}`, `loss ${f.number(one.loss, 4)}`, `accuracy ${f.percent(one.accuracy)}`, behind, `wrote ${f.ago(one.updated_at, now)}`],
    };
  });
}
