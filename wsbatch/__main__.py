"""`python -m wsbatch` is the command `wsbatch`."""

import sys

from wsbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
