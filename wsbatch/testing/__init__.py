"""Equipment for tests of programs that embed wsbatch. docs/recipes.md shows its use.

An engine in virtual time (`open_virtual_engine`), an engine that does what a test tells it (`ScriptedEngine`), a server
over it on a real port (`serving`), an in-memory network (`MemoryListener`), and a client that leaves everything to the
test (`BareClient`).
"""

from wsbatch.testing.clients import BareClient, Closed, Rejected
from wsbatch.testing.engines import ScriptedEngine
from wsbatch.testing.servers import Served, serving
from wsbatch.testing.streams import MemoryListener, MemoryStream, memory_stream_pair
from wsbatch.testing.worker import VirtualWorker, open_virtual_engine

__all__ = [
    "BareClient",
    "Closed",
    "MemoryListener",
    "MemoryStream",
    "Rejected",
    "ScriptedEngine",
    "Served",
    "VirtualWorker",
    "memory_stream_pair",
    "open_virtual_engine",
    "serving",
]
