/** The types of wsbatch.js. Frames and their fields are described in docs/protocol.md. */

export type RequestId = number | string;
export type FinishReason = "stop" | "length" | "cancelled" | "timeout" | "shutdown";

export interface ChatMessage {
  role: string;
  content: string;
}

/** What to generate: exactly one of `prompt`, `token_ids` and `messages`. */
export interface GenerateRequest {
  prompt?: string;
  token_ids?: number[];
  messages?: ChatMessage[];
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  seed?: number;
  stop?: string[];
  stop_token_ids?: number[];
  ignore_eos?: boolean;
  logprobs?: number;
  priority?: number;
  timeout_ms?: number;
  queue_timeout_ms?: number;
  stream?: boolean;
  resume_token_ids?: number[];
  parse_special?: boolean;
}

/** A token's own log probability, and the likeliest ids at its position with theirs. */
export type TokenLogprobs = [own: number, top: [tokenId: number, logprob: number][]];

export interface Accepted {
  type: "accepted";
  id: RequestId;
  prompt_tokens: number;
  requests_ahead: number;
  seed: number;
}

export interface Tokens {
  type: "tokens";
  id: RequestId;
  index: number;
  token_ids: number[];
  text: string;
  logprobs?: TokenLogprobs[];
}

export interface Finished {
  type: "finished";
  id: RequestId;
  finish_reason: FinishReason;
  text: string;
  usage: { prompt_tokens: number; completion_tokens: number; cached_tokens: number };
  timing: { queue_ms: number; prefill_ms: number; ttft_ms: number; total_ms: number; batch_wait_ms: number };
  batch: {
    max_size: number;
    mean_size: number;
    issued_tokens: number;
    useful_tokens: number;
    hol_delay_ms: number;
  };
  token_ids?: number[];
  logprobs?: TokenLogprobs[];
}

export type GenerationEvent = Accepted | Tokens | Finished;

/** What a row was to a step; see docs/protocol.md. */
export type RowPhase = "prefill" | "decode" | "kept" | "held";

/** The batch at a moment, and the steps since the frame before. */
export interface BatchFrame {
  type: "batch";
  t_ms: number;
  scheduler: "dynamic" | "continuous";
  slots: number;
  queue_depth: number;
  running: number;
  tokens_per_s: number;
  steps: { t_ms: number; ms: number; rows: [slot: number, key: number, phase: RowPhase][] }[];
  steps_dropped: number;
  slot_utilization?: number;
  waste_fraction?: number;
}

export interface Hello {
  type: "hello";
  version: number;
  model: string;
  server: string;
  limits: {
    max_model_len: number;
    max_message_bytes: number;
    max_live_requests: number;
    max_logprobs: number;
  };
  state: "ready" | "draining" | "dead";
  watch?: boolean;
  revision?: string;
  dtype?: string;
}

export interface Draining {
  type: "draining";
  deadline_ms: number;
}

/** The server's error by its code, or one of the client's own: see `code`. */
export class WsbatchError extends Error {
  constructor(
    code: string,
    message: string,
    details?: { status?: number; retryAfterMs?: number; cause?: unknown },
  );
  /** A code of docs/protocol.md, or unreachable, connection_lost, timeout, refused, protocol_error, cancelled. */
  readonly code: string;
  /** The HTTP status that means the same; null where there is none. */
  readonly status: number | null;
  /** When another try is worth making; null where it is not. */
  readonly retryAfterMs: number | null;
  /** Once to twice `retryAfterMs`, at random. */
  readonly delayMs: number | null;
}

/** What is used of `@msgpack/msgpack`. */
export interface Msgpack {
  encode(value: unknown, options: { ignoreUndefined: boolean }): Uint8Array;
  decode(data: Uint8Array): unknown;
}

export interface ConnectOptions {
  /** The server's auth token. */
  token?: string | null;
  /** The module `@msgpack/msgpack`, for binary frames; default: JSON. */
  msgpack?: Msgpack;
  /** Where there is no global one (Node 20): the class of a library, such as `ws`. */
  WebSocket?: new (url: string, protocols?: string | string[]) => unknown;
  /** For everything up to the server's hello; default 10,000. */
  timeoutMs?: number;
  /** Silence after which the server is pinged, and again after which it is given up; 0 never; default 20,000. */
  keepaliveMs?: number;
  signal?: AbortSignal;
}

/** Connect, and wait for the server's hello. Rejects with a WsbatchError that says why there is no connection. */
export function connect(url: string | URL, options?: ConnectOptions): Promise<Client>;

/** Why the server at this ws:// address refuses connections, from its /readyz. Never rejects. */
export function whyRefused(url: string | URL): Promise<WsbatchError>;

export interface GenerateOptions {
  /** Aborting cancels the request; the iteration then throws the signal's reason. */
  signal?: AbortSignal;
  /** How often a refusal that says when to retry is retried, before the first token; default 0. */
  retries?: number;
}

export interface Completion {
  text: string;
  tokenIds: number[];
  logprobs: TokenLogprobs[] | null;
  accepted: Accepted;
  finished: Finished;
}

export interface Client {
  readonly hello: Hello;
  /** Set once the server has said that it is shutting down. */
  readonly draining: Draining | null;
  /** Whether requests can be made. */
  readonly open: boolean;
  /** Resolves when the connection has ended, however. */
  readonly closed: Promise<{ code: number; reason: string }>;
  /**
   * Start a generation now. Throws WsbatchError where the connection has ended, where the request is too large, and
   * where it holds what no frame can: NaN, a Date, half of a surrogate pair …
   */
  generate(request: GenerateRequest, options?: GenerateOptions): Generation;
  /** The whole output of a generation. */
  complete(request: GenerateRequest, options?: GenerateOptions): Promise<Completion>;
  /** The live batch, until the loop is left or `signal` aborts. */
  watch(options?: { signal?: AbortSignal }): AsyncGenerator<BatchFrame, void, void>;
  /** Close the connection; what is live on it is cancelled. */
  close(): Promise<{ code: number; reason: string }>;
}

/** The events of one generation. Iterating throws WsbatchError where it ends with one. */
export interface Generation extends AsyncIterableIterator<GenerationEvent> {
  readonly request: GenerateRequest;
  /** Stop it; the iteration goes on to its end, `finished` with the reason `cancelled`. */
  cancel(): void;
  /** The whole output. Instead of iterating, not after it. */
  completion(): Promise<Completion>;
}
