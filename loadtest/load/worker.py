"""The load generator's process: `python -m loadtest.load.worker`, a LoadPlan on its standard input.

It writes a Recording to its standard output at the end.
"""

import json
import sys
from dataclasses import asdict


def main() -> None:
    plan_line = sys.stdin.buffer.readline()
    # before anything imports sockets or opens a channel, and in this order
    from gevent import monkey

    monkey.patch_all()
    from grpc.experimental import gevent as grpc_gevent

    grpc_gevent.init_gevent()
    from loadtest.load.plan import LoadPlan
    from loadtest.load.users import run_crowd

    recording = run_crowd(LoadPlan.from_json(plan_line.decode()))
    print(json.dumps(asdict(recording)), flush=True)


if __name__ == "__main__":
    main()
