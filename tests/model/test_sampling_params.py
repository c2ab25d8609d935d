"""Every sampling parameter reaches the sampler, of greedy rows too; one from outside works from frame to token."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from wsbatch.config import EngineConfig
from wsbatch.engine.open import SCHEDULERS, assemble
from wsbatch.messages import Finished, GenerateRequest, SamplingParams
from wsbatch.model import padded, paged
from wsbatch.model.loading import LoadedModel
from wsbatch.model.sampling import MOOT_WHEN_GREEDY, for_the_kernels, plain_greedy, sample
from wsbatch.steps import Model, PaddedRow, PaddedStart, PagedRow, PagedStep, StepPlan, StepResult
from wsbatch.testing.worker import tokenize_here
from wsbatch.text import ByteText
from wsbatch.wire import JsonCodec, generate
from wsbatch.wire.fields import MAX_TOKEN_ID, Reader, WireLimits, array, integer

PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParams(seed=1)
SAMPLED = SamplingParams(temperature=0.8, seed=1)

SET: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "seed": 11,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "logprobs": 2,
}
"""A value for each sampling parameter that is not its default."""

PLANS: dict[str, Callable[[SamplingParams], StepPlan]] = {
    "dynamic": lambda row: PaddedStart((PaddedRow(1, PROMPT, row),), 1),
    "continuous": lambda row: PagedStep((PagedRow(1, PROMPT, 0, (2,), row),)),
}
BASES = pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
BOTH = pytest.mark.parametrize("scheduler", list(PLANS))


def config(scheduler: str) -> EngineConfig:
    return EngineConfig(scheduler=scheduler, max_batch_total_tokens=256)  # type: ignore[arg-type]  # by parametrize


@pytest.fixture(scope="module")
def models(tiny: Callable[[str], LoadedModel]) -> dict[str, Model]:
    """By scheduler; each on a copy of the tiny model, for the paged one replaces its attention."""
    loaded = tiny("llama")
    return {
        name: SCHEDULERS[name].model(replace(loaded, model=copy.deepcopy(loaded.model)), config(name)) for name in PLANS
    }


@BASES
@pytest.mark.parametrize("name", [spec.name for spec in fields(SamplingParams)])
@BOTH
def test_every_parameter_reaches_the_sampler(
    scheduler: str, name: str, base: SamplingParams, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []

    def watching(logits: Tensor, rows: list[SamplingParams], positions: list[int]) -> Any:
        seen.extend(rows)
        return sample(logits, rows, positions)

    monkeypatch.setattr(padded, "sample", watching)
    monkeypatch.setattr(paged, "sample", watching)
    row = replace(base, **{name: SET[name]})
    assert getattr(row, name) != getattr(SamplingParams(), name)
    models[scheduler].run(PLANS[scheduler](row))
    spared = scheduler == "continuous" and base is GREEDY and name in MOOT_WHEN_GREEDY
    assert seen == ([] if spared else [row])


@pytest.mark.parametrize("name", sorted(MOOT_WHEN_GREEDY))
def test_the_sampler_gives_a_greedy_row_the_likeliest_token_whatever_is_moot(name: str) -> None:
    logits = torch.randn(20, 97, generator=torch.Generator().manual_seed(4))
    row = replace(SamplingParams(), **{name: SET[name]})
    assert plain_greedy(row)
    assert sample(logits, [row] * 20, range(20)) == (logits.argmax(dim=-1).tolist(), None)


def test_the_kernels_are_asked_only_for_what_they_know() -> None:
    assert all(for_the_kernels(replace(SAMPLED, **{name: SET[name]})) for name in SET)
    assert for_the_kernels(Forbidding(temperature=0.5))
    assert not for_the_kernels(Forbidding(temperature=0.5, forbidden=(3,)))


@dataclass(frozen=True, slots=True)
class Forbidding(SamplingParams):
    """`SamplingParams` with a field more: ids that never come."""

    forbidden: tuple[int, ...] = ()


def forbid(logits: Tensor, rows: list[Forbidding], positions: list[int]) -> Any:
    for index, row in enumerate(rows):
        logits[index, list(row.forbidden)] = -torch.inf
    return sample(logits, rows, positions)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the list in docs/extending.md does to `messages/request.py`, `wire/generate.py` and `model/sampling.py`."""
    readers = generate.sampling_readers

    def with_forbidden(limits: WireLimits) -> dict[str, Reader]:
        return readers(limits) | {"forbidden": array(integer(0, MAX_TOKEN_ID), high=64)}

    monkeypatch.setattr(generate, "SamplingParams", Forbidding)
    monkeypatch.setattr(generate, "sampling_readers", with_forbidden)
    for module in (padded, paged):
        monkeypatch.setattr(module, "sample", forbid)


class HereWorker:
    """Implements `Worker`: runs each step where it is called."""

    def __init__(self, model: Model) -> None:
        self.model = model

    async def step(self, plan: StepPlan) -> StepResult:
        await trio.lowlevel.checkpoint()
        return self.model.run(plan)


async def output(model: Model, scheduler: str, base: SamplingParams, *forbidden: int) -> tuple[int, ...]:
    """Twelve tokens, asked for by a frame."""
    asked = Forbidding(max_tokens=12, temperature=base.temperature, seed=base.seed, forbidden=forbidden)
    codec = JsonCodec()
    request = codec.decode_client(codec.encode_client(GenerateRequest(token_ids=PROMPT, sampling=asked, stream=False)))
    assert isinstance(request, GenerateRequest)
    worker = HereWorker(model)
    engine = assemble(config(scheduler), info=model.info, worker=worker, codec=ByteText(), run=tokenize_here)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        ending = [event async for event in await engine.submit(request)][-1]
        nursery.cancel_scope.cancel()
    assert isinstance(ending, Finished)
    assert ending.token_ids is not None
    return ending.token_ids


@pytest.mark.usefixtures("forbidden")
@BASES
@BOTH
async def test_a_parameter_from_outside_acts_on_greedy_and_sampled_rows(
    scheduler: str, base: SamplingParams, models: dict[str, Model], autojump_clock: MockClock
) -> None:
    usual = await output(models[scheduler], scheduler, base)
    unwanted = usual[4]
    other = await output(models[scheduler], scheduler, base, unwanted)
    assert unwanted not in other
    assert other[: usual.index(unwanted)] == usual[: usual.index(unwanted)]
