/** One pane: a conversation, or one completion after the other. */

import { Answer } from "./answer.js";

const NEAR_END_PX = 40;

export class Pane {
  #link;
  #sampling;
  #messages = [];
  #answer = null; // the one that is coming

  /** `sampling` gives the sampling fields of a request, or null where they are not valid. */
  constructor(link, sampling, number, onRemove) {
    this.#link = link;
    this.#sampling = sampling;
    const template = document.getElementById("pane-template");
    this.element = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => this.element.querySelector(selector);
    this.log = find(".log");
    this.prompt = find(".prompt");
    this.mode = find(".mode");
    this.sendButton = find(".send");
    this.stopButton = find(".stop");
    this.stats = find(".stats");
    find("h3").textContent = `Pane ${number}`;
    this.element.setAttribute("aria-label", `Pane ${number}`);
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    find(".clear").addEventListener("click", () => this.clear());
    find(".remove").addEventListener("click", () => {
      this.stop();
      onRemove(this);
    });
    this.stopButton.addEventListener("click", () => this.stop());
    this.mode.addEventListener("change", () => this.clear());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy) {
        event.stopPropagation();
        this.stop();
      }
    });
  }

  get busy() {
    return this.#answer !== null;
  }

  /** Ask what is in the prompt box. Nothing happens while an answer is coming, or without a prompt. */
  async send() {
    const text = this.prompt.value;
    if (this.busy || text.trim() === "") return;
    const sampling = this.#sampling();
    if (sampling === null) return;
    const chat = this.mode.value === "chat";
    const asked = this.#add("turn " + (chat ? "user" : "prompt-text"), text);
    const messages = this.#messages; // of now: `clear` begins another conversation
    if (chat) {
      messages.push({ role: "user", content: text });
      this.prompt.value = "";
    }
    const turn = chat ? this.#add("turn live", "") : asked;
    turn.classList.add("live");
    const words = document.createElement("span");
    words.append(document.createTextNode(""));
    turn.append(words);
    const request = { ...sampling, ...(chat ? { messages } : { prompt: text }) };
    this.#answer = new Answer(this.#link, request);
    this.#setBusy(true);
    try {
      await this.#show(this.#answer, words.firstChild);
    } catch (error) {
      this.#add("note error", explain(error));
    } finally {
      turn.classList.remove("live");
      const answer = words.textContent;
      // A question that was not answered is not part of the conversation.
      if (chat && answer !== "") messages.push({ role: "assistant", content: answer });
      else if (chat) messages.pop();
      if (chat && answer === "") turn.remove();
      this.#answer = null;
      this.#setBusy(false);
    }
  }

  /** End the answer that is coming: what has come stays. */
  stop() {
    this.#answer?.stop();
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.#messages = [];
    this.log.replaceChildren();
    this.stats.textContent = "";
  }

  /** Write the answer as it comes, to its end. */
  async #show(answer, node) {
    const pace = new Pace();
    try {
      for await (const event of answer) {
        if (event.text) this.#write(node, event.text);
        pace.note(event);
        this.#tell(event, pace);
        if (event.type === "finished") return;
      }
      this.stats.textContent = `${pace} · stopped`;
    } finally {
      this.#write(node, answer.heldBack);
    }
  }

  #tell(event, pace) {
    if (event.type === "waiting") {
      this.stats.textContent = "waiting for the server";
    } else if (event.type === "lost") {
      this.#add("note", "The connection was lost; the answer goes on when the server is back.");
    } else if (event.type === "accepted") {
      this.stats.textContent = event.requests_ahead > 0 ? `queued behind ${event.requests_ahead}` : "queued";
    } else {
      this.stats.textContent = `${pace}${event.type === "finished" ? ending(event) : ""}`;
    }
  }

  #write(node, text) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    node.appendData(text);
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) this.log.scrollTop = this.log.scrollHeight;
  }

  #add(className, text) {
    const element = document.createElement("div");
    element.className = className;
    element.textContent = text;
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return element;
  }

  #setBusy(busy) {
    // A screen reader reads an answer when it is whole, not token by token.
    this.log.setAttribute("aria-busy", String(busy));
    this.sendButton.disabled = busy;
    this.stopButton.disabled = !busy;
    this.element.dataset.busy = String(busy);
  }
}

/** How fast an answer comes, as its reader sees it. */
class Pace {
  #asked = performance.now();
  #first = null;
  #last = null;
  #before = 0; // tokens of the first frame
  #tokens = 0;

  note(event) {
    if (event.type === "finished") this.#tokens = event.usage.completion_tokens;
    if (event.type !== "tokens" || event.token_ids.length === 0) return;
    const now = performance.now();
    if (this.#first === null) {
      this.#first = now;
      this.#before = event.token_ids.length;
    }
    this.#last = now;
    this.#tokens += event.token_ids.length;
  }

  toString() {
    if (this.#first === null) return "no tokens";
    const parts = [`${this.#tokens} tokens`, `first after ${((this.#first - this.#asked) / 1000).toFixed(2)} s`];
    const seconds = (this.#last - this.#first) / 1000;
    if (seconds > 0) parts.push(`${((this.#tokens - this.#before) / seconds).toFixed(1)} tokens/s`);
    return parts.join(" · ");
  }
}

function ending(finished) {
  const words = { length: " · cut at the token limit", cancelled: " · stopped", timeout: " · timed out" };
  return words[finished.finish_reason] ?? "";
}

function explain(error) {
  const words = {
    queue_full: "The server is full, and stayed full. Try again later.",
    shed: "The server dropped this request in favour of more urgent ones.",
    quota: "Too many requests at once from this page.",
    queue_timeout: "The request waited too long in the queue.",
    never_fits: "Prompt and answer are longer than the model takes.",
    model_error: "The model failed on this request.",
    engine_dead: "The server's model has died.",
    slow_consumer: "This page was too slow to read the answer.",
    cancelled: "Stopped before the server had taken it.",
  };
  const known = words[error.code];
  return known ? `${known} (${error.message})` : `It failed: ${error.message}`;
}
