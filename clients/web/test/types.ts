// Compiled, never run: what a TypeScript user writes, and what the types must refuse.
import * as msgpack from "@msgpack/msgpack";
import { connect, WsbatchError, type BatchFrame, type Completion } from "../wsbatch.js";

export async function main(): Promise<string> {
  const client = await connect("ws://127.0.0.1:8765", { token: "t", msgpack, WebSocket });
  let text = "";
  for await (const event of client.generate({ prompt: "x", max_tokens: 3 }, { signal: AbortSignal.timeout(10) })) {
    if (event.type === "tokens") text += event.text;
    if (event.type === "finished") text += `${event.finish_reason} ${event.usage.completion_tokens}`;
    // @ts-expect-error: only tokens have an index
    event.index;
  }
  for await (const frame of client.watch()) return phases(frame);
  const whole: Completion = await client.complete({ messages: [{ role: "user", content: "x" }] }, { retries: 2 });
  // @ts-expect-error: the field's name is max_tokens
  client.generate({ prompt: "x", maxTokens: 3 });
  // @ts-expect-error: the module, not its name
  await connect("ws://127.0.0.1:8765", { msgpack: "@msgpack/msgpack" });
  try {
    await client.close();
  } catch (error) {
    if (error instanceof WsbatchError && error.retryAfterMs !== null) return error.code;
  }
  return whole.text + text;
}

function phases(frame: BatchFrame): string {
  return frame.steps.flatMap((step) => step.rows.map(([slot, key, phase]) => `${slot} ${key} ${phase}`)).join();
}
