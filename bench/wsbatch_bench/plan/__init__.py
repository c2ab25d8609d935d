"""How many replicas a rate needs."""
