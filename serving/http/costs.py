"""What a text cost, for the answer's `onesweep.accounting`."""

from __future__ import annotations

from typing import Any

from serving.client import Result


def costs_of(result: Result) -> dict[str, Any]:
    """The fields of a Result, without the text."""
    record = result.as_json()
    del record["text"]
    return {**record, "host_seconds": result.host_seconds}
