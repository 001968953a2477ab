"""The client of the benchmark, a process in the router's node: calls come in as lines of JSON, answers go out."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.client import Client, Result
from stages.errors import OnesweepError

MAX_AT_ONCE = 64


def answer(client: Client, call: dict[str, Any]) -> dict[str, Any]:
    """One call, timed here from its start to the end of its account; or the sentence that says why it failed."""
    begin, first = time.perf_counter(), None
    result: Result | None = None
    try:
        for item in client.stream(call.pop("prompt"), **call):
            if isinstance(item, Result):
                result = item
            elif first is None:
                first = time.perf_counter()
        end = time.perf_counter()
    except OnesweepError as error:
        return {"error": str(error)}
    if result is None or first is None:
        return {"error": "the router ended the answer without an account"}
    return {"latency_ms": (end - begin) * 1000, "first_byte_ms": (first - begin) * 1000, "account": result.as_json()}


def main(address: str) -> None:
    """Answer lines until standard input ends. A line is a list of calls, made all at once."""
    with Client(address, insecure=True) as client, ThreadPoolExecutor(MAX_AT_ONCE) as threads:
        for line in sys.stdin:
            calls = json.loads(line)
            if len(calls) == 1:
                answers = [answer(client, calls[0])]
            else:
                answers = list(threads.map(lambda call: answer(client, call), calls))
            print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
