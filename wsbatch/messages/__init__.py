"""What crosses an edge: the requests a client makes and the events it gets back. Frozen, plain data.

`wire` turns these into bytes and back; `server`, `engine` and `client` make and read them; nothing here does anything.
"""

from typing import TypeAlias

from wsbatch.messages.batch import (
    BatchSnapshot,
    BatchStep,
    RowPhase,
)
from wsbatch.messages.connection import (
    Cancel,
    DrainingNotice,
    GetStatus,
    Hello,
    Limits,
    Ping,
    Pong,
    Status,
    Unwatch,
    Watch,
)
from wsbatch.messages.events import (
    NO_BATCH,
    Accepted,
    BatchReport,
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
    Terminal,
    Timing,
    TokenLogprobs,
    Tokens,
    Usage,
)
from wsbatch.messages.request import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_PRIORITY,
    LEAST_URGENT,
    ChatMessage,
    GenerateRequest,
    RequestId,
    SamplingParams,
)

ClientMessage: TypeAlias = GenerateRequest | Cancel | Ping | GetStatus | Watch | Unwatch
ServerMessage: TypeAlias = (
    Hello | Accepted | Started | Tokens | Finished | Failed | DrainingNotice | Pong | Status | BatchSnapshot
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "DEFAULT_PRIORITY",
    "LEAST_URGENT",
    "NO_BATCH",
    "Accepted",
    "BatchReport",
    "BatchSnapshot",
    "BatchStep",
    "Cancel",
    "ChatMessage",
    "ClientMessage",
    "DrainingNotice",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "GetStatus",
    "Hello",
    "Limits",
    "Ping",
    "Pong",
    "RequestId",
    "RowPhase",
    "SamplingParams",
    "ServerMessage",
    "Started",
    "Status",
    "Terminal",
    "Timing",
    "TokenLogprobs",
    "Tokens",
    "Unwatch",
    "Usage",
    "Watch",
]
