"""What can refuse a request for its own sake: its fields, its ids, its length, and the latency goals."""

from collections.abc import Sequence
from dataclasses import replace

from wsbatch.batching.admission import Admission
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.errors import BadRequest, NeverFits, QueueFull
from wsbatch.messages import GenerateRequest
from wsbatch.steps import ModelInfo
from wsbatch.wire import WireLimits
from wsbatch.wire.generate import GenerateFields


class RequestChecks:
    """Refuses what cannot be served. It changes nothing.

    Args:
        config: the latency goals.
        info: the model's facts.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self._config = config
        self._info = info
        self._fields = GenerateFields(WireLimits())

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """The request, if nothing is wrong with its fields. Raises BadRequest or TooLarge."""
        request = self._fields.check(request)
        resumed, most = len(request.resume_token_ids), request.sampling.most_tokens
        if resumed > most:
            raise BadRequest(f"resume_token_ids holds {resumed} tokens: may hold max_tokens {most} at most")
        self._check_ids("resume_token_ids", request.resume_token_ids)
        return request

    def fit(self, request: GenerateRequest, prompt_ids: Sequence[int]) -> GenerateRequest:
        """The request with its `max_tokens`: where it names none, no more than its prompt leaves.

        Raises BadRequest for ids that the model does not have, NeverFits where prompt and output are too long.
        """
        self._check_prompt(request, prompt_ids)
        room = self._info.max_model_len - len(prompt_ids)
        resumed, most = len(request.resume_token_ids), request.sampling.max_tokens
        if most is None:
            most = max(min(request.sampling.most_tokens, room), resumed, 1)
        if most > room:
            tokens = len(prompt_ids) + resumed
            raise NeverFits(
                f"prompt of {tokens} tokens plus max_tokens {most - resumed} is {len(prompt_ids) + most}: "
                f"at most {self._info.max_model_len} fit"
            )
        if most == request.sampling.max_tokens:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    def check_latency(self, tokens: int, *, admission: Admission, scheduler: Scheduler) -> None:
        """Refuse what would break a latency goal, as far as the steps so far tell. Raises QueueFull.

        The request's place is among those of `admission` already.
        """
        costs = scheduler.ledger.costs.fitted()
        if costs is None:
            return
        running = scheduler.running
        waiting = admission.requests + admission.lent
        slots = self._config.max_batch_size
        retry_after_ms = admission.retry_after_ms()
        if self._config.itl_slo_ms is not None:
            step_ms = 1000 * costs.step_s(decode_rows=min(slots, running + waiting), prefill_tokens=0)
            if step_ms > (goal := self._config.itl_slo_ms):
                what = f"a step with one more row would take {step_ms:.0f} ms"
                raise QueueFull(f"{what}: over itl_slo_ms {goal:g}", retry_after_ms=retry_after_ms)
        if self._config.ttft_slo_ms is not None:
            prefill_s = costs.step_s(decode_rows=running, prefill_tokens=admission.tokens + tokens)
            queue_s = waiting * admission.interval_s if running + waiting > slots else 0.0
            if (ttft_ms := (queue_s + prefill_s) * 1000) > (goal := self._config.ttft_slo_ms):
                what = f"the first token would come after {ttft_ms:.0f} ms"
                raise QueueFull(f"{what}: over ttft_slo_ms {goal:g}", retry_after_ms=retry_after_ms)

    def _check_prompt(self, request: GenerateRequest, prompt_ids: Sequence[int]) -> None:
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

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        if max(ids, default=0) >= self._info.vocab_size:
            raise BadRequest(f"{name} holds {max(ids)}: ids must be below the vocabulary size {self._info.vocab_size}")
