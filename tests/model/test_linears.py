"""Weights in the kernels' layout."""

import errno
import mmap

import pytest
import torch

from wsbatch.model import linears
from wsbatch.model.linears import huge_zeros, interleave, pack, packed_shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [16, 35, 9])
def test_packed_weights_multiply_like_the_matrix(dtype: torch.dtype, features: int) -> None:
    weight = torch.randn(features, 24).to(dtype)
    packed = torch.zeros(packed_shape(features, 24, dtype), dtype=dtype)
    pack(weight, packed)
    x = torch.randn(24).to(dtype)
    units = x.view(1, -1, 1, packed.shape[-1])  # along the summed dimension, as the kernel reads it
    got = (packed.float() * units.float()).sum(dim=(1, 3)).flatten()  # [panels * 16]
    assert torch.allclose(got[:features], weight.float() @ x.float(), atol=1e-4)
    assert not got[features:].any()


def test_gate_and_up_panels_alternate() -> None:
    gate, up = torch.arange(32.0).view(32, 1), torch.arange(100.0, 132.0).view(32, 1)
    both = interleave(gate, up)[:, 0]
    assert both.tolist() == [*range(16), *range(100, 116), *range(16, 32), *range(116, 132)]
    assert interleave(gate[:, 0], up[:, 0]).tolist() == both.tolist()


def test_huge_zeros_start_at_a_huge_page_and_outlive_their_maker() -> None:
    tensor = huge_zeros(3, 5, dtype=torch.bfloat16)
    assert tensor.shape == (3, 5)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert not tensor.any()
    tensor += 1
    assert tensor.sum() == 15


def test_a_system_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(linears.mmap, "mmap", Small)
    assert not huge_zeros(2, 3, dtype=torch.float32).any()
