// The connection: /dashboard/events read as a stream, with the key in a header, which EventSource can't send.
// Owns the key, which is nowhere else and in no storage, and when to ask again.

const PAUSES_S = [1, 2, 4, 8, 15];
const SILENCE_S = 15; // the server says something every 10 s at least

/** An answer of the server that is no 2xx, with the server's own words. */
export class Refusal extends Error {
  constructor(status, message, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }

  /** `withKey`: whether one was sent. Where none was, the server tells how a program sends it. */
  static async of(response, withKey) {
    if (response.status === 401 && !withKey) return new Refusal(401, "This needs a reader key or an admin key.");
    let message = `The server answered ${response.status}.`;
    try {
      const said = (await response.json()).error.message;
      if (typeof said === "string" && said) message = said;
    } catch {
      // Something else than Evenhand answered, such as a proxy on the way.
    }
    return new Refusal(response.status, message, Number(response.headers.get("retry-after")) || 0);
  }
}

/** Server-sent events out of pieces of text. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
    this.name = "";
    this.data = [];
  }

  push(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  line(line) {
    if (line === "") {
      if (this.data.length) this.onEvent(this.name || "message", this.data.join("\n"));
      this.name = "";
      this.data = [];
    } else if (line.startsWith("event:")) {
      this.name = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

export class Feed {
  #key = "";
  #current = null; // AbortController of the attempt under way
  #timer = 0;
  #failures = 0;

  /** `onLink({kind, why, retryAt})`: connecting, live, waiting (retryAt: performance.now), refused or paused. */
  constructor({ onState, onDecisions, onLink }) {
    this.onState = onState;
    this.onDecisions = onDecisions;
    this.onLink = onLink;
    this.heardAt = -Infinity; // performance.now of the last state
  }

  get hasKey() {
    return this.#key !== "";
  }

  use(key) {
    this.#key = key;
    this.#failures = 0;
    this.start();
  }

  /** Ask now, whatever was under way. */
  start() {
    this.stop();
    this.#attempt();
  }

  pause() {
    this.stop();
    this.onLink({ kind: "paused" });
  }

  stop() {
    clearTimeout(this.#timer);
    this.#current?.abort();
    this.#current = null;
  }

  headers(more = {}) {
    return this.#key ? { ...more, Authorization: `Bearer ${this.#key}` } : more;
  }

  /** POST `body`; the answer's JSON. Throws a Refusal, or a TypeError where nobody answers. */
  async post(path, body) {
    const response = await fetch(path, {
      method: "POST",
      headers: this.headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(60_000),
    });
    if (!response.ok) throw await Refusal.of(response, this.hasKey);
    return response.json();
  }

  async #attempt() {
    const mine = (this.#current = new AbortController());
    let failure;
    try {
      this.onLink({ kind: "connecting" });
      failure = await this.#read(mine);
    } catch (e) {
      failure = e;
    }
    if (this.#current !== mine) return; // stopped, or begun anew
    this.#current = null;
    mine.abort();
    if (failure instanceof Refusal && failure.wantsKey) {
      this.onLink({ kind: "refused", why: failure.message });
      return;
    }
    const planned = PAUSES_S[Math.min(this.#failures++, PAUSES_S.length - 1)];
    // Not all pages at the same moment: they lost the same server.
    const pauseS = Math.max(planned * (0.8 + 0.4 * Math.random()), Math.min(failure.retryAfterS || 0, 30));
    this.#timer = setTimeout(() => this.#attempt(), pauseS * 1000);
    const why = failure instanceof TypeError ? "The server can't be reached." : failure.message;
    this.onLink({ kind: "waiting", why, retryAt: performance.now() + pauseS * 1000 });
  }

  async #read(mine) {
    let silence;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => mine.abort(new Error(`Nothing came for ${SILENCE_S} s.`)), SILENCE_S * 1000);
    };
    heard();
    try {
      const response = await fetch("dashboard/events", {
        headers: this.headers({ Accept: "text/event-stream" }),
        cache: "no-store",
        signal: mine.signal,
      });
      if (!response.ok) throw await Refusal.of(response, this.hasKey);
      if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
        throw new Error("What answers at dashboard/events sends no events.");
      }
      const parser = new EventParser((name, data) => this.#event(mine, name, data));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return new Error("The connection ended.");
        heard();
        parser.push(value);
      }
    } catch (e) {
      if (e instanceof TypeError && this.#failures === 0) return new Error("The connection broke.");
      throw e;
    } finally {
      clearTimeout(silence);
    }
  }

  #event(mine, name, data) {
    if (this.#current !== mine) return;
    if (name === "state") {
      this.#failures = 0;
      this.heardAt = performance.now();
      this.onLink({ kind: "live" });
      this.onState(JSON.parse(data));
    } else if (name === "decisions") {
      this.onDecisions(JSON.parse(data));
    }
  }
}
