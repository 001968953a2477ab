"""The `onesweep` command."""

import os
import sys

from serving.cli.parser import UsageError, parse
from stages.errors import OnesweepError


def main(arguments: list[str] | None = None) -> int:
    """Run one command. An OnesweepError ends it with one sentence and its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        return int(options.run(options))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OnesweepError as error:
        print(f"onesweep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # what is still in the buffer goes nowhere, or the interpreter would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
