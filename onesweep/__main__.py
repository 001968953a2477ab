"""`python -m onesweep` is the `onesweep` command."""

import signal
import sys

heard = signal.getsignal(signal.SIGINT)  # ignored, of what a script started in the background
BESIDE = signal.SIG_IGN if heard is signal.SIG_IGN else signal.SIG_DFL  # imports and the end would show a traceback
signal.signal(signal.SIGINT, BESIDE)

from serving.cli.__main__ import main as run  # noqa: E402


def main() -> int:
    """Run the command of this process; Ctrl-C before it and after it ends the process without a word."""
    signal.signal(signal.SIGINT, heard)
    try:
        return run()
    finally:
        signal.signal(signal.SIGINT, BESIDE)


if __name__ == "__main__":
    sys.exit(main())
