"""The stages of `gpu_check.py`."""
