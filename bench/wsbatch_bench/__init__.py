"""Measures a token server: what each batching setting costs and buys, and which one meets a stated SLO."""
