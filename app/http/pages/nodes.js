// The table of nodes: a row for each URL, made once and changed in place.

import { arrange, byId, Keyed, make, makeSvg, setAttribute, setHidden, setText } from "./dom.js";
import { count, duration, mean, natural, niceCeiling, NONE, number, percent, plural, short, words } from "./format.js";
import { byRole, isTroubled, severity } from "./judge.js";

const HOLD_MS = 4000; // rows do not move away under a hand
const MANY = 60; // beyond so many rows nothing glides
const SPARK = { width: 84, height: 16, points: 15 };
const STATES = ["ready", "pending", "asleep", "draining", "down", "gone"];
const ROLES = ["Hybrid", "Prefill", "Decode", "Encode"];

const byUrl = (a, b) => natural(a.url, b.url);
const COLUMNS = [
  { key: "node", label: "Node", compare: byUrl },
  { key: "role", label: "Role", compare: (a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) },
  { key: "state", label: "State, breaker", title: "trouble, worst first", compare: (a, b) => severity(b) - severity(a) || ROLES.indexOf(a.role) - ROLES.indexOf(b.role) },
  { key: "load", label: "Unfinished", title: "load, highest first", compare: (a, b) => b.load - a.load || b.unfinished - a.unfinished },
  { key: "latency", label: "Latency", title: "latency, longest first", compare: (a, b) => (b.mean_s ?? -1) - (a.mean_s ?? -1) },
  { key: "share", label: "Last minute", title: "share, largest first", compare: (a, b) => b.share - a.share || b.requests - a.requests },
];

export class NodesView {
  /** `onLeave(node, drain)`: somebody wants a node drained, or removed. */
  constructor(onLeave) {
    this.rows = new Keyed((url) => new Row(url, onLeave));
    this.nodes = [];
    this.sort = { key: "state", reversed: false };
    this.touchedAt = -Infinity;
    this.body = byId("nodes-body");
    this.filters = { text: byId("filter-text"), model: byId("filter-model"), state: byId("filter-state") };
    this.#makeHead();
    for (const input of Object.values(this.filters)) input.addEventListener("input", () => this.draw(true));
    for (const event of ["pointermove", "pointerdown", "keydown", "focusin"]) {
      this.body.addEventListener(event, () => (this.touchedAt = performance.now()));
    }
  }

  show(state) {
    const roles = byRole(state.nodes);
    this.nodes = state.nodes.map((node) => {
      const common = roles.get(node.role);
      const load = node.unfinished / (node.speed ?? common.speed);
      return { ...node, common, load, mean_s: mean(node.latency_s) };
    });
    for (const [role, common] of roles) {
      common.scale = niceCeiling(common.most);
      // In whole percents and for all rows at once: a row's own style changes only with its own load.
      this.body.style.setProperty(`--fair-${role}`, `${Math.round((100 * common.fair) / common.scale)}%`);
    }
    this.#offer(this.filters.model, "all models", state.models, (model) => model);
    this.#offer(this.filters.state, "all states", this.#statesOf(state.nodes), words);
    this.draw(false);
  }

  /** Show only these; `what` has some of text, model, state. */
  filter(what) {
    for (const [name, input] of Object.entries(this.filters)) {
      const value = what[name] ?? "";
      if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === value)) {
        input.append(make("option", { value, text: words(value) }));
      }
      input.value = value;
    }
    this.draw(true);
  }

  /** `now`: the order may change although a hand is there, because it asked for it. */
  draw(now) {
    const chosen = this.#chosen();
    const total = this.nodes.length;
    setText(byId("nodes-count"), chosen.length === total ? count(total) : `${count(chosen.length)} of ${count(total)}`);
    const nothing = byId("nodes-nothing");
    setHidden(nothing, chosen.length > 0);
    setText(nothing, total ? "No node is like that." : "No node is registered. Engines register here, or add one.");
    setHidden(byId("nodes-legend"), chosen.length === 0);
    setHidden(byId("nodes-scroll"), chosen.length === 0);
    this.body.classList.toggle("many", chosen.length > MANY);
    const held = !now && performance.now() - this.touchedAt < HOLD_MS;
    if (!held) chosen.sort(this.#compare());
    const rows = this.rows.update(chosen, (node) => node.url);
    if (held) {
      const place = new Map([...this.body.children].map((element, i) => [element, i]));
      rows.sort((a, b) => (place.get(a.element) ?? Infinity) - (place.get(b.element) ?? Infinity) || 0);
    }
    arrange(this.body, rows.map((row) => row.element));
  }

  #chosen() {
    const text = this.filters.text.value.trim().toLowerCase();
    const [model, state] = [this.filters.model.value, this.filters.state.value];
    return this.nodes.filter(
      (node) =>
        (!model || node.models.includes(model)) &&
        (!state || node.state === state || node.breaker === state || (state === "troubled" && isTroubled(node))) &&
        (!text || textOf(node).includes(text)),
    );
  }

  #compare() {
    const { compare } = COLUMNS.find((column) => column.key === this.sort.key);
    const sign = this.sort.reversed ? -1 : 1;
    return (a, b) => sign * compare(a, b) || byUrl(a, b);
  }

  #statesOf(nodes) {
    const there = new Set(nodes.flatMap((node) => [node.state, node.breaker]));
    return ["troubled", ...[...STATES, "open", "half_open"].filter((name) => there.has(name))];
  }

  #offer(select, all, values, name) {
    const wanted = new Set(values);
    if (select.value) wanted.add(select.value); // what is chosen stays, also when nothing is like it any more
    const now = JSON.stringify([...wanted]);
    if (select.dataset.offered === now || document.activeElement === select) return; // not under an open list
    const { value } = select;
    select.replaceChildren(make("option", { value: "", text: all }), ...[...wanted].map((one) => make("option", { value: one, text: name(one) })));
    select.value = value;
    select.dataset.offered = now;
  }

  // --- the head

  #makeHead() {
    const head = byId("nodes-head");
    const select = byId("sort");
    for (const column of COLUMNS) {
      const button = make("button", { type: "button", click: () => this.#sortBy(column.key), text: column.label });
      head.append(make("th", { role: "columnheader", scope: "col", class: column.key, "data-key": column.key }, button));
      select.append(make("option", { value: column.key, text: `by ${column.title || column.label.toLowerCase()}` }));
    }
    head.append(make("th", { role: "columnheader", scope: "col", class: "manage" }, make("span", { class: "unseen", text: "Drain or remove" })));
    select.addEventListener("input", () => this.#sortBy(select.value, false));
    this.#markHead();
  }

  #sortBy(key, reversed = this.sort.key === key && !this.sort.reversed) {
    this.sort = { key, reversed };
    this.#markHead();
    this.draw(true);
  }

  #markHead() {
    const { key, reversed } = this.sort;
    for (const th of byId("nodes-head").children) {
      const falls = !["node", "role"].includes(key) !== reversed;
      setAttribute(th, "aria-sort", th.dataset.key === key ? (falls ? "descending" : "ascending") : null);
    }
    byId("sort").value = key;
  }
}

function textOf(node) {
  return [node.url, node.role, node.state, node.reason, node.source ?? "", words(node.breaker), ...node.models].join("\n").toLowerCase();
}

class Row {
  constructor(url, onLeave) {
    this.last = {};
    const cell = (name, ...children) => make("td", { role: "cell", class: name }, ...children);
    const span = (name, ...children) => make("span", { class: name }, ...children);
    this.models = span("models outside");
    this.more = make("details", { class: "more", toggle: () => this.#listModels() }, make("summary"), make("p", { class: "outside" }));
    this.source = span("source outside");
    this.reason = make("td", { role: "cell", class: "reason outside", "aria-colspan": COLUMNS.length + 1 }); // below all others
    this.role = span("role-name");
    this.state = make("span", { class: "health" }, make("i", { class: "mark", "aria-hidden": "true" }), make("span"));
    this.breaker = make("span", { class: "breaker" }, make("i", { class: "mark", "aria-hidden": "true" }), make("span"));
    this.failures = span("failures quiet");
    this.unfinished = make("b");
    this.speed = span("quiet");
    this.load = make("i");
    this.loadBar = make("span", { class: "track", role: "img" }, this.load, make("i", { class: "fair" }));
    this.latency = make("b");
    this.line = makeSvg("polyline", { fill: "none" });
    this.dot = makeSvg("circle", { r: 2 });
    this.spark = makeSvg("svg", { class: "spark", role: "img", width: SPARK.width, height: SPARK.height, viewBox: `0 0 ${SPARK.width} ${SPARK.height}` }, this.line, this.dot);
    this.share = make("b");
    this.requests = span("quiet");
    this.shareFill = make("i");
    this.shareBar = make("span", { class: "track thin", role: "img" }, this.shareFill);
    this.drain = make("button", { type: "button", text: "Drain", "aria-label": `Drain ${url}`, click: () => onLeave(this.last, true) });
    const remove = make("button", { type: "button", text: "Remove", "aria-label": `Remove ${url}`, click: () => onLeave(this.last, false) });
    this.element = make(
      "tr",
      { role: "row" },
      make("th", { role: "rowheader", scope: "row", class: "node" }, make("span", { class: "url outside", text: short(url), title: url }), make("span", { class: "of" }, this.models, this.more, this.source)),
      cell("role", this.role),
      cell("state", this.state, this.breaker, this.failures),
      cell("load", span("figures-line", this.unfinished, this.speed), this.loadBar),
      cell("latency", this.latency, this.spark),
      cell("share", span("figures-line", this.share, this.requests), this.shareBar),
      cell("manage", this.drain, remove),
      this.reason,
    );
  }

  /** Only what differs from the last time touches the page. */
  update(node) {
    const last = this.last;
    const changed = (...names) => names.some((name) => node[name] !== last[name]);
    this.last = node;
    if (changed("role")) {
      setText(this.role, node.role);
      this.element.dataset.role = node.role;
      this.loadBar.style.setProperty("--fair", `var(--fair-${ROLES.includes(node.role) ? node.role : "none"}, 0%)`);
    }
    if (changed("state", "breaker", "failures", "reason")) this.#showState(node);
    if (node.models.join("\n") !== last.models?.join("\n")) this.#showModels(node);
    if (changed("source")) {
      setText(this.source, node.source ? `from ${node.source}` : "");
      setHidden(this.source, !node.source);
    }
    if (changed("unfinished", "speed", "load") || node.common.scale !== last.common?.scale) this.#showLoad(node);
    if (node.latency_s.join() !== last.latency_s?.join()) this.#showLatency(node);
    if (changed("share", "requests")) this.#showShare(node);
  }

  #showState(node) {
    this.element.classList.toggle("troubled", isTroubled(node));
    this.element.classList.toggle("grave", severity(node) > 5);
    this.state.dataset.state = node.state;
    setText(this.state.lastChild, words(node.state));
    this.breaker.dataset.breaker = node.breaker;
    setText(this.breaker.lastChild, `breaker ${words(node.breaker)}`);
    setText(this.failures, node.failures ? `${count(node.failures)} failed in a row` : "");
    setHidden(this.failures, !node.failures);
    setText(this.reason, node.reason || "");
    setHidden(this.reason, !node.reason);
    setHidden(this.drain, node.state === "draining");
  }

  #showModels(node) {
    setText(this.models, node.models.slice(0, 2).join(", ") || "no models known");
    setAttribute(this.models, "title", node.models.slice(0, 2).join(", "));
    setHidden(this.more, node.models.length < 3);
    if (node.models.length < 3) return;
    const rest = node.models.length - 2;
    setText(this.more.firstChild, `+${count(rest)}`);
    setAttribute(this.more.firstChild, "aria-label", plural(rest, "more model"));
    this.#listModels();
  }

  #listModels() {
    if (this.more.open) setText(this.more.lastChild, this.last.models.slice(2).join(", "));
  }

  #showLoad(node) {
    const { common } = node;
    setText(this.unfinished, count(node.unfinished));
    setText(this.speed, node.speed !== null ? `speed ${number(node.speed)}` : common.speedsGiven ? `speed ~${number(common.speed)}` : "");
    const ratio = Math.min(1, node.load / common.scale);
    this.load.style.transform = `scaleX(${ratio.toFixed(4)})`;
    const speed = node.speed !== null ? `at speed ${number(node.speed)}` : "no speed given";
    setAttribute(this.loadBar, "aria-label", `${count(node.unfinished)} unfinished, ${speed}: ${number(node.load)} of ${number(common.scale)}`);
  }

  #showLatency(node) {
    const values = node.latency_s.slice(-SPARK.points);
    setText(this.latency, duration(node.mean_s));
    this.spark.classList.toggle("empty", values.length === 0);
    if (!values.length) {
      setAttribute(this.spark, "aria-label", "no latencies yet");
      setAttribute(this.line, "points", "");
      return;
    }
    const [longest, step] = [Math.max(...values), (SPARK.width - 6) / (SPARK.points - 1)];
    const [bottom, height] = [SPARK.height - 2, SPARK.height - 5];
    const points = values.map((s, i) => {
      const x = SPARK.width - 3 - (values.length - 1 - i) * step;
      return [x.toFixed(1), (bottom - (longest > 0 ? s / longest : 0) * height).toFixed(1)];
    });
    setAttribute(this.line, "points", points.map((point) => point.join(",")).join(" "));
    const [x, y] = points.at(-1);
    setAttribute(this.dot, "cx", x);
    setAttribute(this.dot, "cy", y);
    const newest = duration(values.at(-1));
    setAttribute(this.spark, "aria-label", `Last ${values.length} latencies: newest ${newest}, longest ${duration(longest)}`);
  }

  #showShare(node) {
    setText(this.share, node.requests || node.share ? percent(node.share) : NONE);
    setText(this.requests, node.requests ? count(node.requests) : "");
    setAttribute(this.requests, "title", "given to it in the last minute");
    this.shareFill.style.transform = `scaleX(${Math.min(1, node.share ?? 0).toFixed(4)})`;
    const label = node.share === null ? "unknown while Redis is away" : `given ${count(node.requests)} in the last minute, ${percent(node.share)} of its role`;
    setAttribute(this.shareBar, "aria-label", label);
  }
}
