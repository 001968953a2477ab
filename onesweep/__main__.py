"""`python -m onesweep` is the `onesweep` command."""

import signal
import sys

heard = signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C during the imports would print a traceback

from serving.cli.__main__ import main as run


def main() -> int:
    """Run the command of this process; Ctrl-C before or after it ends the process silently."""
    if sys.argv[1:2] in (["host"], ["join"]):  # these hold weights
        from stages.memory import begin_with_large_pages  # imports psutil, which other commands do not need

        begin_with_large_pages()
    signal.signal(signal.SIGINT, heard)
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
