// The charts: uPlot panels on one time axis, with a legend that is text and follows the cursor.

import { h, put } from "./dom.js";
import * as f from "./format.js";

const uPlot = window.uPlot;
const SYNC = "time";
const second = (value) => (value === null || value === undefined ? null : value * 1000);

/** A card is a title and panels; a panel draws series; a series takes a number out of a point. */
const CARDS = [
  {
    title: "Throughput",
    note: "mean of the last minute",
    panels: [
      {
        height: 190,
        say: (v) => f.number(v),
        series: [{ label: "samples a second", color: "amber", fill: true, of: (p) => p.samples }],
        also: [
          ["tokens a second", (p) => f.number(p.tokens)],
          ["stored", (p) => `${f.bytes(p.bytes)}/s`],
        ],
      },
    ],
  },
  {
    title: "Queue",
    note: "batches",
    panels: [
      {
        height: 190,
        say: f.count,
        series: [
          { label: "queued", color: "blue", fill: true, of: (p) => p.queued },
          { label: "running", color: "green", of: (p) => p.running },
          { label: "waiting for a retry", color: "red", of: (p) => p.waiting },
        ],
        also: [["not queued yet", (p) => f.count(p.pending)]],
      },
    ],
  },
  {
    title: "Production's latency",
    note: (p) => (p?.mixed ? "p95 of all requests: this engine tells no classes apart" : "p95, with extraction's limit beside it"),
    panels: [
      {
        height: 118,
        say: (v) => f.ms(v / 1000),
        series: [
          { label: "between tokens", color: "blue", of: (p) => second(p.itl_p95_s) },
          { label: "held to", color: "ink", dash: true, of: (p) => second(p.itl_held_to_s) },
        ],
      },
      {
        height: 118,
        say: (v) => f.ms(v / 1000),
        series: [
          { label: "first token", color: "violet", of: (p) => second(p.ttft_p95_s) },
          { label: "held to", color: "ink", dash: true, of: (p) => second(p.ttft_held_to_s) },
        ],
      },
      {
        height: 104,
        say: (v) => `${f.number(v)} ms of a step`,
        series: [{ label: "extraction's limit", color: "amber", fill: true, stepped: true, of: (p) => p.limit_ms }],
      },
    ],
  },
  {
    title: "Trainer",
    note: (p) => p?.trainers[0]?.name ?? "none has written yet",
    panels: [
      {
        height: 186,
        say: (v) => f.number(v, 4),
        series: [{ label: "loss", color: "green", of: (p) => p.trainers[0]?.loss ?? null, gaps: true }],
        also: [["step", (p) => f.count(p.trainers[0]?.step)]],
      },
      {
        height: 190,
        say: (v) => f.percent(v),
        series: [{ label: "accuracy", color: "violet", of: (p) => p.trainers[0]?.accuracy ?? null, gaps: true }],
        also: [["shards behind", (p) => f.count(p.trainers[0]?.lag)]],
      },
    ],
  },
];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Times of day under a chart, with seconds where minutes would say the same twice. */
const times = (_, ticks) => ticks.map((t) => f.clock(t).slice(0, ticks.length > 1 && ticks[1] - ticks[0] < 60 ? 8 : 5));

/** What is drawn of one panel. `points` is shared; `range()` gives the seconds shown. */
class Panel {
  constructor(facts, last, range, points) {
    this.facts = facts;
    this.points = points;
    this.range = range;
    this.plot = null;
    this.values = new Map();
    this.legend = h("dl", { class: "legend" });
    for (const one of [...facts.series, ...(facts.also ?? [])]) {
      const label = one.label ?? one[0];
      const value = h("dd", {}, f.none);
      this.values.set(one, value);
      const swatch = one.color ? h("i", { class: "swatch", "data-color": one.color, "data-dash": Boolean(one.dash) }) : null;
      this.legend.append(h("div", {}, h("dt", {}, swatch, label), value));
    }
    this.box = h("div", { class: "plot" });
    this.last = last;
    this.element = h("div", { class: "panel" }, this.legend, this.box);
  }

  build() {
    this.plot?.destroy();
    const axis = { stroke: css("muted"), grid: { stroke: css("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot(
      {
        width: Math.max(120, this.box.clientWidth),
        height: this.facts.height,
        legend: { show: false },
        cursor: { sync: { key: SYNC }, drag: { setScale: false, x: false, y: false }, points: { size: 7 } },
        padding: [8, 10, 0, 0],
        scales: {
          x: { time: true, range: () => this.range() },
          y: { range: (_, low, high) => scale(low, high) },
        },
        axes: [
          { ...axis, size: this.last ? 28 : 8, values: this.last ? times : () => [], space: 70 },
          { ...axis, size: 52, space: 28, values: (_, ticks) => ticks.map((t) => f.number(t)) },
        ],
        series: [{}, ...this.facts.series.map((one) => this.line(one))],
        hooks: { setCursor: [(plot) => this.say(plot.cursor.idx)] },
      },
      this.data(),
      this.box,
    );
  }

  line(one) {
    const color = css(one.color);
    return {
      label: one.label,
      stroke: color,
      width: one.dash ? 1.5 : 2,
      dash: one.dash ? [5, 4] : undefined,
      fill: one.fill ? `${color}26` : undefined,
      points: { show: false },
      paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      spanGaps: Boolean(one.gaps),
    };
  }

  data() {
    return [this.points.map((p) => p.at), ...this.facts.series.map((one) => this.points.map((p) => one.of(p) ?? null))];
  }

  say(index) {
    const point = this.points[index ?? this.points.length - 1];
    for (const one of this.facts.series) {
      const value = point ? one.of(point) : null;
      put(this.values.get(one), value === null || value === undefined ? f.none : this.facts.say(value));
    }
    for (const one of this.facts.also ?? []) put(this.values.get(one), point ? one[1](point) : f.none);
  }

  draw() {
    if (!this.plot) return;
    const data = this.data();
    this.box.dataset.empty = String(!data.slice(1).some((values) => values.some((value) => value !== null)));
    this.plot.setData(data);
    this.say(this.plot.cursor.idx);
  }

  fit() {
    if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: this.facts.height });
  }
}

/** From 0 where that costs little, with room above; a flat line gets room too. */
function scale(low, high) {
  if (low === null || high === null) return [0, 1];
  const from = low > 0 && low > high * 0.75 && high - low > 0 ? low - (high - low) * 0.5 : Math.min(0, low);
  const room = (high - from) * 0.12 || Math.abs(high) * 0.2 || 1;
  return [from, high + room];
}

/** The charts in `container`. `points` grow in place; `redraw` after that, `rebuild` when colours changed. */
export function charts(container, points) {
  let span = 900;
  const range = () => {
    const end = points.length ? points[points.length - 1].at : Date.now() / 1000;
    const first = points.length ? points[0].at : end;
    return [Math.max(end - span, Math.min(first, end - 60)), end];
  };
  const cards = CARDS.map((card) => {
    const panels = card.panels.map((facts, at) => new Panel(facts, at === card.panels.length - 1, range, points));
    const note = h("p", { class: "muted" });
    const title = h("h3", {}, card.title);
    const element = h("article", { class: "card chart" }, h("div", { class: "head" }, title, note), ...panels.map((p) => p.element));
    container.append(element);
    return { panels, note, of: typeof card.note === "function" ? card.note : () => card.note };
  });
  const all = cards.flatMap((card) => card.panels);
  new ResizeObserver(() => all.forEach((panel) => panel.fit())).observe(container);
  return {
    rebuild: () => all.forEach((panel) => panel.build()),
    redraw: () => {
      for (const card of cards) put(card.note, card.of(points[points.length - 1]));
      all.forEach((panel) => panel.draw());
    },
    show: (seconds) => {
      span = seconds;
      all.forEach((panel) => panel.draw());
    },
  };
}
