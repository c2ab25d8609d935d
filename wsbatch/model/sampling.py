"""Choosing each row's next token from its logits, and the log probabilities it asked for.

The noise of a token is ONE uniform number, a function of (seed, position) alone, turned into a token by the inverse of
the row's cumulative distribution in id order. Nothing is drawn from a generator, so a run can be repeated, resumed or
prefilled again with the same noise, whoever shares the batch. `position` counts the tokens before the one being chosen,
prompt included.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from wsbatch.messages import SamplingParams, TokenLogprobs

BROKEN_LOGITS = "the row's logits are not finite"

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15

# Sorting a whole vocabulary costs about 4 ms a row, this many leaders 0.1 ms: a top-k or top-p set almost always lies
# within them, and a row whose set does not is sorted whole.
_LEADERS = 512


MOOT_WHEN_GREEDY = frozenset({"max_tokens", "stop", "stop_token_ids", "ignore_eos", "top_p", "top_k", "seed"})
"""Parameters that change nothing about a greedy row's next token: they end the output, or limit what is drawn."""


KNOWN_TO_THE_KERNELS = frozenset(
    {"max_tokens", "stop", "stop_token_ids", "ignore_eos", "temperature", "top_p", "top_k", "seed", "logprobs"}
)
"""Parameters that `FusedRunner.sample` acts on, or that end the output and are not the sampler's business."""


def plain_greedy(row: SamplingParams) -> bool:
    """Whether `sample` would take the largest logit and return nothing else, so that it may be spared this row.

    Of all parameters but those in MOOT_WHEN_GREEDY, a value other than the default asks for more.
    """
    return _defaults_but(row, MOOT_WHEN_GREEDY)


def for_the_kernels(row: SamplingParams) -> bool:
    """Whether `FusedRunner.sample` does for this row all that `sample` does: it asks for nothing else."""
    return _defaults_but(row, KNOWN_TO_THE_KERNELS)


def _defaults_but(row: SamplingParams, names: frozenset[str]) -> bool:
    """Whether all parameters but these have their default."""
    kind: Any = type(row)
    getter, defaults = _others(kind, names)
    return getter(row) == defaults


@cache
def _others(kind: type[Any], names: frozenset[str]) -> tuple[Callable[[SamplingParams], object], object]:
    """A getter of the parameters but these, and what it gets where none is set."""
    others = [spec.name for spec in fields(kind) if spec.name not in names]
    if not others:
        return (lambda row: None), None
    getter = attrgetter(*others)
    return getter, getter(kind())


def splitmix64(state: int) -> int:
    """The output for one 64-bit state of SplitMix64, in exact integers.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
    David Stafford's "Mix13". The n-th output of a generator seeded with s is `splitmix64(s + n * gamma)`, n from 1.
    """
    z = state & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The noise of the token at `position`: a multiple of 2**-53 in [0, 1).

    The seed is mixed before the counter is added, so that neighbouring seeds do not share stretches of one sequence.
    """
    return float(splitmix64(splitmix64(seed) + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def sample(
    logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """One token id per row, and log probabilities for the rows that asked.

    Temperature 0 takes the largest logit. Otherwise logits are divided by the temperature, then the `top_k` most
    likely tokens are kept, then of those the smallest set whose share of their probability reaches `top_p`. Ties are
    broken by the lower id everywhere.

    Args:
        logits: [R, V], any floating dtype.
        rows: R of them.
        positions: tokens before the one being chosen, per row.

    Returns:
        R ids, and either None or R entries: `(own, ((id, logprob), ...))`, the most likely first, taken from the
        log-softmax of the raw logits (before temperature, top-k and top-p) and clamped to finite numbers.
        The id is -1, and there are no log probabilities, where a row's logits have no finite maximum (NaN, +inf, or
        nothing but -inf).
    """
    peaks, chosen = logits.max(dim=-1)  # [R], [R]; the first of equals
    chosen = chosen.masked_fill(~peaks.isfinite(), -1)
    drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
    if drawn:
        picked = _draw(logits[drawn], peaks[drawn], [rows[i] for i in drawn], [positions[i] for i in drawn])
        chosen[drawn] = picked.where(chosen[drawn] >= 0, -1)
    ids: list[int] = chosen.tolist()
    return ids, _logprobs(logits, rows, ids)


def _draw(logits: Tensor, peaks: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """The inverse CDF of each row's noise, in float64 and in id order: [R, V] to [R] ids."""
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64, device=logits.device)
    weights = logits.double().sub_(peaks.double()[:, None]).div_(temperatures[:, None]).exp_()  # [R, V], largest is 1
    limited = [i for i, row in enumerate(rows) if 0 < row.top_k < logits.shape[-1] or row.top_p < 1]
    if limited:
        subset = weights[limited]
        _limit(subset, logits[limited], [rows[i] for i in limited], min(_LEADERS, logits.shape[-1]))
        weights[limited] = subset
    cumulative = weights.cumsum(dim=-1)  # [R, V]
    total = cumulative[:, -1:]
    noise = [uniform(row.seed or 0, position) for row, position in zip(rows, positions, strict=True)]
    target = torch.tensor(noise, dtype=torch.float64, device=logits.device)[:, None] * total  # [R, 1]
    # The product may round up to the total itself, which no token's interval contains.
    target = target.minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _limit(weights: Tensor, logits: Tensor, rows: Sequence[SamplingParams], leaders: int) -> None:
    """Zero, in place, every weight [R, V] outside its row's top-k and then top-p set.

    Only `leaders` tokens a row are put in order; rows that this does not decide are done again with all.
    """
    vocab = logits.shape[-1]
    values, ids = _leading(logits, leaders)  # [R, L], [R, L]
    ordered = weights.gather(1, ids)  # [R, L]
    counts = torch.tensor([row.top_k if 0 < row.top_k < vocab else vocab for row in rows], device=logits.device)
    shares = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=logits.device)
    in_top_k = torch.arange(leaders, device=logits.device) < counts[:, None]  # [R, L]
    ordered = ordered * in_top_k
    cumulative = ordered.cumsum(dim=-1)
    total = torch.where(counts < vocab, cumulative[:, -1], weights.sum(dim=-1))  # [R]
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    reached = before >= (shares * total)[:, None]
    reached[:, 0] = False  # the most likely token always stays, also where top_p is 0
    kept = in_top_k & (~reached | (shares >= 1)[:, None])  # [R, L], a prefix of each row

    # Equal logits are in id order only above the last leader's value: beyond it, other tokens may belong before them.
    last = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]
    sure = (last > values[:, -1]) & ((counts <= leaders) | (counts == vocab))
    again = [] if leaders == vocab else (~sure).nonzero()[:, 0].tolist()
    if again:
        whole = weights[again]
        _limit(whole, logits[again], [rows[i] for i in again], vocab)
    weights.copy_(torch.zeros_like(weights).scatter_(1, ids, ordered * kept))
    if again:
        weights[again] = whole


def _leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's `count` largest logits with their ids, largest first, equal ones by id: [R, V] to [R, L], [R, L].

    Which of the tokens equal to the last one are among them is left open, unless `count` is the whole vocabulary.
    """
    if count == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _logprobs(logits: Tensor, rows: Sequence[SamplingParams], ids: Sequence[int]) -> list[TokenLogprobs | None] | None:
    """What each row with a token asked for, else None; None altogether where there is no such row."""
    asked = [index for index, row in enumerate(rows) if row.logprobs is not None and ids[index] >= 0]
    if not asked:
        return None
    vocab = logits.shape[-1]
    table = logits[asked].float().log_softmax(dim=-1).clamp_(min=torch.finfo(torch.float32).min)  # [A, V]
    own = table.gather(1, torch.tensor([[ids[i]] for i in asked], device=table.device))[:, 0].tolist()
    count = min(max(rows[i].logprobs or 0 for i in asked), vocab)
    leaders = min(count + _LEADERS, vocab)
    values, best = _leading(table, leaders)
    if count and leaders < vocab and bool((values[:, count - 1] == values[:, -1]).any()):
        values, best = _leading(table, vocab)
    pairs = zip(best[:, :count].tolist(), values[:, :count].tolist(), strict=True)
    results: list[TokenLogprobs | None] = [None] * len(rows)
    for index, mine, (top_ids, top_values) in zip(asked, own, pairs, strict=True):
        wanted = rows[index].logprobs or 0
        results[index] = (mine, tuple(zip(top_ids[:wanted], top_values[:wanted], strict=True)))
    return results
