"""A router that sends every prompt in one hop: what pieces are held against. `python -m ... TOPOLOGY LISTEN`"""

from __future__ import annotations

import sys
from pathlib import Path

from serving.ring import RingSettings
from serving.router import RouterSettings, serve
from serving.topology import read_topology
from stages.log import start_log
from stages.security import Security


def main(topology: str, listen: str) -> None:
    start_log("text", "router")
    found = read_topology(Path(topology))
    whole = RingSettings(pieces=1)
    serve(RouterSettings(found, listen, found.checkpoint, ring=whole, threads=1, security=Security(insecure=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
