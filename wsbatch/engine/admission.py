"""Admission control: what refuses a request, the places in the queue, and who gives way when it is full."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from wsbatch.batching.admission import Admission, Place
from wsbatch.batching.fairness import Client, FairShare, sheddable
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.errors import BadRequest, NeverFits, QueueFull
from wsbatch.messages import GenerateRequest
from wsbatch.steps import ModelInfo
from wsbatch.wire import WireLimits
from wsbatch.wire.generate import GenerateFields

Waiting: TypeAlias = Iterable[tuple[Client, ScheduledRequest]]
"""The requests in the queue, each with whose it is."""


class AdmissionControl:
    """Decides who may wait, and keeps the places, until a request starts or ends in the queue.

    Args:
        config: the queue's bounds and the latency goals.
        info: the model's facts.
        scheduler: how many rows run, and what its steps cost.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, scheduler: Scheduler) -> None:
        self._config = config
        self._info = info
        self._scheduler = scheduler
        self._fields = GenerateFields(WireLimits())
        self._places = Admission(max_requests=config.max_queue_requests, max_tokens=config.max_queue_tokens)
        self._fairness = FairShare()

    def __repr__(self) -> str:
        return f"<AdmissionControl {self._places!r}>"

    @property
    def full(self) -> bool:
        """Whether some requests made now would be refused whatever they hold: `refusal` tells which."""
        return self._places.full or self._too_late(1, newcomers=1) is not None

    def refusal(self, client: Client, priority: int, waiting: Waiting) -> QueueFull | None:
        """Why a request made now would be refused whatever it holds; None if it may be let in."""
        full = self._places.refusal(sheddable=self._sheddable_count(client, priority, waiting))
        return full or self._too_late(1, newcomers=1)

    def check(self, request: GenerateRequest, *, checked: bool) -> GenerateRequest:
        """The request, if nothing is wrong with its fields, each for itself unless it is `checked`, and together.

        Raises BadRequest or TooLarge.
        """
        if not checked:
            request = self._fields.check(request)
        resumed, most = len(request.resume_token_ids), request.sampling.most_tokens
        if resumed > most:
            raise BadRequest(f"resume_token_ids holds {resumed} tokens: may hold max_tokens {most} at most")
        self._check_ids("resume_token_ids", request.resume_token_ids)
        return request

    def reserve(self, request: GenerateRequest, client: Client, waiting: Waiting) -> Place:
        """A place to tokenize the request in. Raises QueueFull where there is none, whoever might give way."""
        return self._places.reserve(sheddable=self._sheddable_count(client, request.priority, waiting))

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

    def requests_to_shed(
        self, request: GenerateRequest, client: Client, tokens: int, place: Place, waiting: Waiting
    ) -> list[ScheduledRequest]:
        """Who has to leave the queue for a request of so many tokens: nobody where there is room.

        Raises QueueFull where it cannot be let in even so, or would break a latency goal: nobody is to give way for
        nothing.
        """
        if (late := self._too_late(tokens)) is not None:
            raise late
        full = self._places.lacks(place, tokens)
        if full is None:
            return []
        victims: list[ScheduledRequest] = []
        freed = 0
        for victim in self._sheddable(client, request.priority, waiting):
            victims.append(victim)
            freed += len(victim.token_ids)
            if self._places.lacks(place, tokens, less_requests=len(victims), less_tokens=freed) is None:
                return victims
        raise full

    def turn_s(self, client: Client, arrived_s: float) -> float:
        """The fair turn of a client's next request, which waits from now on; see `FairShare`."""
        return self._fairness.turn_s(client, arrived_s, self._places.interval_s)

    def leave(self, place: Place, client: Client) -> None:
        """A request of this client has left the queue: it started, or ended there."""
        place.leave()
        self._fairness.leave(client)

    def started(self, count: int, now_s: float) -> None:
        """This many requests have just left the queue to run."""
        self._places.started(count, now_s)

    def retry_after_ms(self, now_s: float) -> int:
        """When a retry is worth making."""
        return self._places.retry_after_ms(now_s)

    def reserve_retry_ms(self, now_s: float) -> int:
        """The same for a client who is told it, and is expected then."""
        return self._places.reserve_retry_ms(now_s)

    def _sheddable_count(self, client: Client, priority: int, waiting: Waiting) -> int:
        return len(self._sheddable(client, priority, waiting)) if self._places.full else 0

    def _sheddable(self, client: Client, priority: int, waiting: Waiting) -> list[ScheduledRequest]:
        if self._scheduler.queue.least_urgent <= priority:  # found out at once: most refusals are of this kind
            return []
        return sheddable(waiting, client, priority=priority, max_requests=self._config.max_queue_requests)

    def _too_late(self, tokens: int, *, newcomers: int = 0) -> QueueFull | None:
        """Why a request of so many prompt tokens would break a latency goal, as far as the steps so far tell.

        `newcomers` are requests that have no place yet.
        """
        if self._config.itl_slo_ms is None and self._config.ttft_slo_ms is None:
            return None
        costs = self._scheduler.ledger.costs.fitted()
        if costs is None:
            return None
        places, running = self._places, self._scheduler.running
        waiting = places.requests + places.lent + newcomers  # this request included
        slots = self._config.max_batch_size
        if self._config.itl_slo_ms is not None:
            step_ms = 1000 * costs.step_s(decode_rows=min(slots, running + waiting), prefill_tokens=0)
            if step_ms > self._config.itl_slo_ms:
                return self._too_slow(f"a step with one more row would take {step_ms:.0f} ms", "itl_slo_ms")
        if self._config.ttft_slo_ms is not None:
            prefill_s = costs.step_s(decode_rows=running, prefill_tokens=places.tokens + tokens)
            queue_s = waiting * places.interval_s if running + waiting > slots else 0.0
            ttft_ms = (queue_s + prefill_s) * 1000
            if ttft_ms > self._config.ttft_slo_ms:
                return self._too_slow(f"the first token would come after {ttft_ms:.0f} ms", "ttft_slo_ms")
        return None

    def _too_slow(self, what: str, goal: str) -> QueueFull:
        message = f"{what}: over {goal} {getattr(self._config, goal):g}"
        return QueueFull(message)

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
