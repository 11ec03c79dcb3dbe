// The page, put together: what the feed says goes to the parts that show it.

import { DecisionsView } from "./decisions.js";
import { byId, setAttribute, setHidden, setText } from "./dom.js";
import { EncodersView } from "./encoders.js";
import { Feed } from "./feed.js";
import { age, words } from "./format.js";
import { known } from "./judge.js";
import { LinksView } from "./links.js";
import { Manage } from "./manage.js";
import { NodesView } from "./nodes.js";
import { Summary } from "./summary.js";
import { WorkersView } from "./workers.js";

const STALE_S = 3.5; // a state comes every second
const THEMES = ["system", "light", "dark"];

const decisions = new DecisionsView();
const feed = new Feed({ onState: take, onDecisions: (list) => decisions.add(list), onLink: showLink });
const manage = new Manage((path, body) => feed.post(path, body), say);
const nodes = new NodesView((node, drain) => manage.askLeave(node, drain));
const summary = new Summary((what) => {
  nodes.filter(what);
  byId("nodes").scrollIntoView({ block: "start" });
  byId("nodes").focus({ preventScroll: true });
});
const parts = [summary, nodes, new WorkersView(), new EncodersView(), new LinksView()];

// --- what comes

let newest = null;
let focusNodes = false; // the form that had the focus is gone

function take(state) {
  // Of several that came at once only the newest is drawn.
  if (newest === null) requestAnimationFrame(draw);
  newest = state;
}

function draw() {
  const state = known(newest);
  newest = null;
  decisions.away = !state.redis.up;
  manage.grace_s = state.grace_s;
  setHidden(byId("main"), false);
  setText(byId("about"), [state.version, state.serving, words(state.strategy)].filter(Boolean).join(" · "));
  for (const part of parts) part.show(state);
  if (focusNodes) byId("nodes").focus({ preventScroll: true });
  focusNodes = false;
}

function say(text) {
  setText(byId("spoken"), text);
  const link = byId("said");
  setText(link, text);
  setHidden(link, false);
  clearTimeout(say.timer);
  say.timer = setTimeout(() => setHidden(link, true), 6000);
}

// --- the connection

let link = { kind: "connecting" };

function showLink(now) {
  const before = link.kind;
  link = now;
  if (now.kind === "refused") askKey(now.why);
  else if (now.kind === "live" && before !== "live") keyTaken();
  tick();
}

/** How old what is shown is, and what is done about it. */
function tick() {
  const staleS = (performance.now() - feed.heardAt) / 1000;
  const everHeard = Number.isFinite(staleS);
  const stale = staleS > STALE_S;
  const shown = link.kind === "live" && stale ? "silent" : link.kind;
  const inS = Math.max(0, Math.ceil((link.retryAt - performance.now()) / 1000));
  const text = {
    connecting: "connecting",
    live: "live",
    silent: "silent",
    waiting: "not connected",
    refused: "needs a key",
    paused: "paused",
  }[shown];
  setAttribute(byId("link"), "data-kind", shown);
  setText(byId("link-text"), text);
  const telling = everHeard ? stale && link.kind !== "paused" : link.kind === "waiting";
  document.body.classList.toggle("is-stale", everHeard && telling);
  const old = everHeard ? `What is shown is ${age(staleS)} old.` : "";
  const why = link.kind === "waiting" ? `${link.why.replace(/[.\s]*$/, ".")} Asking again ${inS ? `in ${inS} s` : "now"}.` : link.kind === "refused" ? "" : "Waiting for the server.";
  const banner = byId("stale");
  setText(banner, [old, why].filter(Boolean).join(" "));
  setHidden(banner, !telling);
  if (telling !== tick.told) {
    tick.told = telling;
    if (telling) setText(byId("spoken"), banner.textContent);
  }
}

document.addEventListener("visibilitychange", () => {
  // Nobody looks: nothing is asked, and no decision is shared on its account.
  if (document.hidden) {
    if (link.kind !== "refused") feed.pause();
  } else if (link.kind === "paused") {
    feed.start();
  }
});
setInterval(tick, 1000);

// --- the key

function askKey(why) {
  setText(byId("key-why"), why);
  setHidden(byId("key-form"), false);
  byId("key").value = "";
  byId("key").focus();
  setHidden(byId("forget-key"), true);
}

function keyTaken() {
  focusNodes = !byId("key-form").hidden;
  setHidden(byId("key-form"), true);
  setHidden(byId("forget-key"), !feed.hasKey);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  // A header takes nothing else, and no key of Evenhand has anything else in it.
  if (/^[\x21-\x7e]+$/.test(key)) feed.use(key);
  else setText(byId("key-why"), "A key has visible ASCII characters only.");
});
byId("forget-key").addEventListener("click", () => location.reload());

// --- light and dark

function showTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
}

function themeOfLast() {
  try {
    return localStorage.getItem("evenhand-theme");
  } catch {
    return null; // no storage for this page: the system's theme then
  }
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  const theme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  showTheme(theme);
  try {
    localStorage.setItem("evenhand-theme", theme);
  } catch {
    // Then it holds as long as the page.
  }
});
showTheme(THEMES.includes(themeOfLast()) ? themeOfLast() : "system");

if (!document.hidden) feed.start();
else showLink({ kind: "paused" });
