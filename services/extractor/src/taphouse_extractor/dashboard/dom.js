// Elements from data. Text is always set as text, so nothing in a job's name can become markup.

export const $ = (id) => document.getElementById(id);

/** An element: `h("td", {class: "n"}, "text", child)`. Properties that are functions listen to their event. */
export function h(tag, facts = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set text only where it changed: selections and screen readers are left alone. */
export function put(element, text) {
  const said = text ?? "";
  if (element.textContent !== said) element.textContent = said;
}

export function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

/**
 * Make a container's children those of `items`, in order, keeping the element of each key. Focus within stays
 * where it is; when its element goes, `heir(element)` says what gets it.
 */
export function keyed(container, items, key, make, update, heir = () => null) {
  const held = container.contains(document.activeElement) ? document.activeElement : null;
  const old = new Map([...container.children].map((child) => [child.dataset.key, child]));
  const wanted = new Set(items.map((item) => String(key(item))));
  for (const [name, child] of old) if (!wanted.has(name)) child.remove();
  let place = container.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else container.insertBefore(child, place);
  }
  if (held && !container.contains(document.activeElement)) {
    (container.contains(held) ? held : heir(held))?.focus({ preventScroll: true }); // a moved one lets go of it too
  }
}

/** Ask before something that can't be undone. Resolves to whether it was wanted. */
export function ask(title, text, yes) {
  const dialog = $("ask");
  put($("ask-title"), title);
  put($("ask-text"), text);
  put($("ask-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

let toastTimer = 0;
export function toast(text) {
  const element = $("toast");
  put(element, text);
  show(element, true);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => show(element, false), 8000);
}
