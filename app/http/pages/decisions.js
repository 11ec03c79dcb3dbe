// The stream of decisions, newest first. While one is open, or on demand, new ones wait.

import { byId, make, setHidden, setText } from "./dom.js";
import { clock, count, duration, NONE, number, short, words } from "./format.js";

const SHOWN = 100;
const NO_TROUBLE = new Set(["ok", "client_error", "aborted"]);

export class DecisionsView {
  #shown = []; // newest first: {decision, element}
  #waiting = []; // oldest first
  #paused = false;

  constructor() {
    this.list = byId("decisions-list");
    this.pause = byId("decisions-pause");
    this.which = byId("decisions-which");
    this.pause.addEventListener("click", () => {
      this.#paused = !this.#paused;
      this.#flow();
    });
    this.which.addEventListener("input", () => this.#filter());
    // toggle does not bubble, but it is captured.
    this.list.addEventListener("toggle", () => this.#flow(), true);
  }

  /** Redis is, through which workers share them. */
  set away(away) {
    setHidden(byId("decisions-away"), !away);
  }

  add(decisions) {
    const known = new Set([...this.#shown.map((entry) => entry.decision.id), ...this.#waiting.map((decision) => decision.id)]);
    this.#waiting.push(...decisions.filter((decision) => !known.has(decision.id))); // a new connection tells of old ones
    this.#waiting.splice(0, this.#waiting.length - SHOWN);
    this.#flow();
  }

  #flow() {
    const held = this.list.querySelector("details[open]") !== null;
    if (!this.#paused && !held) this.#release();
    const waiting = this.#waiting.length;
    this.pause.setAttribute("aria-pressed", String(this.#paused));
    setText(this.pause, this.#paused ? `Go on (${count(waiting)} new)` : "Pause");
    setText(byId("decisions-count"), !this.#paused && held && waiting ? `${count(waiting)} new wait for the open one` : "");
  }

  #release() {
    if (!this.#waiting.length) return;
    const fresh = this.#waiting.splice(0).reverse().map((decision) => ({ decision, element: entry(decision) }));
    this.#shown.unshift(...fresh);
    for (const old of this.#shown.splice(SHOWN)) old.element.remove();
    this.list.prepend(...fresh.map((one) => one.element));
    this.#filter();
  }

  #filter() {
    const all = this.which.value === "";
    let visible = 0;
    for (const { decision, element } of this.#shown) {
      const show = all || isTroubled(decision);
      setHidden(element, !show);
      visible += show;
    }
    const nothing = byId("decisions-nothing");
    setHidden(nothing, visible > 0);
    if (this.#shown.length) setText(nothing, "None of them met trouble.");
  }
}

/** Also those that ended well after a node had failed. */
const isTroubled = (decision) => !NO_TROUBLE.has(decision.outcome) || decision.legs.some(hasFailed);

const hasFailed = (leg) => leg.error !== null || leg.status >= 500;

/** The node that served it; of a split request all nodes of its way. */
function where(decision) {
  const way = decision.legs.filter((leg) => !hasFailed(leg));
  if (way.every((leg) => leg.stage === "request")) return decision.node ? short(decision.node) : "no node";
  const steps = way.map((leg) => (leg.stage === "request" ? short(leg.node) : `${words(leg.stage)} ${short(leg.node)}`));
  return [...new Set(steps)].join(" → ");
}

function entry(decision) {
  const { tries, legs } = decision;
  const again = legs.filter(hasFailed).length;
  const level = decision.outcome === "ok" ? "good" : NO_TROUBLE.has(decision.outcome) ? "note" : "bad";
  const span = (name, text, more = {}) => make("span", { class: name, text, ...more });
  const summary = make(
    "summary",
    {},
    make("time", { datetime: new Date(decision.time * 1000).toISOString(), text: clock(decision.time) }),
    make("span", { class: "outcome outside", "data-level": level }, make("i", { class: "mark", "aria-hidden": "true" }), `${words(decision.outcome)} ${decision.status ?? ""}`),
    span("model outside", decision.model ?? NONE, { title: decision.model ?? "" }),
    make("span", { class: "to" }, span("outside url", where(decision), { title: where(decision) }), again ? span("again", `${count(again)} failed before`) : ""),
    make("span", { class: "took" }, make("b", { text: duration(decision.seconds) }), span("quiet", decision.first_byte_s === null ? "" : `first byte ${duration(decision.first_byte_s)}`)),
  );
  const body = make("div", { class: "journey" });
  const details = make("details", {
    toggle: () => {
      if (details.open && !body.firstChild) body.append(...tries.map(tryTable), legsTable(legs), about(decision));
    },
  }, summary, body);
  return make("li", {}, details);
}

function table(caption, columns, rows) {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col", text: name })));
  return make("div", { class: "scroll" }, make("table", {}, make("caption", { class: "outside", text: caption }), make("thead", {}, head), make("tbody", {}, ...rows)));
}

/** Who could have been chosen, with the counts of that very moment. */
function tryTable(one) {
  const scores = one.candidates.map((candidate) => candidate.score).filter((score) => score !== null);
  const worst = Math.max(...scores, 0);
  const rows = one.candidates.map((candidate) => {
    const chosen = candidate.node === one.node;
    const bar = make("i");
    bar.style.transform = `scaleX(${worst > 0 && candidate.score !== null ? (candidate.score / worst).toFixed(3) : 0})`;
    const name = make("th", { scope: "row" }, make("span", { class: "outside url", text: short(candidate.node) }), chosen ? make("span", { class: "chosen", text: "chosen" }) : "");
    const score = make("td", {}, make("span", { class: "score" }, make("b", { text: number(candidate.score) }), make("span", { class: "track thin", "aria-hidden": "true" }, bar)));
    const cells = [number(candidate.unfinished), number(candidate.speed), duration(candidate.mean_latency_s)];
    return make("tr", { class: chosen ? "is-chosen" : null }, name, score, ...cells.map((text) => make("td", { text })));
  });
  if (one.left_off) rows.push(make("tr", {}, make("td", { colspan: 5, class: "quiet", text: `and ${count(one.left_off)} more candidates` })));
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: 5, class: "quiet", text: "The candidates were not noted." })));
  const score = one.score === null ? "" : `, score ${number(one.score)}`;
  const rule = scores.length ? "; less is better" : ""; // in turn, or by chance
  return table(`${words(one.stage)}: ${one.node ? short(one.node) : "no node"}${score}${rule}`, ["Candidate", "Score", "Unfinished", "Speed", "Mean latency"], rows);
}

function legsTable(legs) {
  const rows = legs.map((leg) =>
    make(
      "tr",
      { class: hasFailed(leg) ? "failed" : null },
      make("th", { scope: "row", text: words(leg.stage) }),
      make("td", {}, make("span", { class: "outside url", text: short(leg.node) })),
      make("td", { text: leg.status === null ? NONE : String(leg.status) }),
      make("td", { text: duration(leg.seconds) }),
      make("td", { class: "outside", text: leg.error ?? "" }),
    ),
  );
  return rows.length ? table("What the nodes said", ["Stage", "Node", "Status", "Took", "Error"], rows) : "";
}

function about(decision) {
  const pairs = [["Request", decision.request], ["Worker", decision.worker], ["Path", decision.path]];
  return make("dl", { class: "about-it" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { class: "outside", text: value ?? NONE }))));
}
