// Adding, draining and removing nodes. Each is asked for in a dialog, which stays open while something is wrong.

import { byId, setText } from "./dom.js";
import { age, plural } from "./format.js";

export class Manage {
  #leaving = null;
  grace_s = null; // of a drain, as the newest state has it

  /** `post(path, body)`: of the feed. `onDone(text)`: said once it is done. */
  constructor(post, onDone) {
    this.post = post;
    this.onDone = onDone;
    for (const button of document.querySelectorAll("dialog [data-close]")) {
      button.addEventListener("click", () => button.closest("dialog").close());
    }
    byId("add-node").addEventListener("click", () => open("add"));
    byId("add-form").addEventListener("submit", (event) => this.#submit(event, "add", () => this.#add()));
    byId("leave-form").addEventListener("submit", (event) => this.#submit(event, "leave", () => this.#leave()));
    // An engine's key is not left lying in a field of the page.
    byId("add-dialog").addEventListener("close", () => (byId("add-key").value = ""));
  }

  askLeave(node, drain) {
    this.#leaving = { url: node.url, drain };
    const running = node.unfinished ? plural(node.unfinished, "unfinished request") : "no unfinished request";
    const grace = this.grace_s === null ? "" : ` of ${age(this.grace_s)}`;
    setText(byId("leave-title"), drain ? "Drain this node?" : "Remove this node?");
    setText(byId("leave-url"), node.url);
    setText(
      byId("leave-what"),
      drain
        ? `It has ${running}. It gets no new ones, and is removed when they have ended or the grace time${grace} is over.`
        : `It has ${running}. It leaves the deployment at once; drain it to let them end first.`,
    );
    const button = byId("leave-do");
    setText(button, drain ? "Drain node" : "Remove node");
    button.className = drain ? "main" : "danger";
    open("leave");
  }

  async #submit(event, name, act) {
    event.preventDefault();
    const dialog = byId(`${name}-dialog`);
    const button = dialog.querySelector("[type=submit]");
    if (button.disabled) return;
    complain(name, "");
    button.disabled = true;
    dialog.setAttribute("aria-busy", "true");
    try {
      const said = await act();
      dialog.close();
      this.onDone(said);
    } catch (e) {
      complain(name, e instanceof TypeError ? "The server can't be reached." : e.message);
    } finally {
      button.disabled = false;
      dialog.removeAttribute("aria-busy");
    }
  }

  async #add() {
    const value = (name) => byId(`add-${name}`).value.trim();
    const status = {};
    const models = value("models").split("\n").map((line) => line.trim()).filter(Boolean);
    if (models.length) status.models = models;
    if (value("role")) status.role = value("role");
    // What is no number goes as it is: the server says what is wrong with it.
    if (value("speed")) status.speed = Number.isNaN(Number(value("speed"))) ? value("speed") : Number(value("speed"));
    const body = { url: value("url") };
    if (Object.keys(status).length) body.status = status;
    if (value("key")) body.key = value("key");
    const said = await this.post("nodes/add", body);
    byId("add-form").reset();
    return `${said}: ${body.url}`;
  }

  async #leave() {
    const { url, drain } = this.#leaving;
    const said = await this.post(drain ? "nodes/remove?drain=true" : "nodes/remove", { url });
    return `${said}: ${url}`;
  }
}

function open(name) {
  complain(name, "");
  byId(`${name}-dialog`).showModal();
}

function complain(name, text) {
  const problem = byId(`${name}-problem`);
  problem.hidden = !text;
  setText(problem, text);
}
