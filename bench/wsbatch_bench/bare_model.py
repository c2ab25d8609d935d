"""A model to run in this process, on this thread: the real one, or the simulated one with its own clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wsbatch.config import EngineConfig
from wsbatch.model.simulated import SimulatedModel, StepCosts
from wsbatch_bench.bare_loop import Clock, Runs, SteppedModel

Breakdown = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class BareModel:
    """What is needed to run and to time it.

    Attributes:
        model: runs plans.
        clock: seconds.
        breakdown_ms: milliseconds by part of a step since the last call; empty where they are not told apart.
        module: the transformers module, for its sizes; None for the simulated model.
        description: for the report.
    """

    model: Runs
    clock: Clock
    breakdown_ms: Breakdown
    module: Any
    description: str


def load_bare(config: EngineConfig, *, costs: StepCosts) -> BareModel:
    """Load the model that the configuration names, for its scheduler. `costs` are the simulated model's.

    Raises what loading raises: OSError or ValueError, naming the model.
    """
    if config.model == "simulated":
        stepped = SteppedModel(SimulatedModel(costs, block_tokens=config.block_tokens))
        tau_ms, alpha_ms, beta_ms = (1000 * each for each in (costs.tau_s, costs.alpha_s, costs.beta_s))
        described = f"simulated, {tau_ms:g} ms a step + {alpha_ms:g} a row + {beta_ms:g} a prompt token"
        return BareModel(stepped, stepped.clock, dict, None, described)
    # torch takes seconds to import, and a simulated model needs none of it.
    import torch

    from wsbatch.model.loading import load
    from wsbatch.model.padded import PaddedModel
    from wsbatch.model.paged import PagedModel

    loaded = load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_model_len=config.max_model_len,
    )
    described = f"{config.model} {loaded.info.dtype} on {loaded.info.device}, {torch.get_num_threads()} threads"
    if config.scheduler == "dynamic":
        return BareModel(PaddedModel(loaded), time.perf_counter, dict, loaded.model, f"{described}, padded")
    blocks = config.max_batch_total_tokens // config.block_tokens
    paged = PagedModel(loaded, total_blocks=blocks, block_tokens=config.block_tokens)
    return BareModel(
        paged, time.perf_counter, paged.breakdown_ms, loaded.model, f"{described}, paged, {paged.runner} runner"
    )
