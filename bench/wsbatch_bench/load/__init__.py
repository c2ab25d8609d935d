"""The load generator: what is sent when, where it goes, and what became of it."""
