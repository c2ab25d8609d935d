"""The engine: from an accepted request to its terminal event."""
