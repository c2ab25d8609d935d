/** One answer, however many connections it takes. No DOM here: events come out, with the text that is to be shown. */

const RETRIES = 8;
const RESUMED_AFTER = ["connection_lost", "draining"];

/**
 * An async iterable of `accepted`, `tokens` and `finished` events, and of two of its own: `waiting` (for a connection)
 * and `lost` (the answer goes on when the server is back). It ends with the server's `finished` or its error; what a
 * shutdown or a lost connection cuts short is resumed.
 *
 * Text that comes with token ids is shown at once. Text that comes without them was held back by the ids before it:
 * where the answer is resumed from these ids, the server sends it again. So it is shown with the next ids, or when
 * the answer is over.
 */
export class Answer {
  /** What came without ids and is not shown yet. Part of the answer where the iteration ends before `finished`. */
  heldBack = "";
  #link;
  #request;
  #ids = [];
  #served = null; // what the server said of its model
  #generation = null;
  #stopping = new AbortController();

  /** `link` has the open connection as `client`, and waits for one in `opened(signal)`. */
  constructor(link, request) {
    this.#link = link;
    this.#request = request;
  }

  /** End it: with `finished` where the server can still say so, else at once. */
  stop() {
    this.#stopping.abort();
    this.#generation?.cancel();
  }

  async *[Symbol.asyncIterator]() {
    const { signal } = this.#stopping;
    while (!signal.aborted) {
      try {
        if (!this.#link.client?.open) yield { type: "waiting" };
        const client = await this.#link.opened(signal);
        this.#checkModel(client.hello);
        if (yield* this.#over(client)) return;
        await this.#ended(client); // the server shut down in mid-answer
      } catch (error) {
        if (error === signal.reason) return;
        if (!RESUMED_AFTER.includes(error.code)) throw error;
        if (error.code === "draining") await this.#ended(this.#link.client);
      }
      this.#generation = null;
      if (!signal.aborted) yield { type: "lost" };
    }
  }

  /** The events that come over one connection; whether the answer is whole. */
  async *#over(client) {
    const resumed = this.#ids.length > 0 ? { resume_token_ids: this.#ids.slice() } : {};
    this.#generation = client.generate({ ...this.#request, ...resumed }, { retries: RETRIES });
    let loose = ""; // without ids, on this connection
    for await (const event of this.#generation) {
      if (event.type === "accepted") {
        this.#request = { ...this.#request, seed: event.seed };
        yield event;
        continue;
      }
      const text = loose + event.text;
      const whole = event.type === "finished" && event.finish_reason !== "shutdown";
      if (whole || event.token_ids?.length > 0) {
        for (const id of event.token_ids ?? []) this.#ids.push(id);
        this.heldBack = loose = "";
        yield { ...event, text };
        if (whole) return true;
      } else if (text !== "") {
        this.heldBack = loose = text;
      }
    }
    return false;
  }

  /** Wait for the end of the connection, or for `stop`. */
  async #ended(client) {
    const { signal } = this.#stopping;
    if (signal.aborted) return;
    const stopped = new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
    await Promise.race([client?.closed, stopped]);
  }

  /** Only the same weights in the same format go on as the ids began. */
  #checkModel({ model, revision, dtype }) {
    const now = { model, revision, dtype };
    for (const [name, value] of Object.entries(this.#ids.length > 0 ? this.#served : {})) {
      if (value !== undefined && now[name] !== undefined && now[name] !== value) {
        throw new Error(`the server's ${name} is now ${now[name]}, it was ${value}: another model cannot go on with it`);
      }
    }
    this.#served = now;
  }
}
