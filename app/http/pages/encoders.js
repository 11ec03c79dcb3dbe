// The encoders as a ring, in the order of their round; the hand points at who is next.

import { byId, make, makeSvg, setAttribute, setHidden, setText } from "./dom.js";
import { NONE, percent, short, words } from "./format.js";

const [OUTER, INNER] = [52, 34];
const GAP = 0.035; // radians between two arcs
const LEAST = 0.02; // an encoder without requests keeps a sliver, so that the round is whole

export class EncodersView {
  #drawn = "";

  show({ encoders, nodes, encoder_policy: policy }) {
    const urls = encoders.urls;
    setHidden(byId("encoders"), urls.length === 0);
    if (!urls.length) return;
    const byUrl = new Map(nodes.map((node) => [node.url, node]));
    const slots = urls.map((url) => ({ url, share: byUrl.has(url) ? byUrl.get(url).share : 0, state: byUrl.get(url)?.state ?? "unknown", next: url === encoders.next }));
    setText(byId("encoders-policy"), words(policy ?? ""));
    const drawn = JSON.stringify(slots);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.#ring(slots, encoders);
    this.#list(slots);
  }

  #ring(slots, encoders) {
    const total = slots.reduce((sum, slot) => sum + slot.share, 0);
    const weights = slots.map((slot) => (total > 0 ? Math.max(LEAST, slot.share / total) : 1));
    const whole = weights.reduce((sum, weight) => sum + weight, 0);
    let at = -Math.PI / 2;
    const parts = [];
    slots.forEach((slot, i) => {
      const turn = (2 * Math.PI * weights[i]) / whole;
      const gap = slots.length > 1 ? Math.min(GAP, turn / 3) : 0;
      parts.push(makeSvg("path", { class: slot.next ? "arc next" : "arc", d: arc(at + gap / 2, at + turn - gap / 2) }));
      const middle = at + turn / 2;
      if (turn > 0.3) {
        const [x, y] = polar((OUTER + INNER) / 2, middle);
        parts.push(makeSvg("text", { x, y, class: slot.next ? "number next" : "number", text: String(i + 1) }));
      }
      if (slot.next) {
        const points = [polar(INNER - 2, middle), polar(INNER - 10, middle - 0.2), polar(INNER - 10, middle + 0.2)];
        parts.push(makeSvg("polygon", { class: "hand", points: points.map((point) => point.join(",")).join(" ") }));
      }
      at += turn;
    });
    // The place in this list, not the shared cursor, which counts from 0 and without end.
    const next = slots.findIndex((slot) => slot.next) + 1;
    parts.push(makeSvg("text", { class: "cursor", x: 0, y: 0, text: next ? String(next) : NONE }), makeSvg("text", { class: "caption", x: 0, y: 12, text: "next" }));
    byId("ring").replaceChildren(...parts);
    const shares = slots.map((slot, i) => `${i + 1}: ${short(slot.url)} ${percent(slot.share)}`).join("; ");
    setText(byId("ring-label"), `Next is ${next ? `${next}: ${short(encoders.next)}` : "not fixed"}. ${shares}`);
  }

  #list(slots) {
    const items = slots.map((slot) => {
      const note = [slot.state === "ready" ? "" : words(slot.state), slot.next ? "next" : ""].filter(Boolean).join(", ");
      const item = make("li", {}, make("span", { class: "outside url", text: short(slot.url), title: slot.url }), make("b", { text: percent(slot.share) }), make("span", { class: "note", text: note }));
      setAttribute(item, "class", slot.next ? "next" : null);
      return item;
    });
    byId("encoders-list").replaceChildren(...items);
  }
}

function polar(radius, angle) {
  return [(radius * Math.cos(angle)).toFixed(2), (radius * Math.sin(angle)).toFixed(2)];
}

function arc(from, to) {
  // One arc can't be a whole turn: its ends would be one point.
  const end = Math.min(to, from + 2 * Math.PI - 0.001);
  const large = end - from > Math.PI ? 1 : 0;
  const [a, b, c, d] = [polar(OUTER, from), polar(OUTER, end), polar(INNER, end), polar(INNER, from)].map((point) => point.join(" "));
  return `M${a} A${OUTER} ${OUTER} 0 ${large} 1 ${b} L${c} A${INNER} ${INNER} 0 ${large} 0 ${d} Z`;
}
