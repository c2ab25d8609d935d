/**
 * The JavaScript client of wsbatch: many generations on one WebSocket, for browsers and Node 20+.
 *
 *   const client = await connect("ws://127.0.0.1:8765");
 *   for await (const event of client.generate({ prompt: "Once upon a time", max_tokens: 64 })) {
 *     if (event.type === "tokens") console.log(event.text);
 *   }
 *
 * Requests and events are the frames of docs/protocol.md as they are. Types are in wsbatch.d.ts.
 */

import { Generation } from "./generation.js";
import { WsbatchError } from "./errors.js";
import { checkRequest } from "./request.js";

export { WsbatchError };

const PROTOCOL_VERSION = 1;
// Snapshots of the batch that a slow loop may leave unread; the oldest go first, for a watcher wants the present.
const MAX_UNREAD = 64;

const JSON_FRAMES = {
  subprotocol: "wsbatch.v1.json",
  encode: (frame) => JSON.stringify(frame),
  decode: (data) => JSON.parse(data),
};

/** How frames are written: in JSON, or by the msgpack library that is given. */
function codecOf(msgpack) {
  if (msgpack === undefined) return JSON_FRAMES;
  const { encode, decode } = msgpack;
  if (typeof encode !== "function" || typeof decode !== "function") {
    throw new TypeError("msgpack must have encode and decode: give the module @msgpack/msgpack");
  }
  return {
    subprotocol: "wsbatch.v1.msgpack",
    encode: (frame) => encode(frame, { ignoreUndefined: true }),
    decode: (data) => decode(new Uint8Array(data)),
  };
}

/** Connect, and wait for the server's hello. Rejects with a WsbatchError that says why there is no connection. */
export async function connect(url, options = {}) {
  const { token, msgpack, timeoutMs = 10_000, keepaliveMs = 20_000, signal } = options;
  const WebSocket = options.WebSocket ?? globalThis.WebSocket;
  if (WebSocket === undefined) {
    throw new TypeError("there is no WebSocket here: give one, as in connect(url, { WebSocket }) with that of `ws`");
  }
  signal?.throwIfAborted();
  const codec = codecOf(msgpack);
  const address = new URL(url);
  if (token !== undefined && token !== null) address.searchParams.set("token", token);
  const socket = new WebSocket(address.href, codec.subprotocol);
  socket.binaryType = "arraybuffer";
  const client = new Client(socket, codec, keepaliveMs);
  const giveUp = (error) => client.fail(error);
  const aborted = () => giveUp(signal.reason);
  signal?.addEventListener("abort", aborted);
  const timer = setTimeout(
    () => giveUp(new WsbatchError("timeout", `the server did not answer within ${timeoutMs} ms`)),
    timeoutMs,
  );
  try {
    await client.greeted;
    return client;
  } catch (error) {
    if (error?.code !== "connection_lost") throw error;
    // A browser is not told why an upgrade was refused; the probe says it.
    throw await whyRefused(address);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", aborted);
  }
}

/** Why the server at this ws:// address refuses connections, from its /readyz. Never rejects. */
export async function whyRefused(url) {
  const probe = new URL("readyz", new URL(url));
  probe.protocol = probe.protocol.replace("ws", "http");
  // With a token in the query, even an empty one, the probe also says whether that is the right one.
  probe.search = `?${new URLSearchParams({ token: new URL(url).searchParams.get("token") ?? "" })}`;
  let response;
  try {
    response = await fetch(probe, { cache: "no-store", signal: AbortSignal.timeout(5000) });
  } catch (cause) {
    const message = "the server cannot be reached: it is down, still loading its model, or does not let this page in";
    return new WsbatchError("unreachable", message, { cause });
  }
  try {
    const frame = await response.json();
    if (frame.type === "error") return WsbatchError.of(frame);
  } catch {
    // Not JSON: the probe of a server that is ready, or an answer of something in between.
  }
  const message = response.ok
    ? "the server is ready, but the connection was refused: something between here and it may not let WebSockets pass"
    : `something at the server's address answered with HTTP status ${response.status}`;
  return new WsbatchError("refused", message, { status: response.status });
}

/** An open connection; made by `connect`. */
export class Client {
  #socket;
  #codec;
  #generations = new Map();
  #watches = new Set();
  #nextId = 1;
  #lost = null;
  #refusal = null;
  #heard = true;
  #pinged = false;
  #greeting;
  #keepalive;

  constructor(socket, codec, keepaliveMs) {
    this.hello = null;
    this.draining = null;
    this.#socket = socket;
    this.#codec = codec;
    this.greeted = new Promise((resolve, reject) => (this.#greeting = { resolve, reject }));
    this.closed = new Promise((resolve) => {
      socket.addEventListener("close", ({ code, reason }) => {
        this.#lose(new WsbatchError("connection_lost", `the connection was closed (${code}${reason && `, ${reason}`})`));
        resolve({ code, reason });
      });
    });
    socket.addEventListener("error", () => {}); // `close` follows; but `ws` throws an error that nobody listens to
    socket.addEventListener("message", ({ data }) => this.#receive(data));
    if (keepaliveMs) {
      this.#keepalive = setInterval(() => this.#checkLife(keepaliveMs), keepaliveMs);
      this.#keepalive.unref?.();
    }
  }

  /** Whether requests can be made. */
  get open() {
    return this.#lost === null;
  }

  /** Start a generation: an async iterable of its events. It is cancelled where the loop is left before its end. */
  generate(request, { signal, retries = 0 } = {}) {
    signal?.throwIfAborted();
    return new Generation(request, { signal, retries, begin: this.#begin, cancel: this.#cancel });
  }

  /** The whole output of a generation. */
  async complete(request, options) {
    return this.generate(request, options).completion();
  }

  /** The live batch: an async iterable of `batch` frames, until the loop is left or `signal` aborts. */
  async *watch({ signal } = {}) {
    if (!this.hello.watch) {
      throw new WsbatchError("bad_request", "this server does not let its batch be watched: it needs --allow-watch");
    }
    if (this.#lost !== null) throw this.#lost;
    signal?.throwIfAborted();
    const watch = { frames: [], wake: () => {} };
    const stop = () => watch.wake();
    signal?.addEventListener("abort", stop);
    this.#watches.add(watch);
    if (this.#watches.size === 1) this.#send({ type: "watch" });
    try {
      for (;;) {
        while (watch.frames.length > 0) yield watch.frames.shift();
        if (signal?.aborted) return;
        if (this.#lost !== null) throw this.#lost;
        await new Promise((resolve) => (watch.wake = resolve));
      }
    } finally {
      signal?.removeEventListener("abort", stop);
      this.#watches.delete(watch);
      if (this.#watches.size === 0 && this.open) this.#send({ type: "unwatch" });
    }
  }

  /** Close the connection; what is live on it is cancelled. Resolves once it is closed. */
  async close() {
    this.fail(new WsbatchError("connection_lost", "the connection was closed here"));
    return this.closed;
  }

  /** End the connection and everything on it with this error. */
  fail(error) {
    this.#lose(error);
    this.#socket.close(1000);
  }

  #send(frame) {
    this.#socket.send(this.#codec.encode(frame));
  }

  #begin = (generation) => {
    if (this.#lost !== null) throw this.#lost;
    checkRequest(generation.request);
    const id = this.#nextId++;
    const data = this.#codec.encode({ ...generation.request, type: "generate", id });
    const bytes = typeof data === "string" ? new TextEncoder().encode(data).length : data.length;
    const most = this.hello.limits.max_message_bytes;
    if (bytes > most) {
      // The server would close the connection over it, and with it every other generation.
      throw new WsbatchError("too_large", `the request has ${bytes} bytes, the server takes ${most}`, { status: 413 });
    }
    this.#generations.set(id, generation);
    this.#socket.send(data);
    return id;
  };

  #cancel = (id, { forget = false } = {}) => {
    if (!this.#generations.has(id)) return;
    if (forget) this.#generations.delete(id);
    if (this.open) this.#send({ type: "cancel", id });
  };

  #receive(data) {
    this.#heard = true;
    let frame;
    try {
      frame = this.#codec.decode(data);
    } catch (cause) {
      this.fail(new WsbatchError("protocol_error", "the server sent a frame that cannot be read", { cause }));
      return;
    }
    if (this.hello === null) {
      this.#greet(frame);
      return;
    }
    if (frame.type === "batch") {
      for (const watch of this.#watches) {
        watch.frames.push(frame);
        if (watch.frames.length > MAX_UNREAD) watch.frames.shift();
        watch.wake();
      }
    } else if (frame.type === "draining") {
      this.draining = frame;
    } else if (frame.type === "error" && frame.id === undefined) {
      this.#refusal = WsbatchError.of(frame);
    } else if (["accepted", "tokens", "finished", "error"].includes(frame.type)) {
      const generation = this.#generations.get(frame.id); // undefined for one that was left before its end
      if (frame.type === "finished" || frame.type === "error") this.#generations.delete(frame.id);
      generation?.deliver(frame);
    }
  }

  #greet(frame) {
    if (frame.type === "error") {
      this.fail(WsbatchError.of(frame));
    } else if (frame.type !== "hello" || frame.version !== PROTOCOL_VERSION) {
      this.fail(new WsbatchError("protocol_error", `a hello of version ${PROTOCOL_VERSION} was due`));
    } else {
      this.hello = frame;
      this.#greeting.resolve();
    }
  }

  #lose(error) {
    if (this.#lost !== null) return;
    // What the server said of the connection as a whole tells more than its end.
    this.#lost = this.#refusal ?? error;
    clearInterval(this.#keepalive);
    this.#greeting.reject(this.#lost);
    for (const generation of this.#generations.values()) generation.fail(this.#lost);
    this.#generations.clear();
    for (const watch of this.#watches) watch.wake();
  }

  /** Once an interval: a silent server is pinged; one that stays silent is given up. */
  #checkLife(keepaliveMs) {
    if (this.#heard) {
      this.#heard = false;
      this.#pinged = false;
    } else if (!this.#pinged) {
      this.#pinged = true;
      this.#send({ type: "ping", nonce: 0 });
    } else {
      this.fail(new WsbatchError("connection_lost", `the server has been silent for ${2 * keepaliveMs} ms`));
    }
  }
}
