"""The way into the queue: checks, a reserved place, prompt ids, and who gives way when the queue is full."""

from collections.abc import Awaitable, Callable

from wsbatch.batching.admission import Admission
from wsbatch.batching.costs import StepCostFit
from wsbatch.config import EngineConfig
from wsbatch.errors import BadRequest, QueueFull, RequestError
from wsbatch.messages import DEFAULT_PRIORITY, GenerateRequest
from wsbatch.steps import ModelInfo

Tokenise = Callable[[GenerateRequest], Awaitable[list[int]]]


class Intake:
    """Admits requests.

    Args:
        config: the queue's bounds and the latency goals.
        info: the model's facts.
        tokenise: turns a request into prompt ids, off the event loop where it takes long. Raises RequestError.
        max_request_tokens: prompt plus output that the model and its cache can hold.
        closed: why nothing is admitted at all (draining, dead); None while the engine is open.
        sheddable: whether a request waits that is less urgent than this class.
        shed: drop the least urgent of those; whether there was one.
        running: live rows now.
        costs: what steps cost, fitted as they come.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        tokenise: Tokenise,
        max_request_tokens: int,
        closed: Callable[[], RequestError | None],
        sheddable: Callable[[int], bool],
        shed: Callable[[int], bool],
        running: Callable[[], int],
        costs: StepCostFit,
    ) -> None:
        self.admission = Admission(
            max_requests=config.max_queue_requests,
            max_tokens=config.max_queue_tokens,
            max_request_tokens=max_request_tokens,
        )
        self._costs = costs
        self._config = config
        self._info = info
        self._tokenise = tokenise
        self._closed = closed
        self._sheddable = sheddable
        self._shed = shed
        self._running = running

    def refusal(self) -> RequestError | None:
        """See `Engine.refusal`."""
        full = self.admission.refusal()
        if full is not None and self._sheddable(DEFAULT_PRIORITY):
            full = None
        return self._closed() or full

    async def admit(self, request: GenerateRequest) -> list[int]:
        """The request's prompt ids, its place in the queue taken: `admission.leave` gives that back.

        Waits for the tokeniser only. Raises RequestError; then, and when it is cancelled, no place is held.
        """
        self._check_open()
        resumed = len(request.resume_token_ids)
        max_new_tokens = request.sampling.max_tokens - resumed
        if max_new_tokens < 0:
            raise BadRequest(
                f"resume_token_ids holds {resumed} tokens: may hold max_tokens {request.sampling.max_tokens} at most"
            )
        self._make_way(self.admission.reserve, request.priority)
        try:
            prompt_ids = await self._tokenise(request)
            self._check_open()
            self._check_ids(prompt_ids, request)
            tokens = len(prompt_ids) + resumed
            self._check_latency(tokens)
            self._make_way(lambda: self.admission.fill(tokens, max_new_tokens), request.priority)
        except BaseException:
            self.admission.leave(0)
            raise
        return prompt_ids

    def _make_way(self, take: Callable[[], None], priority: int) -> None:
        """Take the place, shedding less urgent requests while the queue is too full for it."""
        while True:
            try:
                return take()
            except QueueFull:
                if not self._shed(priority):
                    raise

    def _check_open(self) -> None:
        if (closed := self._closed()) is not None:
            raise closed

    def _check_ids(self, prompt_ids: list[int], request: GenerateRequest) -> None:
        if not prompt_ids:
            raise BadRequest("the prompt is empty: at least one token is needed")
        size = self._info.vocab_size
        for field, ids in (("token_ids", request.token_ids or ()), ("resume_token_ids", request.resume_token_ids)):
            worst = max(ids, default=0)
            if worst >= size:
                raise BadRequest(f"{field} holds {worst}: ids must be below the vocabulary size {size}")
        # A tokenizer may have more tokens than its model: the text half of a model that sees, say, has none for images.
        worst = max(prompt_ids)
        if worst >= size:
            field = "prompt" if request.prompt is not None else "messages"
            raise BadRequest(
                f"{field} holds the token {worst}, which the model does not have: its vocabulary is {size}"
            )

    def _check_latency(self, tokens: int) -> None:
        """Refuse what would break a latency goal, as far as the steps so far tell. Raises QueueFull."""
        costs = self._costs.fitted()
        if costs is None:
            return
        running, waiting = self._running(), self.admission.requests  # this request included
        slots = self._config.max_batch_size
        if self._config.itl_slo_ms is not None:
            step_ms = 1000 * costs.step_s(decode_rows=min(slots, running + waiting), prefill_tokens=0)
            if step_ms > self._config.itl_slo_ms:
                raise self._too_slow(f"a step with one more row would take {step_ms:.0f} ms", "itl_slo_ms")
        if self._config.ttft_slo_ms is not None:
            prefill_s = costs.step_s(decode_rows=running, prefill_tokens=self.admission.tokens + tokens)
            queue_s = waiting * self.admission.interval_s if running + waiting > slots else 0.0
            ttft_ms = (queue_s + prefill_s) * 1000
            if ttft_ms > self._config.ttft_slo_ms:
                raise self._too_slow(f"the first token would come after {ttft_ms:.0f} ms", "ttft_slo_ms")

    def _too_slow(self, what: str, goal: str) -> QueueFull:
        message = f"{what}: over {goal} {getattr(self._config, goal):g}"
        return QueueFull(message, retry_after_ms=self.admission.retry_after_ms())
