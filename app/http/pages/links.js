// Links between prefill and decode nodes as a matrix, and what was handed over.

import { byId, make, setHidden, setText } from "./dom.js";
import { count, natural, plural, short, words } from "./format.js";

export class LinksView {
  #pairs = "";
  #states = "";
  #counts = "";
  #cells = new Map();

  show({ links, nodes, sessions, handovers }) {
    const counts = Object.entries(handovers);
    const apart = links.length > 0 || sessions > 0 || nodes.some((node) => node.role === "Prefill");
    setHidden(byId("links"), links.length === 0 && sessions === 0 && counts.length === 0);
    setText(byId("links-name"), apart ? "Prefill to decode" : "Handed over");
    setHidden(byId("links-scroll"), links.length === 0);
    setHidden(byId("links-legend"), links.length === 0);
    setText(byId("links-count"), links.length ? plural(links.length, "link") : "");
    this.#matrix(links);
    this.#counters(apart ? [["caches held", sessions], ...counts] : counts);
  }

  #matrix(links) {
    const states = JSON.stringify(links);
    if (states === this.#states) return;
    this.#states = states;
    const rows = [...new Set(links.map((link) => link.prefill))].sort(natural);
    const columns = [...new Set(links.map((link) => link.decode))].sort(natural);
    const pairs = JSON.stringify([rows, columns]);
    if (pairs !== this.#pairs) {
      this.#pairs = pairs;
      this.#build(rows, columns);
    }
    const known = new Map(links.map((link) => [`${link.prefill}\n${link.decode}`, link.state]));
    const name = (state) => (state === "stale" ? "stale: a node of it is down" : words(state));
    for (const [pair, cell] of this.#cells) {
      const state = known.get(pair) ?? "none";
      cell.dataset.link = state;
      cell.title = `${cell.dataset.names}: ${name(state)}`;
      setText(cell.lastChild, name(state));
    }
    const tally = new Map();
    for (const { state } of links) tally.set(state, (tally.get(state) ?? 0) + 1);
    byId("links-legend").replaceChildren(
      ...[...tally].map(([state, n]) => make("span", { "data-link": state }, make("i", { class: "mark", "aria-hidden": "true" }), `${count(n)} ${name(state)}`)),
    );
  }

  #build(rows, columns) {
    this.#cells = new Map();
    const head = columns.map((url) => make("th", { scope: "col", title: url }, make("span", { class: "outside", text: short(url) })));
    const lines = rows.map((prefill) => {
      const cells = columns.map((decode) => {
        const cell = make("td", { "data-names": `${short(prefill)} to ${short(decode)}` }, make("i", { class: "mark", "aria-hidden": "true" }), make("span", { class: "unseen" }));
        this.#cells.set(`${prefill}\n${decode}`, cell);
        return cell;
      });
      return make("tr", {}, make("th", { scope: "row", class: "outside", title: prefill, text: short(prefill) }), ...cells);
    });
    const corner = make("th", { scope: "col", class: "corner" }, make("span", { class: "quiet", text: "prefill \\ decode" }));
    byId("links-table").replaceChildren(make("thead", {}, make("tr", {}, corner, ...head)), make("tbody", {}, ...lines));
  }

  #counters(pairs) {
    const now = JSON.stringify(pairs);
    if (now === this.#counts) return;
    this.#counts = now;
    byId("handovers").replaceChildren(...pairs.map(([what, n]) => make("div", {}, make("dt", { class: "outside", text: words(what) }), make("dd", { text: count(n) }))));
  }
}
