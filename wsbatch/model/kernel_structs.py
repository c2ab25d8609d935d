"""The structures that cross to the kernels: as `kernels/step.cpp` and `kernels/sampling.cpp` declare them."""

import ctypes


class Packed(ctypes.Structure):
    """A packed weight matrix."""

    _fields_ = (
        ("panels", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("n", ctypes.c_int32), ("k", ctypes.c_int32),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """The weights of one layer."""

    _fields_ = (
        *((name, Packed) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", ctypes.c_int32),
    )


class Config(ctypes.Structure):
    """A model: its shape, and what lies where."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "threads", "layers", "hidden", "q_heads", "kv_heads", "head_dim", "block_tokens",
                "total_blocks",
            )
        ),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("embedding", ctypes.c_void_p), ("head", Packed),
        *((name, ctypes.c_void_p) for name in ("final_norm", "cos", "sin", "pool")),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """A ragged step, and where its results go."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "tokens", "samples", "widest")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "token_ids", "positions", "sample_at", "query_starts", "kv_lens", "block_tables", "logits", "best",
                "broken", "stage_ms",
            )
        ),
    )  # fmt: skip


class Choice(ctypes.Structure):
    """One row's token to choose, and what it may ask for."""

    _fields_ = (
        ("logits", ctypes.c_void_p), ("vocab", ctypes.c_int32), ("top_k", ctypes.c_int32),
        ("temperature", ctypes.c_double), ("top_p", ctypes.c_double), ("noise", ctypes.c_double),
        ("id", ctypes.c_int64), ("logprobs", ctypes.c_int32), ("own", ctypes.c_float),
        ("top_ids", ctypes.c_void_p), ("top_logprobs", ctypes.c_void_p),
    )  # fmt: skip
