// The lines at the top: how many serve, and what is wrong, worst first.

import { arrange, byId, Keyed, make, setAttribute, setHidden, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { serves, troubles } from "./judge.js";

const LINES = 8;

export class Summary {
  /** `onShow(what)`: the nodes that a line speaks of are to be shown. */
  constructor(onShow) {
    this.lines = new Keyed(() => new Line(onShow));
    this.told = null;
  }

  show(state) {
    const { nodes, workers } = state;
    const ready = nodes.filter(serves).length;
    const sum = (items, name) => items.reduce((total, item) => total + item[name], 0);
    this.#figure("nodes", count(ready), `of ${count(nodes.length)}`);
    const up = state.redis.up;
    const alone = up ? "" : "of this worker only";
    const isSplit = nodes.some((node) => node.role === "Prefill" || node.role === "Encode");
    this.#figure("unfinished", count(sum(nodes, "unfinished")), "", alone || (isSplit ? "a split request counts on each of its nodes" : ""));
    // A split request is counted where it ends, not twice.
    const last = nodes.filter((node) => node.role === "Hybrid" || node.role === "Decode");
    const requests = up ? sum(last, "requests") : null;
    const rate = Math.round(requests / 6) / 10;
    this.#figure("requests", count(requests), up && rate ? `${count(rate)} a second` : "", up ? "" : "unknown");
    this.#figure("workers", count(workers.length), "", up ? "" : "this worker only");

    const found = troubles(state);
    const bad = found.filter((trouble) => trouble.level === "bad").length;
    const shown = found.slice(0, LINES);
    if (found.length > LINES) shown.push({ level: "note", key: "more", text: `and ${plural(found.length - LINES, "more")}`.replace("mores", "more"), why: "", show: null });
    if (!found.length) shown.push({ level: "good", key: "well", text: "All is well", why: `${plural(ready, "node")} ready, every breaker closed, Redis there`, show: null });
    arrange(byId("troubles"), this.lines.update(shown, (trouble) => trouble.key).map((line) => line.element));
    const title = found.length ? `${bad ? "✕" : "!"} ${found[0].text}` : `${ready}/${nodes.length} ready`;
    document.title = `${title} · Evenhand`;
    this.#speak(found);
  }

  #figure(name, value, beside, note = "") {
    const dd = byId(`figure-${name}`).lastElementChild;
    if (!dd.firstChild) dd.append(make("b"), " ", make("span", { class: "quiet" }), make("span", { class: "note quiet" }));
    const [figure, small, below] = dd.children;
    setText(figure, value);
    setText(small, beside);
    setText(below, note);
    setHidden(below, !note);
  }

  /** Said aloud when something else is wrong than before, not with each number. */
  #speak(found) {
    const keys = found.filter((trouble) => trouble.level !== "note").map((trouble) => trouble.key).join("\n");
    if (keys === this.told) return;
    this.told = keys;
    setText(byId("spoken"), found.length ? found.slice(0, 3).map((trouble) => trouble.text).join(". ") : "All is well");
  }
}

class Line {
  constructor(onShow) {
    this.trouble = null;
    this.text = make("b", { class: "outside" });
    this.why = make("span", { class: "outside why" });
    this.button = make("button", { type: "button", text: "Show", click: () => onShow(this.trouble.show) });
    this.element = make("li", {}, make("i", { class: "mark", "aria-hidden": "true" }), make("span", {}, this.text, " ", this.why), this.button);
  }

  update(trouble) {
    this.trouble = trouble;
    this.element.dataset.level = trouble.level;
    setText(this.text, trouble.text);
    setText(this.why, trouble.why);
    this.button.hidden = !trouble.show;
    setAttribute(this.button, "aria-label", `Show these: ${trouble.text}`);
  }
}
