"""For all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# No property is about time, and a deadline would fail on a slow or a busy machine.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
# `pytest --hypothesis-profile=thorough`: for tests that take their number of examples from the profile.
settings.register_profile("thorough", max_examples=1000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-lacks",
        default="",
        help="run as on a processor without these features, in torch's names: --cpu-lacks avx512_f,avx512_bf16",
    )


@pytest.fixture(scope="session", autouse=True)
def _cpu(pytestconfig: pytest.Config) -> Iterator[None]:
    """A processor without what `--cpu-lacks` names, as far as wsbatch asks torch for it."""
    lacking = [name for name in pytestconfig.getoption("--cpu-lacks").split(",") if name]
    if not lacking:
        yield
        return
    import torch

    capabilities = torch.cpu.get_capabilities()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {**capabilities, **dict.fromkeys(lacking, False)})
        for name in lacking:
            patch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
        yield
