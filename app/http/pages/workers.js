// Workers, and what each has in its ledger.

import { arrange, byId, Keyed, make, makeSvg, setAttribute, setHidden, setText } from "./dom.js";
import { count, duration, natural, plural, short } from "./format.js";
import { leaseEnds, runsOut } from "./judge.js";

const SEGMENTS = 40;

export class WorkersView {
  constructor() {
    this.rows = new Keyed((id) => new Row(id));
  }

  show({ workers }) {
    setHidden(byId("workers"), workers.length === 0);
    setText(byId("workers-count"), count(workers.length));
    const ending = leaseEnds(workers);
    const longest = Math.max(ending, ...workers.map((worker) => worker.lease_s));
    const most = Math.max(1, ...workers.map((worker) => worker.unfinished));
    const sorted = [...workers].sort((a, b) => runsOut(b, ending) - runsOut(a, ending) || natural(a.id, b.id));
    const rows = this.rows.update(sorted.map((worker) => ({ ...worker, ending, longest, most })), (worker) => worker.id);
    arrange(byId("workers-list"), rows.map((row) => row.element));
  }
}

class Row {
  constructor(id) {
    this.drawn = "";
    this.ledger = [];
    this.lease = make("span", { class: "lease" });
    this.leaseFill = make("i");
    this.leaseBar = make("span", { class: "track thin", role: "img" }, this.leaseFill);
    this.strip = makeSvg("svg", { class: "strip", role: "img", viewBox: "0 0 300 10", preserveAspectRatio: "none" });
    this.unfinished = make("b");
    this.list = make("dl");
    this.details = make("details", { toggle: () => this.#list() }, make("summary", {}, this.unfinished), this.list);
    this.element = make("li", {}, make("span", { class: "id outside", text: id }), this.lease, this.leaseBar, this.strip, this.details);
  }

  update(worker) {
    const out = runsOut(worker, worker.ending);
    const left = Math.max(0, worker.lease_s);
    this.element.classList.toggle("grave", out);
    const unknown = worker.lease_s === null;
    setText(this.lease, unknown ? "lease unknown" : left ? `lease ${left.toFixed(1)} s${out ? ", runs out" : ""}` : "lease is over");
    this.leaseFill.style.transform = `scaleX(${Math.min(1, left / worker.longest).toFixed(3)})`;
    setAttribute(this.leaseBar, "aria-label", unknown ? "lease unknown" : `${duration(left)} of its lease left`);
    this.ledger = Object.entries(worker.nodes).filter(([, n]) => n > 0).sort(([a], [b]) => natural(a, b));
    setText(this.unfinished, worker.unfinished ? `${count(worker.unfinished)} unfinished on ${plural(this.ledger.length, "node")}` : "nothing unfinished");
    const drawn = `${worker.most} ${this.ledger.map(([, n]) => n)}`;
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.#draw(worker.most);
    }
    this.#list();
  }

  /** One piece a node, as wide as its count, on the scale of the busiest worker. */
  #draw(most) {
    const pieces = this.ledger.slice(0, SEGMENTS).map(([, n]) => n);
    const rest = this.ledger.slice(SEGMENTS).reduce((sum, [, n]) => sum + n, 0);
    if (rest) pieces.push(rest);
    let x = 0;
    const rects = pieces.map((n) => {
      const width = (300 * n) / most;
      const rect = makeSvg("rect", { x: x.toFixed(2), y: 0, height: 10, width: Math.max(0.4, width - 1.2).toFixed(2) });
      x += width;
      return rect;
    });
    this.strip.replaceChildren(...rects);
    const label = this.ledger.slice(0, 5).map(([url, n]) => `${short(url)} ${n}`).join(", ");
    setAttribute(this.strip, "aria-label", label ? `Ledger: ${label}${this.ledger.length > 5 ? ", ..." : ""}` : "Ledger: empty");
  }

  #list() {
    if (!this.details.open) return;
    const lines = this.ledger.flatMap(([url, n]) => [make("dt", { class: "outside", text: short(url) }), make("dd", { text: count(n) })]);
    this.list.replaceChildren(...lines);
  }
}
