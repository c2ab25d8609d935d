/** One generation as its caller sees it: events in, iteration out, retried where the server says when. */

import { WsbatchError } from "./errors.js";

export class Generation {
  #begin;
  #cancel;
  #signal;
  #retries;
  #id;
  #events = [];
  #waiting = []; // calls of next() that have nothing yet
  #nextIndex;
  #begun = false; // tokens have come
  #error = null;
  #ended = false; // the terminal frame has come, or an error stands for it
  #done = false; // iteration is over
  #cancelled = false;
  #retryTimer;

  constructor(request, { signal, retries, begin, cancel }) {
    this.request = request;
    this.#signal = signal;
    this.#retries = retries;
    this.#begin = begin;
    this.#cancel = cancel;
    this.#nextIndex = request.resume_token_ids?.length ?? 0;
    this.#id = begin(this);
    signal?.addEventListener("abort", this.#abort);
  }

  /** Stop it. The iteration goes on to its end: `finished`, with the reason `cancelled`. */
  cancel() {
    this.#cancelled = true;
    if (this.#retryTimer !== undefined) {
      clearTimeout(this.#retryTimer);
      this.#retryTimer = undefined;
      this.fail(new WsbatchError("cancelled", "it was cancelled before the server had taken it"));
    } else {
      this.#cancel(this.#id);
    }
  }

  /** The whole output. Instead of iterating, not after it. */
  async completion() {
    let accepted, finished;
    let text = "";
    const tokenIds = [];
    const logprobs = [];
    for await (const event of this) {
      if (event.type === "accepted") accepted = event;
      if (event.type === "finished") finished = event;
      text += event.text ?? "";
      // One by one: as arguments of one call, a long answer's tokens would not fit the stack.
      for (const id of event.token_ids ?? []) tokenIds.push(id);
      for (const one of event.logprobs ?? []) logprobs.push(one);
    }
    return { text, tokenIds, logprobs: logprobs.length > 0 ? logprobs : null, accepted, finished };
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  next() {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ resolve, reject });
      this.#pump();
    });
  }

  /** The loop was left: the request is cancelled if it is still live. */
  async return(value) {
    if (!this.#ended) this.#cancel(this.#id, { forget: true });
    clearTimeout(this.#retryTimer);
    this.#end();
    this.#events.length = 0;
    this.#pump();
    return { value, done: true };
  }

  /** Take a frame from the connection. */
  deliver(frame) {
    if (frame.type === "tokens") {
      if (frame.index !== this.#nextIndex) {
        this.#cancel(this.#id, { forget: true });
        this.fail(new WsbatchError("protocol_error", `token ${this.#nextIndex} was due, got ${frame.index}`));
        return;
      }
      this.#nextIndex += frame.token_ids.length;
      this.#begun = true;
    }
    if (frame.type === "error") {
      this.#failed(WsbatchError.of(frame));
      return;
    }
    this.#events.push(frame);
    if (frame.type === "finished") this.#end();
    this.#pump();
  }

  /** End with an error, after what has arrived. */
  fail(error) {
    if (this.#ended) return;
    this.#error = error;
    this.#end();
    this.#pump();
  }

  #failed(error) {
    const delayMs = error.delayMs;
    if (delayMs === null || this.#retries === 0 || this.#begun || this.#cancelled) {
      this.fail(error);
      return;
    }
    this.#retries -= 1;
    this.#retryTimer = setTimeout(() => {
      this.#retryTimer = undefined;
      try {
        this.#id = this.#begin(this);
      } catch (lost) {
        this.fail(lost);
      }
    }, delayMs);
  }

  #abort = () => {
    if (this.#ended) return;
    clearTimeout(this.#retryTimer);
    this.#cancel(this.#id, { forget: true });
    this.#events.length = 0; // as fetch does: nothing comes after the abort but its reason
    this.fail(this.#signal.reason);
  };

  #end() {
    this.#ended = true;
    this.#signal?.removeEventListener("abort", this.#abort);
  }

  #pump() {
    while (this.#waiting.length > 0) {
      if (this.#events.length > 0 && !this.#done) {
        this.#waiting.shift().resolve({ value: this.#events.shift(), done: false });
      } else if (this.#error !== null && !this.#done) {
        this.#done = true;
        this.#waiting.shift().reject(this.#error);
      } else if (this.#ended) {
        this.#done = true;
        this.#waiting.shift().resolve({ value: undefined, done: true });
      } else {
        return;
      }
    }
  }
}
