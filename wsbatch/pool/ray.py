"""Replicas as Ray actors: each an ordinary wsbatch server on its node, behind a pool in this process.

Ray places them, restarts those that die, and nothing else: requests and tokens go over this project's protocol, never
through Ray. Needs the extra `ray`.
"""

import importlib
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import trio

from wsbatch.client import Client, connect
from wsbatch.config import EngineConfig, FleetConfig, PoolConfig, ServerConfig
from wsbatch.errors import ConnectionLost, WsbatchError
from wsbatch.nurseries import background_tasks
from wsbatch.pool import EnginePool, Replica
from wsbatch.pool.scaling import Memory, decide

_logger = logging.getLogger("wsbatch.ray")

_T = TypeVar("_T")
_CALL_S = 10.0  # for a replica to say where it is; while it loads, it says nothing
_LOOK_S = 1.0  # between two looks at the queue


class ReplicaActor:
    """The Ray actor: a server in a thread of its own. It ends its process when the server ends by itself."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self._url: Future[str] = Future()
        threading.Thread(target=self._run, args=(engine_config, server_config), daemon=True).start()

    def url(self) -> str:
        """Where it listens; waits for the model. Raises what loading it raised."""
        return self._url.result()

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def _run(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        try:
            trio.run(self._serve, engine_config, server_config)
        except BaseException as error:
            if not self._url.done():
                self._url.set_exception(error)
                return
            logging.getLogger("wsbatch.ray").exception("the server ended")
        os._exit(70)  # Ray starts it again

    async def _serve(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        from wsbatch.engine.open import open_engine
        from wsbatch.server.serve import serve

        # The router reaches it at its node's address, whichever node that is.
        server_config = replace(server_config, host=_import_ray().util.get_node_ip_address())
        async with open_engine(engine_config) as engine, trio.open_nursery() as nursery:
            server = await nursery.start(serve, engine, server_config)
            self._url.set_result(server.url)


class Fleet:
    """The replicas of one pool, and their number. Made by `open_fleet`.

    Attributes:
        pool: what to serve.
        actors: by replica name.
    """

    def __init__(
        self, ray: Any, pool: EnginePool, config: FleetConfig, engine_config: EngineConfig, *, drain_s: float
    ) -> None:
        self.pool = pool
        self.actors: dict[str, Any] = {}
        self._ray = ray
        self._config = config
        self._engine_config = engine_config
        self._drain_s = drain_s
        self._token = secrets.token_urlsafe(32)  # nobody but this router is to use them
        self._last = 0
        self._changing = trio.Lock()  # one change of the fleet at a time

    def __repr__(self) -> str:
        return f"<Fleet of {len(self.actors)}: {self.pool!r}>"

    def start(self) -> Replica:
        """One replica more; it takes requests when it is ready."""
        self._last += 1
        name = f"replica-{self._last}"
        options = {
            "num_cpus": self._config.replica_cpus,
            "num_gpus": self._config.replica_gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": 4,
        }
        # The port is the system's choice, so that a restarted replica never waits for its old one.
        server_config = ServerConfig(
            port=0, auth_token=self._token, max_live_requests=100_000, max_connections=65_536, drain_s=self._drain_s
        )
        actor = self._ray.remote(ReplicaActor).options(**options).remote(self._engine_config, server_config)
        self.actors[name] = actor
        return self.pool.add(name, lambda: self._dial(actor))

    async def stop(self, name: str) -> None:
        """Drain a replica and end it: what is on it after the grace period goes on elsewhere."""
        actor = self.actors.pop(name)
        await self.pool.remove(name, self._drain_s)
        await self._in_thread(lambda: self._ray.kill(actor))

    async def scale(self, count: int) -> None:
        """Have so many, within the bounds of autoscaling where there are any. Those that are stopped are drained
        first; new ones need not be ready when this returns. Waits for a change that goes on."""
        count = max(count, self._config.min_replicas or 1)
        if self._config.max_replicas is not None:
            count = min(count, self._config.max_replicas)
        async with self._changing:
            while len(self.actors) < count:
                self.start()
            for name in list(self.actors)[count:]:
                await self.stop(name)

    async def replace_all(self) -> None:
        """Replace every replica, one at a time, without failing a request. Raises WsbatchError where a new one does
        not get ready; then the rest is left as it is.

        Several replicas give way before their successor starts, so that nothing to spare is needed; a single one
        afterwards.
        """
        async with self._changing:
            for name in list(self.actors):
                alone = len(self.actors) == 1
                if not alone:
                    await self.stop(name)
                replica = self.start()
                with trio.move_on_after(self._config.start_timeout_s):
                    while replica.state != "ready":  # noqa: ASYNC110 - a start takes seconds
                        await trio.sleep(0.05)
                if replica.state != "ready":
                    raise WsbatchError(f"{replica.name} was not ready within {self._config.start_timeout_s:g} s")
                if alone:
                    await self.stop(name)
                _logger.info("%s is replaced by %s", name, replica.name)

    async def autoscale(self) -> None:
        """Forever: have as many replicas as the queue asks for. The effect of a change is awaited before the next: the
        clocks start anew when all replicas are there, or after `start_timeout_s`."""
        memory = Memory()
        while True:
            await trio.sleep(_LOOK_S)
            count = len(self.actors)
            wanted, memory = decide(self._config, memory, self.pool.status(), replicas=count, now_s=trio.current_time())
            if wanted != count:
                _logger.info("autoscaling from %d to %d replicas", count, wanted)
                await self.scale(wanted)
                with trio.move_on_after(self._config.start_timeout_s):
                    while any(replica.state == "away" for replica in self.pool.replicas.values()):  # noqa: ASYNC110
                        await trio.sleep(_LOOK_S)

    @asynccontextmanager
    async def _dial(self, actor: Any) -> AsyncIterator[Client]:
        """A connection to the actor, wherever Ray has (re)started it."""
        try:
            url = await self._in_thread(lambda: self._ray.get(actor.url.remote(), timeout=_CALL_S))
        except self._ray.exceptions.GetTimeoutError:
            raise ConnectionLost("it has not started yet") from None
        except self._ray.exceptions.RayError as error:
            raise ConnectionLost(f"Ray says: {str(error).strip().splitlines()[-1]}") from None
        async with connect(url, auth_token=self._token, keepalive_s=None) as client:
            yield client

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


@asynccontextmanager
async def open_fleet(
    engine_config: EngineConfig,
    config: FleetConfig,
    *,
    address: str = "auto",
    pool_config: PoolConfig | None = None,
    drain_s: float = 30.0,
) -> AsyncIterator[Fleet]:
    """Replicas on Ray and the pool over them, once the first is ready. Leaving the block ends the replicas.

    Args:
        engine_config: of each replica.
        config: how many, with what, and when more or fewer.
        address: of the Ray cluster; `auto` finds one that runs, `local` starts one on this machine, on 127.0.0.1.
        pool_config: how the router treats the replicas.
        drain_s: grace of a replica that is stopped.

    Raises ModuleNotFoundError without Ray, ConnectionLost where no cluster answers or no replica gets ready.
    """
    ray = _import_ray()
    pool_config = replace(pool_config or PoolConfig(), first_replica_s=config.start_timeout_s)
    # A thread of its own to the end: the kernel ends the processes of a local cluster with the thread that started
    # them, and trio lets a thread go that has been idle for ten seconds. Not the main one: Ray would take its signals.
    thread = ThreadPoolExecutor(1, "wsbatch-ray")
    connected = False
    pool = EnginePool(pool_config)
    fleet = Fleet(ray, pool, config, engine_config, drain_s=drain_s)
    try:
        connected = await trio.to_thread.run_sync(thread.submit(_init, ray, address).result)
        async with background_tasks() as nursery:
            await fleet.scale(config.replicas)
            nursery.start_soon(pool.run)
            with trio.move_on_after(config.start_timeout_s) as patience:
                await pool.wait_ready()
            if patience.cancelled_caught:
                raise ConnectionLost(f"no replica was ready within {config.start_timeout_s:g} s")
            if config.min_replicas is not None or config.max_replicas is not None:
                nursery.start_soon(fleet.autoscale)
            yield fleet
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(lambda: _shut_down(ray, list(fleet.actors.values()), disconnect=connected))
        thread.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "ray is not installed: replicas on Ray need `pip install 'wsbatch[ray]'`", name="ray"
        ) from None


def _init(ray: Any, address: str) -> bool:
    """Connect this process to Ray; False where it was connected before: then it stays so afterwards, too."""
    if ray.is_initialized():
        return False
    # Ray would put this process's working directory first on the path of its workers, whatever lies there: to all jobs
    # but those of Ray Client, as its JobConfig calls them, and nothing else hangs on that name.
    job = importlib.import_module("ray.job_config").JobConfig(_client_job=True)
    options: dict[str, Any] = {
        "address": address,
        "job_config": job,
        "log_to_driver": False,
        "configure_logging": False,
    }
    if address == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise ConnectionLost(f"no Ray cluster at {address!r}: {error}") from None
    return True


def _shut_down(ray: Any, actors: list[Any], *, disconnect: bool) -> None:
    for actor in actors:
        ray.kill(actor)
    if disconnect:
        ray.shutdown()
