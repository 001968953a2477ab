"""`python -m onesweep` is the `onesweep` command."""

from __future__ import annotations

import sys

from serving.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
