"""wsbatch: an LLM inference server for Trio that streams tokens over WebSockets."""

__version__ = "0.1.0"
