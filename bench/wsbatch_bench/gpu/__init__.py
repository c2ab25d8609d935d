"""What `bench/gpu_check.py` runs: checks and timings of the model's steps on one device."""
