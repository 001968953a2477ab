"""`python -m onesweep` is the `onesweep` command."""

import sys

from serving.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
