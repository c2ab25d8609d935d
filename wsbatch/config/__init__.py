"""Configuration: frozen dataclasses, validated once. A bad value is a ValueError naming field, value and bound.

Each field carries its help text and bounds: the validator, the command line's flags and the table in
docs/operations.md are all made from them, so a setting is described in one place.
"""

from wsbatch.config.engine import EngineConfig
from wsbatch.config.fields import Settings
from wsbatch.config.pool import FleetConfig, PoolConfig
from wsbatch.config.server import ServerConfig

__all__ = ["EngineConfig", "FleetConfig", "PoolConfig", "ServerConfig", "Settings"]
