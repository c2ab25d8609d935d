"""Many settings and rates, each a cell; a setting for an SLO."""
