"""One Ray cluster of three nodes on this machine for the tests here: real, and on 127.0.0.1 alone."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from .harness import add_node


@pytest.fixture(scope="package", autouse=True)
def quiet_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # By default Ray takes 127.0.0.1 for a name of the machine's outer address, where these nodes do not listen.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        yield


@pytest.fixture(scope="package")
def cluster(quiet_ray: None) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster`. Each node has room for one replica that asks for a whole CPU."""
    from ray.cluster_utils import Cluster

    cluster, on_sigterm = Cluster(), signal.getsignal(signal.SIGTERM)
    try:
        for _ in range(3):
            add_node(cluster)
        signal.signal(signal.SIGTERM, on_sigterm)  # which Ray has taken over
        yield cluster
    finally:
        cluster.shutdown()
