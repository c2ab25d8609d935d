"""What crosses the worker edge: the plan of one model step and its result. Ids, numbers, tuples; no tensors.

Because only plain data crosses, a process could replace the thread, and a simulated model can replace the real one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from wsbatch.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What clients are told of a model, whoever runs it.

    Attributes:
        name: as given to `--model`.
        revision: identifies the weights; two replicas may continue each other's streams only if it is equal.
        dtype: of the computation, e.g. "float32".
        device: "cpu" or "cuda"; "replicas" where other servers run it.
        max_model_len: prompt plus output, in tokens.
    """

    name: str
    revision: str
    dtype: str
    device: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ModelInfo(ServedModel):
    """What the engine needs to know about a loaded model.

    Attributes:
        vocab_size: token ids are below it.
        eos_token_ids: ids that end an output.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class PaddedRow:
    """One row of a padded batch: its whole prompt. `key` is the engine's own number for the request.

    `sampling` has its seed: the engine has drawn one where the request named none.
    """

    key: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class PaddedStart:
    """Left-pad these rows, prefill them and choose each row's first token. Replaces any batch before it.

    `max_new_tokens` is the largest number of tokens that any row may still generate: the size to reserve.
    """

    rows: tuple[PaddedRow, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class PaddedDecode:
    """One more token for every row of the current padded batch.

    `keep` are the indices (into the rows as they were after the previous step) that stay, in order: early compaction.
    None keeps all. Finished rows that are kept go on being computed: that is the waste the accounting shows.
    """

    keep: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PagedRow:
    """One row of a ragged step over the paged KV cache.

    Attributes:
        key: the engine's own number for the request.
        token_ids: the new tokens computed in this step: a prefill chunk, or the last token for a decode.
        start: position of the first of them; the row's KV before it is already in its blocks.
        block_table: the row's KV blocks in order, covering at least `start + len(token_ids)` tokens.
        sampling: None where the chunk does not end the prompt: no logits are computed for the row.
    """

    key: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One iteration of continuous batching: prefill chunks and decodes together, no padding."""

    rows: tuple[PagedRow, ...]


StepPlan: TypeAlias = PaddedStart | PaddedDecode | PagedStep


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's output.

    Attributes:
        token_ids: one id per row that samples, in plan order (every row of a padded step).
        logprobs: as long as `token_ids`, None for rows that asked for none; None where no row asked.
        model_ms: time inside the model, in milliseconds.
        failed: rows that the step ran and whose numbers are worth nothing, by key, with the reason; their id is 0. All
            other rows are as they would be without them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] | None
    model_ms: float
    failed: Mapping[int, str] = field(default_factory=dict)


class Model(Protocol):
    """What the worker thread runs. Synchronous; used from one thread only, the one that made it."""

    @property
    def info(self) -> ModelInfo:
        """Facts fixed at load."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the model must remain usable for the next plan."""
        ...
