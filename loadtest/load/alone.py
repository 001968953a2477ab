"""A program beside the router: says what the router is, then asks for texts one at a time, with nobody else there.

`python -m loadtest.load.alone ROUTER`, a JSON list of requests on its standard input, one JSON line for each answer on
its standard output; before them a line with the router's status. It needs no locust.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from loadtest.load.access import Access
from serving.client import Client
from stages.errors import OnesweepError

STATUS_TIMEOUT_S = 5.0
TEXT_TIMEOUT_S = 600.0


def main() -> int:
    order: dict[str, Any] = json.loads(sys.stdin.read())
    access = Access(**order["access"])
    try:
        with Client(access.router, **access.who()) as client:
            _say(_status(client))
            for request in order["requests"]:
                _say(client.generate(**request, timeout_s=TEXT_TIMEOUT_S).output.hex())
    except OnesweepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _status(client: Client) -> dict[str, Any]:
    status = client.status(STATUS_TIMEOUT_S)
    return {
        "ready": status.ready,
        "problem": "; ".join(host.reason for host in status.hosts if host.reason),
        "modes": list(status.modes),
        "hosts": len(status.hosts),
        "context_bytes": status.context_tokens,
        "request_limit": status.request_limit,
    }


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
