"""The `onesweep` command."""

import contextlib
import errno
import os
import re
import sys

from serving.cli.parser import UsageError, parse
from stages.errors import OnesweepError

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before it is imported: what fails has a sentence of ours

CLOSED_PIPE_CODE, INTERRUPTED_CODE = 141, 130  # as shells number what SIGPIPE and SIGINT ended
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a pipe, a disk or a terminal


def main(arguments: list[str] | None = None) -> int:
    """Run one command. An OnesweepError ends it with one sentence and its exit code; so does output that cannot be
    written."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        print(end="", flush=True)  # here, and not at the interpreter's end, where what fails has no sentence
        return code
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        if not isinstance(error, BrokenPipeError):
            _say(f"onesweep: cannot write the output: {error.strerror}")
        # what is still in the buffer goes nowhere, or the interpreter would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE_CODE if isinstance(error, BrokenPipeError) else 1


def _run(arguments: list[str]) -> int:
    try:
        options = parse(arguments)
        return int(options.run(options))
    except UsageError as error:
        _say(str(error))
        return error.exit_code
    except OnesweepError as error:
        _say(f"onesweep: {error}")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        # torch's are told by their words: to import their names takes a second, and most commands do without
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        _say("onesweep: not enough memory: ask for less at once, or use a larger machine")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except SystemExit as end:  # after help
        return int(end.code or 0)


def _say(line: str) -> None:
    # where standard error cannot be written either, the exit code is left
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
