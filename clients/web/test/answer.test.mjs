// Answers over a link that is cut at every point: what is shown is what an uninterrupted answer shows.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Answer } from "../answer.js";
import { connect } from "../wsbatch.js";

const bytes = (...parts) => parts.map((part) => (typeof part === "string" ? new TextEncoder().encode(part) : part));

/** The text of these tokens by docs/protocol.md: what is certain after them, and what there is when it ends there. */
function textOf(pieces, stops) {
  const decoder = new TextDecoder();
  const certain = pieces.map((piece) => decoder.decode(piece, { stream: true })).join("");
  const found = stops.map((stop) => certain.indexOf(stop)).filter((at) => at >= 0);
  if (found.length > 0) {
    const cut = certain.slice(0, Math.min(...found));
    return { sent: cut, whole: cut, stopped: true };
  }
  let held = 0;
  for (const stop of stops) {
    for (let n = 1; n < stop.length; n++) if (certain.endsWith(stop.slice(0, n))) held = Math.max(held, n);
  }
  return { sent: certain.slice(0, certain.length - held), whole: certain + decoder.decode(), stopped: false };
}

/** The frames that answer a request over a script of tokens, from where `resume_token_ids` end. */
function* framesOf({ pieces, stops = [], perFrame = 1, loose = false }, { id, max_tokens, resume_token_ids = [] }) {
  yield { type: "accepted", id, prompt_tokens: 1, requests_ahead: 0, seed: 11 };
  assert.deepEqual(resume_token_ids, [...pieces.keys()].slice(0, resume_token_ids.length), "not what was generated");
  const last = Math.min(pieces.length, max_tokens);
  let at = resume_token_ids.length;
  let now = textOf(pieces.slice(0, at), stops);
  while (at < last && !now.stopped) {
    const { sent } = now;
    const index = at;
    do {
      at += 1;
      now = textOf(pieces.slice(0, at), stops);
    } while (at < last && !now.stopped && at - index < perFrame);
    const token_ids = Array.from({ length: at - index }, (_, offset) => index + offset);
    yield { type: "tokens", id, index, token_ids, text: now.sent.slice(sent.length) };
  }
  let tail = now.whole.slice(now.sent.length);
  if (loose && tail !== "") {
    yield { type: "tokens", id, index: at, token_ids: [], text: tail };
    tail = "";
  }
  const usage = { prompt_tokens: 1, completion_tokens: at, cached_tokens: 0 };
  yield { type: "finished", id, finish_reason: at < max_tokens ? "stop" : "length", text: tail, usage };
}

/**
 * A link to a server that answers from a script. `cuts` says for each connection after how many frames it ends, and
 * whether the server says why: with `shutdown`, it ends the request first, with all the text that it has.
 */
class Link {
  client = null;
  connections = 0;
  requests = [];
  hello = {};

  constructor(script, cuts) {
    this.script = script;
    this.cuts = cuts;
  }

  async opened(signal) {
    signal.throwIfAborted();
    if (!this.client?.open) {
      const link = this;
      const WebSocket = class extends FakeSocket {
        hello = link.hello;
        heard = (request) => link.#answer(this, request);
      };
      this.connections += 1;
      this.client = await connect("ws://fake", { WebSocket, keepaliveMs: 0 });
    }
    return this.client;
  }

  #answer(socket, request) {
    this.requests.push(request);
    const cut = this.cuts[this.connections - 1];
    let generated = request.resume_token_ids?.length ?? 0;
    let sent = 0;
    let text = textOf(this.script.pieces.slice(0, generated), this.script.stops ?? []).sent.length;
    for (const frame of framesOf(this.script, request)) {
      if (cut !== undefined && sent === cut.after) break;
      socket.say(frame);
      generated += frame.token_ids?.length ?? 0;
      text += frame.text?.length ?? 0;
      sent += 1;
    }
    if (cut === undefined) return;
    if (cut.shutdown) {
      const { whole } = textOf(this.script.pieces.slice(0, generated), this.script.stops ?? []);
      const end = { type: "finished", id: request.id, finish_reason: "shutdown", text: whole.slice(text) };
      socket.say({ ...end, usage: { completion_tokens: generated } });
    }
    socket.end(cut.shutdown ? 1001 : 1006);
  }
}

class FakeSocket extends EventTarget {
  constructor() {
    super();
    const limits = { max_message_bytes: 1 << 20 };
    const hello = { type: "hello", version: 1, model: "m", revision: "r", dtype: "float32", limits };
    queueMicrotask(() => this.say({ ...hello, ...this.hello }));
  }

  send(data) {
    const frame = JSON.parse(data);
    if (frame.type === "generate") this.heard(frame);
  }

  say(frame) {
    queueMicrotask(() => this.dispatchEvent(Object.assign(new Event("message"), { data: JSON.stringify(frame) })));
  }

  end(code) {
    queueMicrotask(() => this.dispatchEvent(Object.assign(new Event("close"), { code, reason: "" })));
  }

  close() {
    this.end(1000);
  }
}

async function shown(link, { max_tokens = 100, onEvent = () => {} } = {}) {
  const answer = new Answer(link, { prompt: "x", max_tokens });
  let text = "";
  for await (const event of answer) {
    text += event.text ?? "";
    onEvent(event, answer, text);
  }
  return text + answer.heldBack;
}

const euro = [...new TextEncoder().encode("€")].map((byte) => new Uint8Array([byte]));
const SCRIPTS = {
  "plain text": { pieces: bytes("Once", " upon", "", " a", " time") },
  "a character in three tokens": { pieces: bytes("a", ...euro, "b") },
  "a character that is never whole": { pieces: bytes("a", euro[0], euro[1]) },
  "a stop string that matches": { pieces: bytes("one", " tw", "o EN", "D and", " more"), stops: ["END"] },
  "a stop string half matched, then not": { pieces: bytes("one EN", "Dur", "ing E", "N"), stops: ["ENDED", "ING"] },
  "a stop string half matched at the end": { pieces: bytes("one", " tw", "o E", "N"), stops: ["END"] },
  "a long stop string, half matched all along": { pieces: bytes(..."abababab"), stops: ["abababababX"] },
  "half a stop string and half a character": { pieces: bytes("one E", euro[0]), stops: ["E€E"] },
};

for (const [name, script] of Object.entries(SCRIPTS)) {
  for (const variant of [{}, { perFrame: 2 }, { perFrame: 3 }, { loose: true }]) {
    test(`cut anywhere, once and twice: ${name}, ${JSON.stringify(variant)}`, async () => {
      const whole = { ...script, ...variant };
      // `length` where that is all the tokens, `stop` where the server has more room.
      for (const max_tokens of [script.pieces.length, 100]) {
        const { stopped, whole: all, sent } = textOf(script.pieces, script.stops ?? []);
        const expected = stopped ? sent : all;
        assert.equal(await shown(new Link(whole, []), { max_tokens }), expected);
        const frames = [...framesOf(whole, { id: 1, max_tokens })].length;
        const points = [];
        for (let after = 0; after < frames; after++) points.push({ after }, { after, shutdown: true });
        for (const first of points) {
          for (const second of [undefined, ...points]) {
            const cuts = second === undefined ? [first] : [first, second];
            const link = new Link(whole, cuts);
            const onEvent = (event, answer, text) => assert.ok(expected.startsWith(text), `${text} was shown`);
            assert.equal(await shown(link, { max_tokens, onEvent }), expected, JSON.stringify(cuts));
            assert.ok(link.connections > 1);
            assert.ok(link.requests.slice(1).every(({ seed }) => first.after === 0 || seed === 11));
          }
        }
      }
    });
  }
}

test("stopped while the server is away: the text that it held back is shown, once", async () => {
  const script = SCRIPTS["a stop string half matched at the end"];
  for (const shutdown of [false, true]) {
    const link = new Link(script, [{ after: 5, shutdown }]);
    const onEvent = (event, answer) => event.type === "lost" && answer.stop();
    assert.equal(await shown(link, { onEvent }), shutdown ? "one two EN" : "one two ");
    assert.equal(link.connections, 1);
  }
});

test("stopped, an answer is not resumed where the link breaks before the server says `finished`", async () => {
  const link = new Link(SCRIPTS["plain text"], [{ after: 3 }]);
  const onEvent = (event, answer) => event.type === "tokens" && answer.stop();
  assert.equal(await shown(link, { onEvent }), "Once upon");
  assert.equal(link.connections, 1);
});

test("another model's tokens are not gone on with", async () => {
  for (const other of [{ model: "n" }, { revision: "s" }, { dtype: "bfloat16" }]) {
    const link = new Link(SCRIPTS["plain text"], [{ after: 2 }]);
    const onEvent = (event) => event.type === "lost" && (link.hello = other);
    await assert.rejects(shown(link, { onEvent }), { message: new RegExp(`the server's ${Object.keys(other)[0]} is now`) });
  }
});
