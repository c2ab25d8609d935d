"""`python -m wsbatch_bench`."""

from wsbatch_bench.cli import main

main()
