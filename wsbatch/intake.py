"""The way into the queue: checks, a reserved place, prompt ids, and who gives way when the queue is full."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from wsbatch.batching.admission import Admission, Place
from wsbatch.batching.queue import Work
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.errors import BadRequest, NeverFits, QueueFull, RequestError
from wsbatch.messages import DEFAULT_PRIORITY, GenerateRequest
from wsbatch.requests import Requests
from wsbatch.steps import ModelInfo
from wsbatch.wire import WireLimits
from wsbatch.wire.generate import GenerateFields

Tokenise = Callable[[GenerateRequest], Awaitable[list[int]]]


class Intake:
    """Decides who is let in. It changes nothing but places.

    Args:
        config: the latency goals.
        info: the model's facts.
        tokenise: turns a request into prompt ids, off the event loop where it takes long. Raises RequestError.
        admission: the queue's places.
        requests: who waits, and may have to give way.
        scheduler: how many rows run, and what its steps cost.
        closed: why nothing is admitted at all (draining, dead); None while the engine is open.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        info: ModelInfo,
        tokenise: Tokenise,
        admission: Admission,
        requests: Requests,
        scheduler: Scheduler,
        closed: Callable[[], RequestError | None],
    ) -> None:
        self._config = config
        self._info = info
        self._tokenise = tokenise
        self._admission = admission
        self._requests = requests
        self._scheduler = scheduler
        self._closed = closed
        self._fields = GenerateFields(WireLimits())

    def refusal(self) -> RequestError | None:
        """See `Engine.refusal`."""
        full = self._admission.refusal()
        if full is not None and self._requests.less_urgent(DEFAULT_PRIORITY):
            full = None
        return self._closed() or full

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """The request, if nothing is wrong with it and the engine is open. Raises RequestError."""
        self._check_open()
        request = self._fields.check(request)
        resumed, most = len(request.resume_token_ids), request.sampling.most_tokens
        if resumed > most:
            raise BadRequest(f"resume_token_ids holds {resumed} tokens: may hold max_tokens {most} at most")
        self._check_ids("resume_token_ids", request.resume_token_ids)
        return request

    def reserve(self, request: GenerateRequest) -> Place:
        """A place to tokenise the request in. Raises QueueFull where there is none, whoever might give way."""
        full = self._admission.refusal() is not None
        return self._admission.reserve(sheddable=len(self._requests.less_urgent(request.priority)) if full else 0)

    async def tokenise(self, request: GenerateRequest) -> list[int]:
        """The request's prompt ids. Waits for the tokeniser only. Raises RequestError."""
        prompt_ids = await self._tokenise(request)
        if not prompt_ids:
            raise BadRequest("the prompt is empty: at least one token is needed")
        if request.token_ids is not None:
            self._check_ids("token_ids", prompt_ids)
        # A tokenizer may have more tokens than its model: the text half of a model that sees, say, has none for images.
        elif (worst := max(prompt_ids)) >= (size := self._info.vocab_size):
            field = "prompt" if request.prompt is not None else "messages"
            raise BadRequest(
                f"{field} holds the token {worst}, which the model does not have: its vocabulary is {size}"
            )
        return prompt_ids

    def fit(self, request: GenerateRequest, prompt_tokens: int) -> GenerateRequest:
        """The request with its `max_tokens`: where it names none, no more than its prompt leaves. Raises NeverFits."""
        room = self._info.max_model_len - prompt_tokens
        resumed, most = len(request.resume_token_ids), request.sampling.max_tokens
        if most is None:
            most = max(min(request.sampling.most_tokens, room), resumed, 1)
        if most > room:
            tokens = prompt_tokens + resumed
            raise NeverFits(
                f"prompt of {tokens} tokens plus max_tokens {most - resumed} is {prompt_tokens + most}: "
                f"at most {self._info.max_model_len} fit"
            )
        if most == request.sampling.max_tokens:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    def make_way(self, request: GenerateRequest, tokens: int, place: Place) -> list[Work]:
        """Who has to leave the queue for a request of so many tokens: nobody where there is room.

        Raises RequestError where it cannot be let in even so. Call it last, once nothing else can refuse the request:
        nobody is to give way for nothing.
        """
        self._check_open()  # once more: tokenising may have taken long
        self._check_latency(tokens)
        full = self._admission.lacks(place, tokens)
        victims: list[Work] = []
        if full is not None:
            freed = 0
            for victim in self._requests.less_urgent(request.priority):
                victims.append(victim)
                freed += len(victim.token_ids)
                if self._admission.lacks(place, tokens, less_requests=len(victims), less_tokens=freed) is None:
                    return victims
            raise full
        return victims

    def _check_open(self) -> None:
        if (closed := self._closed()) is not None:
            raise closed

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if max(ids, default=0) >= self._info.vocab_size:
            raise BadRequest(f"{name} holds {max(ids)}: ids must be below the vocabulary size {self._info.vocab_size}")

    def _check_latency(self, tokens: int) -> None:
        """Refuse what would break a latency goal, as far as the steps so far tell. Raises QueueFull."""
        costs = self._scheduler.ledger.costs.fitted()
        if costs is None:
            return
        running = self._scheduler.running
        waiting = self._admission.requests + self._admission.lent  # this request included
        slots = self._config.max_batch_size
        if self._config.itl_slo_ms is not None:
            step_ms = 1000 * costs.step_s(decode_rows=min(slots, running + waiting), prefill_tokens=0)
            if step_ms > self._config.itl_slo_ms:
                raise self._too_slow(f"a step with one more row would take {step_ms:.0f} ms", "itl_slo_ms")
        if self._config.ttft_slo_ms is not None:
            prefill_s = costs.step_s(decode_rows=running, prefill_tokens=self._admission.tokens + tokens)
            queue_s = waiting * self._admission.interval_s if running + waiting > slots else 0.0
            ttft_ms = (queue_s + prefill_s) * 1000
            if ttft_ms > self._config.ttft_slo_ms:
                raise self._too_slow(f"the first token would come after {ttft_ms:.0f} ms", "ttft_slo_ms")

    def _too_slow(self, what: str, goal: str) -> QueueFull:
        message = f"{what}: over {goal} {getattr(self._config, goal):g}"
        return QueueFull(message, retry_after_ms=self._admission.retry_after_ms())
