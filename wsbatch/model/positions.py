"""Position encodings that depend on the longest row of a batch, and how far they do not.

transformers chooses the angles of LongRoPE and of dynamic NTK scaling by the largest position of the whole batch, for
dynamic NTK also by those of earlier batches. Up to a length that the configuration names nothing is chosen: the same
angles for all. Only such rows are served; beyond, a row would change its neighbours' tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def shared_angles(config: Any) -> tuple[int, str] | None:
    """Up to how many tokens rows do not change each other's angles, and the encoding's name; None for no bound.

    `config` is a decoder's, of transformers. Raises ValueError where LongRoPE's original length is no number of tokens.
    """
    bounds: list[tuple[int, str]] = []
    for rope in _encodings(getattr(config, "rope_parameters", None) or {}):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            if not isinstance(original, int) or original < 2:
                raise ValueError(f"original_max_position_embeddings must be 2 at least, not {original!r}")
            bounds.append((original, kind))
        elif "dynamic" in kind:
            bounds.append((int(config.max_position_embeddings), kind))
    return min(bounds, default=None)


def check_positions(model: Any, max_model_len: int) -> None:
    """Raises ValueError where rows of `max_model_len` tokens would change each other's position encoding."""
    shared = shared_angles(model.config.get_text_config(decoder=True))
    if shared is not None and max_model_len > shared[0]:
        raise ValueError(
            f"{type(model).__name__} cannot be batched with max_model_len={max_model_len}: beyond {shared[0]} tokens "
            f"its position encoding ({shared[1]}) depends on the longest row of the batch"
        )


def _encodings(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The one encoding, or one for each type of layers."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
