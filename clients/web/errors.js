/**
 * What goes wrong: the server's own errors by their code, and the client's: unreachable, connection_lost, timeout,
 * refused, protocol_error.
 */
export class WsbatchError extends Error {
  constructor(code, message, { status, retryAfterMs, cause } = {}) {
    super(message, { cause: cause ?? undefined });
    this.name = "WsbatchError";
    this.code = code;
    this.status = status ?? null;
    this.retryAfterMs = retryAfterMs ?? null;
  }

  /** The error that an `error` frame stands for. */
  static of(frame) {
    return new WsbatchError(frame.code, frame.message, { status: frame.status, retryAfterMs: frame.retry_after_ms });
  }

  /** How long to wait before another try: once to twice what the server said, so that clients do not come back as
   * one. null where it did not ask for a retry. */
  get delayMs() {
    return this.retryAfterMs === null ? null : this.retryAfterMs * (1 + Math.random());
  }
}
