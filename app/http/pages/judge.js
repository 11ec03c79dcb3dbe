// What is wrong, from a state alone. No DOM.

import { age, natural, plural, short } from "./format.js";

const LEASE_S = 8; // --lease-s as it is by default
const FEW = 3; // names in a line

const DEAD = new Set(["down", "gone"]);

/**
 * The state as far as it is known. While Redis is away the answering worker knows its own counts alone: what all workers
 * gave to nodes in the last minute, and how long a lease lasts, is null. Links of a dead node are stale.
 */
export function known(state) {
  const dead = new Set(state.nodes.filter((node) => DEAD.has(node.state)).map((node) => node.url));
  const links = state.links.map((link) => (dead.has(link.prefill) || dead.has(link.decode) ? { ...link, state: "stale" } : link));
  if (state.redis.up) return { ...state, links };
  const nodes = state.nodes.map((node) => ({ ...node, requests: null, share: null }));
  const workers = state.workers.map((worker) => ({ ...worker, lease_s: null }));
  return { ...state, links, nodes, workers };
}

/** How much a node needs a person, 0: not at all. Sorts the table. */
export function severity(node) {
  if (node.state === "down") return 7;
  if (node.breaker === "open") return 6;
  if (node.state === "gone") return 5;
  if (node.breaker === "half_open") return 4;
  if (node.state === "asleep") return 3;
  if (node.state === "pending") return 2;
  if (node.state !== "ready") return 1;
  return 0;
}

export const serves = (node) => node.state === "ready" && node.breaker === "closed";

/** Whether a node is worth a look: all but those that serve, or leave because somebody said so. */
export const isTroubled = (node) => severity(node) > 1;

/** Below this a lease is running out: workers renew theirs long before. */
export const leaseEnds = (workers) => Math.max(LEASE_S, ...workers.map((worker) => worker.lease_s)) * 0.4;
export const runsOut = (worker, ending) => worker.lease_s !== null && worker.lease_s < ending;

/** Worst first: {key, level: bad|warn|note, text, why, show: what the filter of nodes is to be, or null}. */
export function troubles(state) {
  const found = [];
  const add = (level, key, text, why = "", show = null) => found.push({ level, key, text, why, show });
  const { nodes, workers, redis } = state;

  if (!redis.up) {
    add("bad", "redis", "Redis is away", `${(redis.reason || "no reason known").replace(/[.\s]*$/, ".")} Each worker decides on its own counts. Shown are the last known nodes with the counts of one worker only; decisions are not shared.`);
  }
  if (nodes.length === 0) add("bad", "empty", "No node is registered");
  for (const { role, model, urls } of unserved(nodes)) {
    add("bad", `unserved ${role} ${model}`, `No ${role} node serves ${model}`, `${plural(urls.length, "node has it", "nodes have it")}: ${names(urls)}`, { model });
  }
  const of = (check) => nodes.filter(check);
  const tell = (level, check, one, many, show) => {
    const them = of(check).sort((a, b) => natural(a.url, b.url));
    if (!them.length) return;
    const reasons = new Set(them.map((node) => node.reason).filter(Boolean));
    const why = names(them.map((node) => node.url)) + (reasons.size === 1 ? `: ${[...reasons][0]}` : "");
    add(level, show.state, plural(them.length, one, many), why, show);
  };
  tell("bad", (node) => node.state === "down", "node down", "nodes down", { state: "down" });
  const alive = (node) => !DEAD.has(node.state); // of the others it is told already
  tell("bad", (node) => alive(node) && node.breaker === "open", "breaker open", "breakers open", { state: "open" });
  const ending = leaseEnds(workers);
  for (const worker of workers) {
    if (runsOut(worker, ending)) {
      const why = worker.lease_s > 0 ? `${age(worker.lease_s)} left` : "it is over";
      add("bad", `lease ${worker.id}`, `The lease of worker ${worker.id} runs out`, `${why}, ${plural(worker.unfinished, "unfinished request")}`);
    }
  }
  tell("warn", (node) => alive(node) && node.breaker === "half_open", "breaker half open", "breakers half open", { state: "half_open" });
  tell("warn", (node) => node.state === "gone", "node gone", "nodes gone", { state: "gone" });
  tell("warn", (node) => node.state === "asleep", "node asleep", "nodes asleep", { state: "asleep" });
  tell("note", (node) => node.state === "pending", "node pending", "nodes pending", { state: "pending" });
  tell("note", (node) => node.state === "draining", "node draining", "nodes draining", { state: "draining" });
  for (const link of state.links.filter((link) => link.state === "failed").slice(0, FEW)) {
    add("warn", `link ${link.prefill} ${link.decode}`, "A link failed", `${short(link.prefill)} to ${short(link.decode)}`);
  }
  const order = ["bad", "warn", "note"];
  return found.sort((a, b) => order.indexOf(a.level) - order.indexOf(b.level));
}

/** Models that a role has nodes for, none of which serves. */
function unserved(nodes) {
  const kinds = new Map();
  for (const node of nodes) {
    for (const model of node.models) {
      const key = `${node.role} ${model}`;
      let kind = kinds.get(key);
      if (!kind) kinds.set(key, (kind = { role: node.role, model, urls: [], served: false }));
      kind.urls.push(node.url);
      kind.served ||= serves(node);
    }
  }
  return [...kinds.values()].filter((kind) => !kind.served);
}

function names(urls) {
  const more = urls.length > FEW ? ` and ${urls.length - FEW} more` : "";
  return urls.slice(0, FEW).map(short).join(", ") + more;
}

/** What a role's nodes have in common: {speed of those without, speedsGiven, most, fair}. */
export function byRole(nodes) {
  const roles = new Map();
  for (const node of nodes) {
    if (!roles.has(node.role)) roles.set(node.role, []);
    roles.get(node.role).push(node);
  }
  return new Map([...roles].map(([role, them]) => [role, commonOf(them)]));
}

function commonOf(nodes) {
  const given = nodes.map((node) => node.speed).filter((speed) => speed !== null);
  const speed = given.length ? given.reduce((sum, x) => sum + x, 0) / given.length : 1;
  const speedOf = (node) => (node.speed === null ? speed : node.speed);
  let [most, unfinished, capacity] = [0, 0, 0];
  for (const node of nodes) {
    most = Math.max(most, node.unfinished / speedOf(node));
    if (serves(node)) {
      unfinished += node.unfinished;
      capacity += speedOf(node);
    }
  }
  // Four requests on an average node fill a bar at least: one request on an idle fleet is no load.
  return { speed, speedsGiven: given.length > 0, most: Math.max(most, 4 / speed), fair: capacity ? unfinished / capacity : 0 };
}
