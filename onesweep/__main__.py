"""`python -m onesweep` is the `onesweep` command."""

import os
import signal
import sys

# Else Ctrl-C during the imports would print a traceback. The kernel ignores both for process 1, as in a container.
ending = (lambda number, _: os._exit(128 + number)) if os.getpid() == 1 else signal.SIG_DFL
signal.signal(signal.SIGTERM, ending)
heard = signal.signal(signal.SIGINT, ending)

from serving.cli.__main__ import main as run
from stages.device import all_cores


def main() -> int:
    """Run the command of this process; Ctrl-C before or after it ends the process silently."""
    if sys.argv[1:2] in (["host"], ["join"]):  # these hold weights
        from stages.memory import begin_with_large_pages  # imports psutil, which other commands do not need

        begin_with_large_pages()
    if (cores := all_cores()) < (os.cpu_count() or 1):  # libraries know of no quotas
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    signal.signal(signal.SIGINT, heard)
    code = run()
    signal.signal(signal.SIGINT, ending)
    return code


if __name__ == "__main__":
    sys.exit(main())
