// The page: connects, takes what comes, and draws at most once a frame.

import { call, token } from "./api.js";
import { charts } from "./charts.js";
import { $, put, show } from "./dom.js";
import * as f from "./format.js";
import { governor } from "./governor.js";
import { jobs } from "./jobs.js";
import { engines, holds, over, shards, silent, tiles, trainers, workers } from "./panels.js";
import { watch } from "./stream.js";
import { themes } from "./theme.js";

const HOUR_S = 3600;
const points = [];
let everyS = 10;
let hello = null;
let moment = null;
let trouble = null;
let lost = null;
let drawing = false;
let end = () => {};

const mayAct = () => hello !== null && hello.role !== "read";
const table = jobs((job) => (mayAct() ? hello.job_actions[job.state] ?? [] : []));
const landed = shards();
const order = governor();
let plots = null;

function draw() {
  drawing = false;
  notice();
  if (!moment || $("main").hidden) return;
  const { status, point } = moment;
  const now = status.updated_at;
  tiles(status, point);
  landed.draw(status.ledger_head, now);
  order.draw(status.governor, hello?.role === "admin" && hello.governor);
  engines(status);
  workers(status, now);
  trainers(status, now, hello?.role === "admin");
  plots.redraw();
  put($("headline"), lost ? "" : headline(status, point));
}

function soon() {
  if (!drawing) {
    drawing = true;
    requestAnimationFrame(draw);
  }
}

function headline(status, point) {
  if (status.paused) return "Extraction is paused";
  if (status.governor?.stopped) return "Extraction stands still";
  if (status.rows_left === 0) return "Nothing to extract";
  return point.samples ? `Extracting ${f.number(point.samples)} samples/s` : "Work is queued";
}

const unfit = (jobs) => (jobs === 1 ? "A job waits" : `${f.count(jobs)} jobs wait`);

/** The one line above everything that says what is wrong, worst first. */
function notice() {
  const seen = moment ? ` Shown is what was at ${f.clock(moment.status.updated_at)}.` : "";
  let said = null;
  let kind = "warn";
  if (lost) [said, kind] = [`${lost}; trying again.${seen}`, "bad"];
  else if (trouble) [said, kind] = [`${trouble}.${seen}`, "bad"];
  else if (moment?.status.paused) said = `Paused: ${moment.status.paused}. ${next(moment.status)}`.replace(".. ", ". ").trimEnd();
  else if (moment?.status.unfit_jobs) said = `${unfit(moment.status.unfit_jobs)} for an engine: ${moment.status.unfit}`;
  else if (moment && !moment.status.workers.length && moment.status.rows_left) said = "No worker is running: queued batches wait.";
  show($("notice"), said !== null);
  put($("notice"), said);
  $("notice").dataset.kind = kind;
  document.body.classList.toggle("stale", Boolean(lost || trouble));
  link(lost ? "Disconnected" : moment ? "Live" : "Connecting", lost ? "bad" : moment ? "good" : "quiet");
}

/** What ends a pause: mostly it ends with its cause. The operator's own says how it ends. */
function next(status) {
  if (status.governor?.mode === "stopped") return "";
  const away = status.consumers.some((one) => (one.ended || silent(one, status.updated_at)) && holds(status, one.name).includes("feeding"));
  if (away) return "It goes on when that trainer does, or is forgotten.";
  if (over(status.unconsumed) && !status.consumers.length) return "It goes on when a trainer reads them.";
  return "It goes on by itself when that is over.";
}

function link(text, kind) {
  put($("link"), text);
  $("link").dataset.kind = kind;
}

/** Keep a point every `everyS` seconds and the newest; an hour of them. */
function keep(point) {
  const [before, last] = points.slice(-2);
  if (last && point.at <= last.at) return;
  if (last && before && last.at - before.at < everyS) points.pop();
  points.push(point);
  while (points[0].at < point.at - HOUR_S) points.shift();
}

async function past() {
  const history = await call("GET", "v1/history");
  everyS = history.every_s;
  const newest = points.at(-1);
  const old = history.points.filter((point) => !newest || point.at < newest.at);
  points.splice(0, points.length, ...old, ...(newest ? [newest] : []));
  soon();
}

const EVENTS = {
  hello(data) {
    hello = data;
    put($("who"), data.name === "anonymous" ? "" : `${data.name} (${data.role})`);
  },
  moment(data) {
    moment = data;
    trouble = null;
    keep(data.point);
  },
  jobs: (data) => table.set(data.jobs),
  shard: (data) => landed.add(data),
  problem: (data) => (trouble = data.message),
};

function enter() {
  end();
  end = watch({
    event(event) {
      EVENTS[event.name]?.(event.data);
      soon();
    },
    live(fresh) {
      lost = null;
      show($("door"), false);
      show($("main"), true);
      show($("leave"), token.get() !== null);
      if (!plots) {
        plots = charts($("charts"), points);
        plots.rebuild();
      }
      if (fresh) {
        landed.clear();
        past().catch((error) => (trouble = error.message));
      }
      soon();
    },
    lost(why) {
      lost = why;
      soon();
    },
    refused(status, why) {
      const tried = token.get() !== null;
      token.forget();
      knock(tried || status === 403 ? `${why[0].toUpperCase()}${why.slice(1)}.` : "");
    },
  });
}

/** Show the door, and nothing of what was seen. */
function knock(why) {
  end();
  moment = hello = null;
  lost = trouble = null;
  points.length = 0;
  landed.clear();
  table.set([]);
  show($("main"), false);
  show($("leave"), false);
  show($("door"), true);
  put($("who"), "");
  put($("headline"), "");
  put($("door-error"), why);
  link("Locked", "quiet");
  $("token").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("token").value.trim());
  $("token").value = "";
  put($("door-error"), "");
  enter();
});
$("leave").addEventListener("click", () => {
  token.forget();
  knock("");
});
$("span").addEventListener("click", (event) => {
  const span = Number(event.target.dataset.span);
  if (!span) return;
  for (const button of $("span").children) button.setAttribute("aria-pressed", String(button === event.target));
  plots.show(span);
});
themes(() => plots?.rebuild());
enter();
