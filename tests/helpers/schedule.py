"""The order in which trio runs tasks that are ready at the same time."""

import trio


def seed_schedule(seed: int) -> None:
    """Let that order follow from `seed`. Under pytest-trio it is trio's generator alone that decides it."""
    trio._core._run._r.seed(seed)  # type: ignore[attr-defined]
