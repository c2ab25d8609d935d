/** The page's connection: made, kept, and made anew with back-off; its state in words. */

import { connect } from "./wsbatch.js";

const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 15_000;

/** The WebSocket address: `?url=`, else where the page came from; and the token of either. */
export function addressOf(location) {
  const page = new URL(location);
  const given = page.searchParams.get("url");
  const url = new URL(given ?? ".", page);
  if (!given) url.protocol = url.protocol.replace("http", "ws");
  const token = page.searchParams.get("token") ?? url.searchParams.get("token");
  if (!given) url.search = "";
  url.searchParams.delete("token"); // it is not to be shown
  url.hash = "";
  return { url, token };
}

/**
 * Events: `open` with a new `client`, `change` whenever `state` or `words` has changed.
 * States: connecting, open, draining, waiting (for the next try), stopped (until `retry`).
 */
export class Link extends EventTarget {
  client = null;
  state = "connecting";
  words = "Connecting…";
  reason = null;
  #delayMs = FIRST_DELAY_MS;
  #wake = () => {};

  constructor(url, token) {
    super();
    this.url = url;
    this.token = token;
  }

  /** Connect for ever. */
  async run() {
    for (;;) {
      try {
        this.#become("connecting", this.reason ? this.words : `Connecting to ${this.url}…`);
        const client = await connect(this.url, { token: this.token });
        await this.#serve(client);
      } catch (error) {
        await this.#pause(error);
      }
    }
  }

  /** Try now, perhaps with another token. */
  retry(token = this.token) {
    this.token = token;
    this.#wake();
  }

  /** The open connection, once there is one. Rejects where `signal` aborts. */
  async opened(signal) {
    while (!this.client?.open) {
      await new Promise((resolve, reject) => {
        signal?.throwIfAborted();
        this.addEventListener("open", resolve, { once: true });
        signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
      });
    }
    return this.client;
  }

  async #serve(client) {
    this.client = client;
    this.reason = null;
    this.#delayMs = FIRST_DELAY_MS;
    this.#become("open", `${client.hello.model} on ${this.url}`);
    this.dispatchEvent(new Event("open"));
    // The library tells of a drain by an attribute; a look now and then is enough for words.
    const look = setInterval(() => {
      if (client.draining && this.state === "open") {
        const seconds = Math.ceil(client.draining.deadline_ms / 1000);
        this.#become("draining", `The server is shutting down: answers have ${seconds} s to finish`);
      }
    }, 250);
    const { code, reason } = await client.closed;
    clearInterval(look);
    this.client = null;
    const why = code === 1001 ? "The server has shut down" : `The connection was lost${reason ? `: ${reason}` : ""}`;
    throw Object.assign(new Error(why), { code: "connection_lost", delayMs: null });
  }

  /** Wait for the next try: as long as the server says, else twice as long each time; or for a person. */
  async #pause(error) {
    this.reason = error.code;
    const words = inWords(error);
    if (error.code === "unauthorized") {
      this.#become("stopped", words);
      await new Promise((resolve) => (this.#wake = resolve));
      return;
    }
    const delayMs = error.delayMs ?? this.#delayMs * (0.5 + Math.random() / 2);
    this.#delayMs = Math.min(2 * this.#delayMs, LONGEST_DELAY_MS);
    const until = performance.now() + delayMs;
    let woken = false;
    while (!woken && performance.now() < until) {
      const left = until - performance.now();
      this.#become("waiting", `${words}. Trying again in ${Math.ceil(left / 1000)} s`);
      await new Promise((resolve) => {
        setTimeout(resolve, Math.min(left, 1000));
        this.#wake = () => {
          woken = true;
          resolve();
        };
      });
    }
  }

  #become(state, words) {
    this.state = state;
    this.words = words;
    this.dispatchEvent(new Event("change"));
  }
}

function inWords(error) {
  const words = {
    queue_full: "The server is full",
    shed: "The server is full",
    draining: "The server is shutting down",
    engine_dead: "The server's model has died",
    unauthorized: "The server wants its token, and the one given is not right",
    unreachable: "The server cannot be reached: it is down, or still loading its model",
    timeout: "The server does not answer",
  };
  return words[error.code] ?? error.message;
}
