"""The stall-free property on a virtual clock, and the choice of the chunk that an SLO leaves room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.costs import CostModel
from wsbatch.batching.prefill import choose_chunk
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Step
from wsbatch.messages import SamplingParams
from wsbatch.steps import PagedStep, StepResult


def request(key: int, prompt_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(
        key=key,
        token_ids=tuple(range(prompt_tokens)),
        max_new_tokens=1000,
        sampling=SamplingParams(),
        priority=5,
        arrived_s=float(key),
    )


def longest_gap_s(chunk: int, *, tau_s: float, alpha_s: float, beta_s: float) -> tuple[float, float]:
    """8 streams run when a prompt of 4,000 tokens arrives: their longest gap, and the newcomer's TTFT.

    A step costs tau + alpha * decodes + beta * prompt tokens on a virtual clock.
    """
    batch = ContinuousScheduler(
        max_batch_size=16,
        max_batch_prefill_tokens=max(chunk, 64),
        prefill_chunk_tokens=chunk,
        pool=BlockPool(1000, 16),
    )
    for key in range(8):
        batch.add(request(key, 4))
    now_s = arrived_s = ttft_s = gap_s = 0.0
    last_s: dict[int, float] = {}
    for count in range(200 + 4000 // chunk):
        if count == 50:
            batch.add(request(8, 4000))
            arrived_s = now_s
        decision = batch.decide(now_s)
        assert isinstance(decision, Step)
        assert isinstance(decision.plan, PagedStep)
        rows = decision.plan.rows
        prompt = sum(len(row.token_ids) for row in rows if row.start < (4 if row.key < 8 else 4000))
        decodes = sum(len(row.token_ids) for row in rows) - prompt
        now_s += tau_s + alpha_s * decodes + beta_s * prompt
        ids = tuple(7 for row in rows if row.sampling)
        for one in batch.complete(StepResult(ids, None, 1.0), now_s).tokens:
            if one.key < 8:
                gap_s = max(gap_s, now_s - last_s.get(one.key, now_s))
            elif one.key not in last_s:
                ttft_s = now_s - arrived_s
            last_s[one.key] = now_s
    assert len(last_s) == 9
    return gap_s, ttft_s


@pytest.mark.parametrize("chunk", [16, 64, 256, 1000])
def test_no_stream_stalls_longer_than_a_decode_step_and_a_chunk(chunk: int) -> None:
    tau_s, alpha_s, beta_s = 0.010, 0.001, 0.0007
    gap_s, _ = longest_gap_s(chunk, tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s)
    assert gap_s <= tau_s + 8 * alpha_s + beta_s * chunk + 1e-9


def test_without_chunking_the_streams_stall_for_the_whole_prompt() -> None:
    tau_s, alpha_s, beta_s = 0.010, 0.001, 0.0007
    gap_s, ttft_s = longest_gap_s(4000, tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s)
    assert gap_s >= 4000 * beta_s
    _, chunked_ttft_s = longest_gap_s(256, tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s)
    assert ttft_s < chunked_ttft_s  # what the chunks cost the newcomer


@given(
    slo_s=st.floats(0.001, 10),
    tau_s=st.floats(0, 1),
    alpha_s=st.floats(0, 0.1),
    beta_s=st.floats(1e-6, 0.1),
    rows=st.integers(0, 64),
)
def test_the_chosen_chunk_is_the_largest_within_the_slo(
    slo_s: float, tau_s: float, alpha_s: float, beta_s: float, rows: int
) -> None:
    def step_s(chunk: int) -> float:
        return tau_s + alpha_s * rows + beta_s * chunk

    if step_s(0) > slo_s:
        with pytest.raises(ValueError, match=r"itl_slo_s is .*: must be at least"):
            choose_chunk(slo_s, CostModel(tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s), rows=rows)
        return
    chunk = choose_chunk(slo_s, CostModel(tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s), rows=rows)
    assert chunk >= 16
    assert chunk == 16 or step_s(chunk) <= slo_s * (1 + 1e-9)
    assert step_s(chunk + 1) > slo_s * (1 - 1e-9)


def test_choosing_needs_a_cost_for_prompt_tokens() -> None:
    with pytest.raises(ValueError, match="beta_s is 0: must be above 0"):
        choose_chunk(1.0, CostModel(tau_s=0.1, alpha_s=0.1, beta_s=0), rows=1)


def test_choose_chunk_by_hand() -> None:
    assert choose_chunk(0.100, CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0007), rows=8) == 117
    assert choose_chunk(0.0181, CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0007), rows=8, block_tokens=4) == 4
