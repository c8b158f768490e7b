// Server-sent events over fetch, because EventSource can't send a token.

import { headers, refusal } from "./api.js";

const SILENT_MS = 12000;
const FRESH_AFTER_MS = 60000;

/** Splits a stream's text into events: {name, id, data}. */
export function parser(emit) {
  let rest = "";
  return (text) => {
    rest += text;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", id: null, data: "" };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(":");
        if (colon < 1) continue;
        const value = line.slice(colon + 1).replace(/^ /, "");
        if (line.startsWith("event:")) event.name = value;
        else if (line.startsWith("id:")) event.id = value;
        else if (line.startsWith("data:")) event.data += value;
      }
      if (event.data) emit({ ...event, data: JSON.parse(event.data) });
    }
  };
}

/**
 * Watch until the service refuses. `on.event(event)`, `on.live()`, `on.lost(why)` while it tries again by
 * itself, `on.refused(status, why)` when it needs another token. Returns a function that ends it.
 */
export function watch(on) {
  let over = false;
  let lastId = null;
  let heard = 0;
  let tries = 0;
  let cut = null;

  async function once() {
    cut = new AbortController();
    const fresh = Date.now() - heard > FRESH_AFTER_MS;
    const more = lastId !== null && !fresh ? { "Last-Event-ID": lastId } : {};
    const answer = await fetch("v1/events", { headers: headers(more), signal: cut.signal, cache: "no-store" });
    if (answer.status === 401 || answer.status === 403) {
      over = true;
      on.refused(answer.status, await refusal(answer));
      return;
    }
    if (!answer.ok) throw new Error(await refusal(answer));
    on.live(fresh);
    const feed = parser((event) => {
      if (event.id !== null) lastId = event.id;
      on.event(event);
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      heard = Date.now();
      tries = 0;
      feed(part.value);
    }
  }

  const watchdog = setInterval(() => {
    if (cut && heard && Date.now() - heard > SILENT_MS) cut.abort();
  }, 2000);

  (async () => {
    while (!over) {
      try {
        await once();
      } catch (error) {
        if (over) break;
        on.lost(error.name === "AbortError" || error instanceof TypeError ? "The service can't be reached" : error.message);
        tries += 1;
      }
      if (!over) await new Promise((go) => setTimeout(go, Math.min(8000, 250 * 2 ** tries)));
    }
    clearInterval(watchdog);
  })();

  return () => {
    over = true;
    cut?.abort();
  };
}
