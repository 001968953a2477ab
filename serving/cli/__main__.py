"""The `onesweep` command."""

import contextlib
import errno
import io
import os
import re
import sys

from serving.cli.parser import UsageError, parse
from stages.errors import InputError, OnesweepError, exit_code_of

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported: errors print our own sentences instead
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")  # the system's: gRPC's own does not know names such as oslo.local

CLOSED_PIPE_CODE, INTERRUPTED_CODE = 141, 130  # a shell's exit codes for SIGPIPE and SIGINT
UNUSABLE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)  # a path, as in another user's home
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a pipe, a disk or a terminal

# Words of errors where the system has too little; importing torch's own classes would take a second.
LACKS = re.compile("out of memory|allocate memory|map segment|new thread|Resource temporarily|Too many open files")


def main(arguments: list[str] | None = None) -> int:
    """Run one command. An OnesweepError, or a failure to write output, ends it with one sentence and an exit code."""
    # open closed ones: without standard error, Python would print errors to standard output
    sys.stdin, sys.stdout, sys.stderr = (s or open(os.devnull, "r+") for s in (sys.stdin, sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal's encoding lacks
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        print(end="", flush=True)  # here, because a failure at the interpreter's exit gets no sentence
        return code
    except OSError as error:
        if error.filename and error.errno in UNUSABLE:
            _say(f"onesweep: cannot use {error.filename}: {error.strerror}")
            return InputError.exit_code
        if isinstance(error, FileNotFoundError) and not error.filename:  # of tempfile, which tried several directories
            _say(f"onesweep: {error.strerror}: make one of them writable, or name another in TMPDIR")
            return InputError.exit_code
        if error.errno not in UNWRITABLE:
            raise
        if not isinstance(error, BrokenPipeError):
            _say(f"onesweep: cannot write the output: {error.strerror}")
        # discard the rest of the buffer, or the interpreter would complain at exit
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
        return exit_code_of(error)
    except ModuleNotFoundError as error:
        if error.name != "cryptography":
            raise
        _say("onesweep: this command needs cryptography: pip install 'onesweep[tls]'")
        return InputError.exit_code
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        lack = LACKS.search("out of memory" if isinstance(error, MemoryError) else str(error))
        if lack is None:
            raise
        remedy = "ask for less at once, raise the limits that `ulimit -a` shows, or use a larger machine"
        _say(f"onesweep: a limit of the system is reached ({lack[0]}): {remedy}")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    except SystemExit as end:  # after help
        return int(end.code or 0)


def _say(line: str) -> None:
    # if standard error cannot be written either, only the exit code remains
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
