"""Choosing tokens: exact sets against plain Python, the right distribution, and noise that nobody else can change."""

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.messages import SamplingParams
from wsbatch.model import sampling
from wsbatch.model.sampling import sample, splitmix64, uniform

GAMMA = 0x9E3779B97F4A7C15


def allowed(logits: list[float], row: SamplingParams) -> list[int]:
    """The ids that top-k, then top-p leave, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: row.top_k] if row.top_k else order
    if row.top_p >= 1:
        return order
    weights = [math.exp((logits[i] - logits[order[0]]) / row.temperature) for i in order]
    goal, mass = row.top_p * math.fsum(weights), 0.0
    for count, weight in enumerate(weights, start=1):
        mass += weight
        if mass >= goal:
            return order[:count]
    return order


def choose(logits: list[float], row: SamplingParams, position: int) -> int:
    """One token in plain Python: the inverse CDF, in id order, of the noise at (seed, position)."""
    kept = sorted(allowed(logits, row))
    peak = max(logits)
    weights = [math.exp((logits[i] - peak) / row.temperature) for i in kept]
    goal, mass = uniform(row.seed, position) * math.fsum(weights), 0.0
    for token, weight in zip(kept, weights, strict=True):
        mass += weight
        if mass > goal:
            return token
    return kept[-1]


def draws(logits: torch.Tensor, row: SamplingParams, count: int) -> Counter[int]:
    """How often each token comes, over `count` positions."""
    rows = [row] * count
    ids, _ = sample(logits.expand(count, -1), rows, range(count))
    return Counter(ids)


def test_splitmix64_gives_the_published_sequence() -> None:
    # The sequence of seed 1234567, as other implementations publish it.
    seen = [splitmix64(1234567 + n * GAMMA) for n in range(1, 6)]
    assert seen == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_noise_is_uniform_over_positions_and_over_seeds() -> None:
    for values in ([uniform(3, p) for p in range(10_000)], [uniform(s, 3) for s in range(10_000)]):
        assert min(values) >= 0
        assert max(values) < 1
        counts = Counter(int(value * 100) for value in values)
        assert sum((counts[i] - 100) ** 2 / 100 for i in range(100)) < 148.2  # chi-square, 99 df, p = 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-math.inf, -2.0, -math.inf, -1.0]], dtype=dtype)
    assert sample(logits, [SamplingParams()] * 3, [0] * 3) == ([1, 0, 3], None)


def test_greedy_batches_compute_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_draw", None)
    assert sample(torch.eye(5), [SamplingParams(seed=i) for i in range(5)], [0] * 5)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab", [7, 3000])  # the second is larger than what `_limit` puts in order at first
@pytest.mark.parametrize("seed", range(6))
def test_sets_and_tokens_equal_plain_python(vocab: int, seed: int) -> None:
    rng = random.Random(seed)
    rows, table = [], []
    for _ in range(12):
        spread = rng.choice([0.2, 2.0, 8.0])
        # Rounded logits tie often, as a bfloat16 model's do.
        table.append([round(rng.gauss(0, spread), rng.choice([0, 1, 6])) for _ in range(vocab)])
        top_k = rng.choice([0, 1, 3, 40, 600, vocab, vocab + 5])
        top_p = rng.choice([0.0, 0.3, 0.9, 0.999, 1.0])
        rows.append(
            SamplingParams(temperature=rng.choice([0.1, 0.7, 1.5]), top_k=top_k, top_p=top_p, seed=rng.getrandbits(53))
        )
    positions = [rng.randrange(10_000) for _ in rows]
    logits = torch.tensor(table, dtype=torch.float64)
    for _ in range(8):
        assert sample(logits, rows, positions)[0] == [
            choose(*args) for args in zip(table, rows, positions, strict=True)
        ]
        positions = [position + 1 for position in positions]


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(0, 30), st.floats(0, 1), st.floats(0.05, 3))
@settings(max_examples=60, deadline=None)
def test_only_allowed_tokens_come(seed: int, vocab: int, top_k: int, top_p: float, temperature: float) -> None:
    rng = random.Random(seed)
    table = [float(rng.randrange(-6, 7)) for _ in range(vocab)]
    row = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assert set(draws(torch.tensor(table), row, 50)) <= set(allowed(table, row))


@pytest.mark.parametrize("vocab", [4, 600])
def test_a_set_that_reaches_top_p_exactly_is_enough(vocab: int) -> None:
    # Equal weights add up without rounding; of equals the lower ids are kept.
    seen = draws(torch.zeros(1, vocab), SamplingParams(temperature=1.0, top_p=0.5, seed=2), 5_000)
    assert set(seen) == set(range(vocab // 2))


def test_a_minus_infinite_logit_never_comes() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, [0, 7, 49]] = torch.tensor([1.0, 1.0, 0.0])
    assert set(draws(logits, SamplingParams(temperature=2.0, seed=1), 500)) == {0, 7, 49}


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 2), (1 - 2.0**-53, 6)])
def test_the_ends_of_the_noise_choose_tokens_that_can_come(
    noise: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "uniform", lambda seed, position: noise)
    logits = torch.tensor([[-math.inf, -math.inf, 0.1, 0.7, -math.inf, 1.3, 0.2, -math.inf]])
    assert sample(logits, [SamplingParams(temperature=1.0)], [0])[0] == [expected]


@pytest.mark.parametrize(
    "row",
    [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(temperature=0.6, seed=12),
        SamplingParams(temperature=1.3, top_k=6, seed=13),
        SamplingParams(temperature=1.0, top_p=0.8, seed=14),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=15),
    ],
)
def test_frequencies_follow_the_distribution(row: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5))
    kept = allowed(logits.tolist(), row)
    expected = (logits[kept].double() / row.temperature).softmax(dim=0).tolist()
    count = 20_000
    seen = draws(logits[None], row, count)
    assert set(seen) == set(kept)
    statistic = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in zip(kept, expected, strict=True))
    # The 99.9 % points of chi-square with 1 to 11 degrees of freedom.
    bound = [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26][len(kept) - 2]
    assert statistic < bound


def test_a_row_draws_the_same_whoever_shares_the_batch() -> None:
    rng = random.Random(8)
    logits = torch.randn(16, 2000, generator=torch.Generator().manual_seed(8)) * 3
    rows = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.getrandbits(53),
            logprobs=rng.choice([None, 0, 3]),
        )
        for _ in range(16)
    ]
    positions = [rng.randrange(1000) for _ in rows]
    whole, logprobs = sample(logits, rows, positions)
    assert logprobs is not None
    for _ in range(20):
        some = rng.sample(range(16), rng.randrange(1, 16))
        ids, found = sample(logits[some], [rows[i] for i in some], [positions[i] for i in some])
        assert ids == [whole[i] for i in some]
        assert (found or [None] * len(some)) == [logprobs[i] for i in some]


def test_noise_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(1, 4096)
    row = SamplingParams(temperature=1.0, seed=2**53 - 1)
    first = [sample(logits, [row], [position])[0][0] for position in range(30)]
    assert first == [sample(logits, [row], [position])[0][0] for position in range(30)]
    assert len(set(first)) > 25
    other = [
        sample(logits, [SamplingParams(temperature=1.0, seed=2**53 - 2)], [position])[0][0] for position in range(30)
    ]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0, -1.0]] * 4)
    expected = logits[0].log_softmax(dim=0).tolist()
    rows = [
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(temperature=0.01, top_k=1, seed=3, logprobs=0),
        SamplingParams(temperature=5.0, seed=3, logprobs=9),
    ]
    ids, found = sample(logits, rows, [0, 1, 2, 3])
    assert found is not None
    assert found[0] == (pytest.approx(expected[1]), ((1, pytest.approx(expected[1])), (3, pytest.approx(expected[3]))))
    assert found[1] is None
    assert ids[2] == 1
    assert found[2] == (pytest.approx(expected[1]), ())
    assert found[3] is not None
    assert found[3][0] == pytest.approx(expected[ids[3]])
    assert [token for token, _ in found[3][1]] == [1, 3, 2, 0, 4]


def test_logprobs_are_finite_and_ties_past_the_leaders_are_exact() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 5] = -math.inf
    logits[1] = -math.inf
    logits[1, 2999] = 0.0
    _, found = sample(logits, [SamplingParams(logprobs=4)] * 2, [0, 0])
    assert found is not None
    assert found[0] is not None
    assert found[1] is not None
    assert [token for token, _ in found[0][1]] == [0, 1, 2, 3]
    assert [token for token, _ in found[1][1]] == [2999, 0, 1, 2]
    assert all(math.isfinite(value) for entry in found if entry for _, value in entry[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_whose_logits_are_not_finite_gets_no_token(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 10)
    rows = [SamplingParams(temperature=temperature, top_p=0.9, seed=5, logprobs=2)] * 3
    expected, _ = sample(logits, rows, [0, 1, 2])
    logits[1, 4] = bad
    ids, logprobs = sample(logits, rows, [0, 1, 2])
    assert ids == [expected[0], -1, expected[2]]
    assert logprobs is not None
    assert [found is None for found in logprobs] == [False, True, False]
