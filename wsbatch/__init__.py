"""wsbatch: an LLM inference server for Trio that streams tokens over WebSockets.

    async with wsbatch.open_engine(wsbatch.EngineConfig(model="demo")) as engine:
        async with engine.generate(wsbatch.GenerateRequest(prompt="Once upon a time")) as stream:
            async for event in stream:
                ...

`serve` puts an engine on a port, `connect` reaches one. Importing this loads plain data alone; what needs more (trio,
the server's packages) is loaded when it is first named, and torch not before a model is.
"""

import importlib
from typing import TYPE_CHECKING, Any

from wsbatch import errors
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.messages import Accepted, ChatMessage, Failed, Finished, GenerateRequest, SamplingParams, Tokens

if TYPE_CHECKING:
    from wsbatch.client import connect
    from wsbatch.engine.open import open_engine
    from wsbatch.server.serve import serve

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "ChatMessage",
    "EngineConfig",
    "Failed",
    "Finished",
    "GenerateRequest",
    "SamplingParams",
    "ServerConfig",
    "Tokens",
    "__version__",
    "connect",
    "errors",
    "open_engine",
    "serve",
]

_HOMES = {"connect": "wsbatch.client", "open_engine": "wsbatch.engine.open", "serve": "wsbatch.server.serve"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value
