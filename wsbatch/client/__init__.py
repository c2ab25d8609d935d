"""The Trio client: many generations on one WebSocket.

    async with connect("ws://127.0.0.1:8765") as client:
        async with client.generate("Once upon a time", max_tokens=64) as stream:
            async for event in stream:
                ...

`generate(url, prompt)` does the same from a script that has no Trio.
"""

from wsbatch.client.connection import Client
from wsbatch.client.errors import ProtocolError, Refused
from wsbatch.client.open import connect, generate, open_client
from wsbatch.client.options import ConnectOptions, ConnectParams
from wsbatch.client.request import GenerateParams, Prompt
from wsbatch.client.stream import Completion, TokenStream
from wsbatch.client.watch import BatchWatch

__all__ = [
    "BatchWatch",
    "Client",
    "Completion",
    "ConnectOptions",
    "ConnectParams",
    "GenerateParams",
    "Prompt",
    "ProtocolError",
    "Refused",
    "TokenStream",
    "connect",
    "generate",
    "open_client",
]
