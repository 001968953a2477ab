"""`python -m onesweep` is the `onesweep` command."""

import signal
import sys

heard = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import would end in a traceback

from serving.cli.__main__ import main as run


def main() -> int:
    """Run the command of this process; Ctrl-C before it and after it ends the process without a word."""
    if sys.argv[1:2] in (["host"], ["join"]):  # which hold weights
        from stages.memory import begin_with_large_pages  # with psutil, which other commands need not

        begin_with_large_pages()
    signal.signal(signal.SIGINT, heard)
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
