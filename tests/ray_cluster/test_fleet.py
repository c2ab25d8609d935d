"""Replicas of the simulated model on a real Ray of three nodes, under load: nothing is lost, nothing is altered."""

from dataclasses import replace
from typing import Any

import pytest

from wsbatch.config import EngineConfig

from .harness import Load, add_node, all_ready, fleet_of, kill, node_of, ready, resumed, until

pytest.importorskip("ray", reason="needs the extra `ray`")
# Ray leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ENGINE = EngineConfig(
    model="simulated:tau_ms=20,alpha_ms=0,beta_ms=0", scheduler="continuous", max_batch_size=16, prefix_cache=False
)


async def test_a_thousand_streams_outlive_replicas_and_a_node(cluster: Any) -> None:
    # Fewer slots than clients, so that some stand in a queue; a grace that some streams outlast.
    async with fleet_of(3, ENGINE, cluster, drain_s=0.4) as fleet, Load(fleet.pool, kinds=40, max_tokens=40) as load:
        assert len({await node_of(fleet, name) for name in fleet.actors}) == 3
        async with load.running(60, at_least=1000):
            await load.more_tokens(1000)
            before = resumed(fleet.pool)
            await kill(fleet, "replica-1")
            await all_ready(fleet, 2)
            await all_ready(fleet, 3)  # Ray has started it again
            assert resumed(fleet.pool) > before

            before = resumed(fleet.pool)
            cluster.remove_node(next(iter(cluster.worker_nodes)))
            await all_ready(fleet, 2)
            await load.more_tokens(1000)
            add_node(cluster)
            await all_ready(fleet, 3)  # on the new node
            assert resumed(fleet.pool) > before

            before = resumed(fleet.pool)
            await fleet.replace_all()
            assert sorted(fleet.actors) == ["replica-4", "replica-5", "replica-6"]
            assert ready(fleet) == 3
            assert resumed(fleet.pool) > before
        assert load.wrong == []
        assert load.served == load.begun >= 1000


async def test_the_number_of_replicas_follows_the_load(cluster: Any) -> None:
    settings = {"min_replicas": 1, "max_replicas": 2, "scale_up_queue_ms": 100, "scale_up_after_s": 1}
    engine = replace(ENGINE, max_batch_size=4)
    async with (
        fleet_of(1, engine, cluster, scale_down_after_s=1, **settings) as fleet,
        Load(fleet.pool, kinds=4, max_tokens=20) as load,
    ):
        async with load.running(24):
            await all_ready(fleet, 2)
            await load.more_tokens(500)
        await until(lambda: len(fleet.actors) == 1)
        async with load.running(2, at_least=4):
            pass
        assert list(fleet.pool.replicas) == list(fleet.actors)
        assert load.wrong == []
