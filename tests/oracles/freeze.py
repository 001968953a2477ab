"""Writes the frozen files again: `python -m tests.oracles.freeze [NAME ...]`; the names are below, none means all.

Only for a change that is meant to change outputs: say in the commit which ones, and why. `texts`, `scoring` and
`training` hold what must not change at all. In `wire`, `payload`, `codecs` and `updates` must not change either; `hops`
moves by a few bytes with the layout of messages.
"""

import sys
import tempfile
from pathlib import Path

from tests.oracles import record, rig

NAMES = (*record.OF_A_RING, "commands", "training")


def main(names: list[str]) -> int:
    if unknown := set(names) - set(NAMES):
        print(f"no oracle {sorted(unknown)[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    wanted = names or NAMES
    with tempfile.TemporaryDirectory() as folder, rig.weights() as weights, rig.ring(weights, 3) as ring:
        for name, make in record.OF_A_RING.items():
            if name in wanted:
                record.freeze(name, make(ring))
        for name, found in (("commands", lambda d: record.commands(ring, d)), ("training", record.training)):
            if name in wanted:
                (directory := Path(folder) / name).mkdir()
                record.freeze(name, found(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
