import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import * as msgpack from "@msgpack/msgpack";
import { WebSocket, WebSocketServer } from "ws";
import { connect, whyRefused, WsbatchError } from "../wsbatch.js";
import { collect, Server } from "./server.mjs";

let server;
before(async () => (server = await Server.start("--allow-watch", "--max-live-requests", "4", "--scheduler", "dynamic")));
after(() => server.stop());

async function withClient(act, options = {}) {
  const client = await connect(options.url ?? server.url, { WebSocket, ...options });
  try {
    return await act(client);
  } finally {
    await client.close();
  }
}

const FRAMES = { JSON: {}, msgpack: { msgpack } };

for (const [name, options] of Object.entries(FRAMES)) {
  test(`a whole generation over ${name}`, () =>
    withClient(
      async (client) => {
        assert.equal(client.hello.model.startsWith("simulated"), true);
        const [accepted, ...rest] = await collect(client.generate({ prompt: "hi", max_tokens: 6, temperature: 0.7 }));
        const finished = rest.pop();
        assert.deepEqual([accepted.type, accepted.prompt_tokens], ["accepted", 2]);
        assert.deepEqual([finished.type, finished.finish_reason], ["finished", "length"]);
        assert.equal(finished.usage.completion_tokens, 6);
        assert.ok(rest.every((event) => event.type === "tokens"));
        assert.equal(rest.flatMap((event) => event.token_ids).length, 6);
      },
      options,
    ));
}

test("the subprotocol says which frames are spoken", async () => {
  const offered = [];
  class Silent extends EventTarget {
    constructor(url, subprotocol) {
      super();
      offered.push(subprotocol);
    }
    close() {}
  }
  for (const options of Object.values(FRAMES)) {
    await assert.rejects(connect(server.url, { WebSocket: Silent, timeoutMs: 1, ...options }), { code: "timeout" });
  }
  assert.deepEqual(offered, ["wsbatch.v1.json", "wsbatch.v1.msgpack"]);
});

test("both subprotocols and both ways of asking give the same text", async () => {
  const request = { messages: [{ role: "user", content: "é🙂" }], max_tokens: 20, seed: 5, temperature: 1, logprobs: 1 };
  const ask = (options) => withClient((client) => client.complete(request), options);
  const [one, two] = [await ask(FRAMES.JSON), await ask(FRAMES.msgpack)];
  assert.equal(one.text, two.text);
  assert.deepEqual(one.logprobs, two.logprobs);
  assert.equal(one.logprobs.length, 20);
  assert.equal(one.accepted.seed, 5);
  const whole = await withClient((client) => client.complete({ ...request, stream: false }));
  assert.deepEqual([whole.text, whole.tokenIds], [one.text, one.tokenIds]);
});

test("many at once on one connection", () =>
  withClient(async (client) => {
    const lengths = [3, 9, 1, 6];
    const all = lengths.map((max_tokens) => client.complete({ prompt: "x", max_tokens }));
    assert.deepEqual((await Promise.all(all)).map((one) => one.tokenIds.length), lengths);
  }));

test("an error is thrown with its code, status and message", () =>
  withClient(async (client) => {
    await assert.rejects(client.complete({ prompt: "x", temperature: -1 }), (error) => {
      assert.ok(error instanceof WsbatchError);
      assert.deepEqual([error.code, error.status, error.retryAfterMs], ["bad_request", 400, null]);
      assert.match(error.message, /temperature/);
      return true;
    });
    assert.equal((await client.complete({ prompt: "x", max_tokens: 2 })).tokenIds.length, 2);
  }));

const itself = {};
itself.itself = itself;
const UNSENDABLE = [
  [{ temperature: NaN }, /^temperature: must be a finite number, got NaN/],
  [{ top_p: Infinity }, /^top_p: must be a finite number/],
  [{ temperature: -Infinity }, /^temperature: must be a finite number/],
  [{ prompt: undefined, token_ids: [1, NaN] }, /^token_ids\[1\]: must be a finite number/],
  [{ stop: ["a", undefined] }, /^stop\[1\]: .* got undefined/],
  [{ stop: Array(1) }, /^stop\[0\]: .* got undefined/],
  [{ seed: 5n }, /^seed: .* got a bigint/],
  [{ seed: new Number(5) }, /^seed: .* got a Number/],
  [{ prompt: new Date(0) }, /^prompt: .* got a Date/],
  [{ prompt: { toJSON: () => "x" } }, /^prompt: .* got a Object/],
  [{ prompt: () => "x" }, /^prompt: .* got a function/],
  [{ prompt: undefined, token_ids: Int32Array.of(1) }, /^token_ids: .* got a Int32Array/],
  [{ prompt: "\ud83d" }, /^prompt: is not valid Unicode/],
  [{ prompt: "x".repeat(99) + "\ude42" }, /^prompt: is not valid Unicode/],
  [{ prompt: undefined, messages: [{ role: "user", content: "\ud800x" }] }, /^messages\[0\]\.content: is not valid/],
  [{ "\udfff": 1 }, /field is not valid Unicode/],
  [{ prompt: itself }, /nested too deeply/],
];

for (const [name, options] of Object.entries(FRAMES)) {
  test(`what has no form in a frame is refused here, by name, over ${name}`, () =>
    withClient(
      async (client) => {
        for (const [fields, message] of UNSENDABLE) {
          const request = { prompt: "x", max_tokens: 1, ...fields };
          assert.throws(() => client.generate(request), { name: "WsbatchError", code: "bad_request", status: 400, message });
        }
        for (const seed of [2 ** 53, 1e21, 0.5]) {
          await assert.rejects(client.complete({ prompt: "x", seed }), { code: "bad_request", message: /seed/ });
        }
        const odd = { prompt: "🙂", max_tokens: 2, temperature: -0, top_p: undefined, seed: null };
        assert.equal((await client.complete(odd)).tokenIds.length, 2);
      },
      options,
    ));
}

test("what is over the server's limit is refused here, and the connection lives", () =>
  withClient(async (client) => {
    const prompt = "x".repeat(client.hello.limits.max_message_bytes);
    assert.throws(() => client.generate({ prompt }), { code: "too_large" });
    assert.ok(client.open);
  }));

test("cancel ends a generation with the reason cancelled", () =>
  withClient(async (client) => {
    const generation = client.generate({ prompt: "x", max_tokens: 4000 });
    let last;
    for await (const event of generation) {
      if (event.type === "tokens") generation.cancel();
      last = event;
    }
    assert.equal(last.finish_reason, "cancelled");
  }));

test("leaving the loop cancels: the places are free again", { timeout: 15_000 }, () =>
  withClient(async (client) => {
    for (let i = 0; i < 4; i++) {
      for await (const event of client.generate({ prompt: "x", max_tokens: 4000 })) {
        if (event.type === "tokens") break;
      }
    }
    // More than four live requests would be refused.
    assert.equal((await client.complete({ prompt: "x", max_tokens: 2 })).tokenIds.length, 2);
  }));

test("an AbortSignal ends the loop with its reason, and the request on the server", () =>
  withClient(async (client) => {
    const aborting = new AbortController();
    const events = [];
    await assert.rejects(
      async () => {
        for await (const event of client.generate({ prompt: "x", max_tokens: 4000 }, { signal: aborting.signal })) {
          events.push(event.type);
          if (event.type === "tokens") aborting.abort();
        }
      },
      { name: "AbortError" },
    );
    assert.deepEqual(events, ["accepted", "tokens"]);
    assert.throws(() => client.generate({ prompt: "x" }, { signal: aborting.signal }), { name: "AbortError" });
    await withClient(async (other) => {
      for await (const frame of other.watch()) if (frame.running === 0) break;
    });
  }));

test("the batch can be watched, by several loops", () =>
  withClient(async (client) => {
    const phases = new Set();
    const watchOne = async () => {
      for await (const frame of client.watch()) {
        for (const step of frame.steps) for (const [, , phase] of step.rows) phases.add(phase);
        if (phases.has("decode") && frame.running === 0) return frame;
      }
    };
    const watching = [watchOne(), watchOne()];
    await client.complete({ prompt: "x", max_tokens: 40 });
    const [frame] = await Promise.all(watching);
    assert.deepEqual([...phases].sort(), ["decode", "prefill"]);
    assert.equal(frame.scheduler, "dynamic");
    const aborting = new AbortController();
    setTimeout(() => aborting.abort(), 20);
    await collect(client.watch({ signal: aborting.signal })); // ends
  }));

test("a quota's refusal is not retried without a word from the server", () =>
  withClient(async (client) => {
    const long = [1, 2, 3, 4].map(() => client.generate({ prompt: "x", max_tokens: 4000 }));
    await assert.rejects(client.complete({ prompt: "x" }, { retries: 3 }), { code: "quota" });
    for (const generation of long) generation.cancel();
    await Promise.all(long.map((generation) => generation.completion()));
  }));

test("a full queue's refusal is retried where it is asked for", async () => {
  const small = await Server.start("--max-batch-size", "1", "--max-queue-requests", "1");
  try {
    await withClient(
      async (client) => {
        const busy = client.generate({ prompt: "x", max_tokens: 60 });
        await busy.next();
        await busy.next(); // its first tokens: it has left the queue
        const queued = client.complete({ prompt: "x", max_tokens: 1 });
        await assert.rejects(client.complete({ prompt: "x", max_tokens: 1 }), (error) => {
          assert.equal(error.code, "queue_full");
          assert.ok(error.delayMs >= error.retryAfterMs && error.delayMs <= 2 * error.retryAfterMs);
          return true;
        });
        const patient = client.complete({ prompt: "x", max_tokens: 1 }, { retries: 20 });
        assert.equal((await patient).tokenIds.length, 1);
        await Promise.all([queued, busy.completion()]);
      },
      { url: small.url },
    );
  } finally {
    await small.stop();
  }
});

test("why there is no connection: unauthorized, full, draining, unreachable", async () => {
  const guarded = await Server.start("--auth-token", "s3cret", "--max-connections", "4", "--drain-s", "10");
  const url = guarded.url;
  try {
    for (const token of [undefined, "wrong"]) {
      await assert.rejects(connect(url, { WebSocket, token }), { code: "unauthorized", status: 401 });
    }
    const admitted = await Promise.all([1, 2, 3, 4].map(() => connect(url, { WebSocket, token: "s3cret" })));
    const client = admitted[0];
    await assert.rejects(connect(url, { WebSocket, token: "s3cret" }), (error) => {
      assert.equal(error.code, "queue_full");
      assert.ok(error.retryAfterMs > 0);
      return true;
    });
    const generation = client.generate({ prompt: "x", max_tokens: 8000 });
    await generation.next();
    guarded.child.kill("SIGTERM");
    while (client.draining === null) await new Promise((resolve) => setTimeout(resolve, 10));
    assert.ok(client.draining.deadline_ms > 4000);
    await assert.rejects(connect(url, { WebSocket, token: "s3cret" }), { code: "draining" });
    generation.cancel();
    assert.equal((await client.closed).code, 1001);
  } finally {
    await guarded.stop();
  }
  assert.equal((await whyRefused(url)).code, "unreachable");
  await assert.rejects(connect(url, { WebSocket }), { code: "unreachable" });
});

test("a killed server ends what is live with connection_lost", async () => {
  const doomed = await Server.start("--allow-watch");
  const client = await connect(doomed.url, { WebSocket });
  const generation = client.generate({ prompt: "x", max_tokens: 8000 });
  await generation.next();
  const watching = assert.rejects(collect(client.watch()), { code: "connection_lost" });
  await doomed.stop("SIGKILL");
  await assert.rejects(collect(generation), { code: "connection_lost" });
  await watching;
  assert.throws(() => client.generate({ prompt: "x" }), { code: "connection_lost" });
  assert.equal(client.open, false);
});

test("bad arguments are told apart", async () => {
  await assert.rejects(connect(server.url, { WebSocket, msgpack: "@msgpack/msgpack" }), TypeError);
  await assert.rejects(connect(server.url, { WebSocket, signal: AbortSignal.abort() }), { name: "AbortError" });
  if (globalThis.WebSocket === undefined) await assert.rejects(connect(server.url), /there is no WebSocket/);
});

/** A server that says what it is told to: what a correct one never does. */
async function scripted(answer, act) {
  const limits = { max_model_len: 100, max_message_bytes: 1000, max_live_requests: 8, max_logprobs: 0 };
  const hello = { type: "hello", version: 1, model: "m", server: "s", state: "ready", limits };
  const fake = new WebSocketServer({ port: 0, host: "127.0.0.1", handleProtocols: () => "wsbatch.v1.json" });
  fake.on("connection", (socket) => {
    const send = (...frames) => frames.forEach((frame) => socket.send(JSON.stringify(frame)));
    answer({ hello, send, socket });
  });
  await new Promise((resolve) => fake.once("listening", resolve));
  const url = `ws://127.0.0.1:${fake.address().port}`;
  try {
    await act((options) => connect(url, { WebSocket, ...options }));
  } finally {
    for (const socket of fake.clients) socket.terminate();
    fake.close();
  }
}

const accepted = (id) => ({ type: "accepted", id, prompt_tokens: 1, requests_ahead: 0, seed: 1 });
const tokens = (id, index, ...token_ids) => ({ type: "tokens", id, index, token_ids, text: "" });

test("tokens that are missing end the generation, and cancel it", () => {
  const heard = [];
  return scripted(
    ({ hello, send, socket }) => {
      send(hello);
      socket.on("message", (data) => {
        const frame = JSON.parse(data);
        heard.push(frame.type);
        if (frame.type === "generate") send(accepted(1), tokens(1, 0, 5), tokens(1, 2, 6));
      });
    },
    async (dial) => {
      const client = await dial();
      await assert.rejects(client.complete({ prompt: "x" }), { code: "protocol_error", message: /token 1 was due/ });
      while (heard.length < 2) await new Promise((resolve) => setTimeout(resolve, 5));
      assert.deepEqual(heard, ["generate", "cancel"]);
      assert.ok(client.open);
    },
  );
});

test("an answer of a million tokens in one frame is taken whole", () => {
  const token_ids = Array.from({ length: 1_000_000 }, (_, index) => index);
  const logprobs = token_ids.map(() => [-1, []]);
  return scripted(
    ({ hello, send, socket }) => {
      send(hello);
      socket.on("message", (data) => {
        const { id, stream } = JSON.parse(data);
        const whole = { type: stream === false ? "finished" : "tokens", id, index: 0, token_ids, logprobs, text: "x" };
        send(accepted(id), whole);
        if (stream !== false) send({ type: "finished", id, finish_reason: "length", text: "" });
      });
    },
    async (dial) => {
      const client = await dial();
      for (const stream of [true, false]) {
        const all = await client.complete({ prompt: "x", stream });
        assert.deepEqual([all.tokenIds.length, all.logprobs.length, all.text], [1_000_000, 1_000_000, "x"]);
      }
    },
  );
});

test("a request that has shown text is not asked anew", () => {
  let asked = 0;
  return scripted(
    ({ hello, send, socket }) => {
      send(hello);
      socket.on("message", (data) => {
        const { id } = JSON.parse(data);
        const full = { type: "error", id, code: "queue_full", status: 503, message: "m", retry_after_ms: 1 };
        asked += 1;
        send(accepted(id), { ...tokens(id, 1), text: "held back" }, full);
      });
    },
    async (dial) => {
      const client = await dial();
      const request = { prompt: "x", resume_token_ids: [7] };
      await assert.rejects(client.complete(request, { retries: 3 }), { code: "queue_full" });
      assert.equal(asked, 1);
    },
  );
});

test("frames that come right behind the hello are not lost, and unknown ones do no harm", () =>
  scripted(
    ({ hello, send }) => send(hello, { type: "weather" }, tokens(99, 0, 1), { type: "draining", deadline_ms: 7 }),
    async (dial) => {
      const client = await dial();
      while (client.draining === null) await new Promise((resolve) => setTimeout(resolve, 5));
      assert.equal(client.draining.deadline_ms, 7);
      await assert.rejects(client.watch().next(), { code: "bad_request" });
    },
  ));

test("a wrong version, rubbish, and an error before the hello", async () => {
  const cases = [
    [({ hello, send }) => send({ ...hello, version: 2 }), "protocol_error"],
    [({ socket }) => socket.send("rubbish"), "protocol_error"],
    [({ send }) => send({ type: "error", code: "queue_full", status: 503, message: "m", retry_after_ms: 5 }), "queue_full"],
  ];
  for (const [answer, code] of cases) await scripted(answer, (dial) => assert.rejects(dial(), { code }));
});

test("a silent server is pinged, and given up where it stays silent", () => {
  const heard = [];
  return scripted(
    ({ hello, send, socket }) => {
      send(hello);
      socket.on("message", (data) => {
        const frame = JSON.parse(data);
        heard.push(frame.type);
        if (frame.type === "ping" && heard.length < 3) send({ type: "pong", nonce: frame.nonce });
      });
    },
    async (dial) => {
      const client = await dial({ keepaliveMs: 20 });
      await assert.rejects(client.complete({ prompt: "x" }), { code: "connection_lost", message: /silent/ });
      assert.ok(heard.filter((type) => type === "ping").length >= 2);
    },
  );
});

test("the server's word about the connection is the reason of its end", () =>
  scripted(
    ({ hello, send, socket }) => {
      send(hello);
      socket.once("message", () => {
        send({ type: "error", code: "slow_consumer", status: 408, message: "too slow" });
        socket.close(1008);
      });
    },
    async (dial) => {
      const client = await dial();
      await assert.rejects(client.complete({ prompt: "x" }), { code: "slow_consumer" });
    },
  ));

test("a server that never answers is given up", async () => {
  const { createServer } = await import("node:net");
  const silent = createServer((socket) => socket.on("error", () => {})).listen(0, "127.0.0.1");
  await new Promise((resolve) => silent.once("listening", resolve));
  const url = `ws://127.0.0.1:${silent.address().port}`;
  await assert.rejects(connect(url, { WebSocket, timeoutMs: 50 }), { code: "timeout" });
  silent.close();
});
