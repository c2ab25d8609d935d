"""HOW: synchronous torch code run by the worker thread. Never imports trio."""
