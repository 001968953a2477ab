"""The `onesweep` command, assembled from the entry points of all packages."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points, version

from onesweep.stages.errors import OnesweepError


def build_parser() -> argparse.ArgumentParser:
    """A parser with every command of the group `onesweep.commands`."""
    parser = argparse.ArgumentParser(
        prog="onesweep", description="Serve and train a model whose blocks live on hosts far apart."
    )
    parser.add_argument("--version", action="version", version=f"onesweep {version('onesweep')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in sorted(entry_points(group="onesweep.commands"), key=lambda e: e.name):
        entry.load()(subparsers)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command. An OnesweepError ends it with one sentence and its exit code."""
    try:
        options = build_parser().parse_args(arguments)
        return int(options.run(options))
    except OnesweepError as error:
        print(f"onesweep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
