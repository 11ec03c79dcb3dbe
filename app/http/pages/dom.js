// Making and changing elements. Every text goes in as text: what nodes, models and reasons are called is never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element; `attributes` as setAttribute takes them, but `text`, and functions, which are listeners. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// What does not change is not written: a page of hundreds of rows is laid out anew only where it differs.

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** Put `wanted` into `parent` in this order, moving as few as possible; others are taken out. The focus stays. */
export function arrange(parent, wanted) {
  const focused = document.activeElement;
  const staying = new Set(wanted);
  for (const child of [...parent.children]) if (!staying.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const child of wanted) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

/** Elements by key: made once, changed in place, dropped when their key is. */
export class Keyed {
  constructor(create) {
    this.create = create;
    this.entries = new Map();
  }

  /** The entries of `items`, in their order. `key(item)` says which is whose. */
  update(items, key) {
    const found = items.map((item) => {
      const name = key(item);
      let entry = this.entries.get(name);
      if (!entry) this.entries.set(name, (entry = this.create(name)));
      entry.update(item);
      return entry;
    });
    if (this.entries.size > found.length) {
      const names = new Set(items.map(key));
      for (const name of this.entries.keys()) if (!names.has(name)) this.entries.delete(name);
    }
    return found;
  }
}
