"""The front of the server: sockets, handshakes, sessions and plain HTTP around an engine."""
