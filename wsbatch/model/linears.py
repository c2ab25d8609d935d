"""Weights laid out for the kernels: panels of 16 output features, summed dimension in 4-byte units (`vector.cpp`)."""

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

LANES = 16
_HUGE_PAGE_BYTES = 2 << 20


def huge_zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed tensor whose memory the system is asked to back with huge pages: weights are streamed every step."""
    count = 1
    for size in shape:
        count *= size
    size_bytes = count * dtype.itemsize
    # An anonymous mapping is zero, and starts at a page; the tensor keeps it alive through the buffer it is made from.
    memory = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # EINVAL: a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """[panels, units, 16, elements in a unit] of a weight [out_features, in_features]."""
    per_unit = 4 // dtype.itemsize
    return -(-out_features // LANES), in_features // per_unit, LANES, per_unit


def pack(weight: Tensor, into: Tensor) -> None:
    """Pack `weight` [N, K] into a tensor of `packed_shape`; features beyond N stay as they are (zero)."""
    panels, units, lanes, per_unit = into.shape
    whole = weight.shape[0] // lanes
    into[:whole] = weight[: whole * lanes].view(whole, lanes, units, per_unit).transpose(1, 2)
    rest = weight[whole * lanes :]  # fewer than 16 features: the last panel, where N is no multiple of 16
    if len(rest):
        into[panels - 1, :, : len(rest)] = rest.view(len(rest), units, per_unit).transpose(0, 1)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Alternate panels of 16 rows of two equal tensors [N, ...]: so that their products meet in registers."""
    panels = [tensor.reshape(-1, 1, LANES, *tensor.shape[1:]) for tensor in (gate, up)]  # [N / 16, 1, 16, ...]
    return torch.cat(panels, dim=1).flatten(0, 2)
