"""Many servers behind one: `EnginePool` is an engine whose steps are run by replicas elsewhere.

    async with open_pool(["ws://10.0.0.1:8765", "ws://10.0.0.2:8765"]) as pool:
        await serve(pool, ServerConfig(port=8000))

A replica is any wsbatch server of the same model. How requests find one, and what happens when one is lost, is in
docs/replicas.md.
"""

from wsbatch.config import PoolConfig
from wsbatch.pool.engine_pool import EnginePool
from wsbatch.pool.open import open_pool
from wsbatch.pool.replica import Replica
from wsbatch.pool.upkeep import Dial

__all__ = ["Dial", "EnginePool", "PoolConfig", "Replica", "open_pool"]
