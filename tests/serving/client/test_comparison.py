"""Several modes on one prompt: the variants, and the table that shows them."""

import unicodedata
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.client.client import Result
from serving.client.result import booked
from serving.client.variants import all_variants, comparison
from serving.v1 import router_pb2
from stages.errors import printable
from tests.conftest import Run

SERVED = router_pb2.StatusResponse(modes=["sweep", "resample", "ar", "local"], scorer_digest="1", ar_digest="2")


def result(text: bytes, **changes: Any) -> Result:
    trips = {
        "sweeps": 1,
        "hops": 2,
        "wire_bytes": [10, 20],
        "wire_bytes_total": 30,
        "output_bytes": len(text),
        "output_tokens": 2,
    }
    times = {"latency_ms": 21.4, "first_byte_ms": 20.2, "compute_ms": 12.0}
    hosts = [router_pb2.HostShare(name="host-1", blocks=[0], compute_ms=12.0, queue_ms=1.0)]
    summary = router_pb2.Summary(hosts=hosts, **trips, **times, **changes)
    return Result(text=text.decode(errors="replace"), output=text, **booked(summary, Result))


# The variants


def test_every_mode_is_run_with_every_scorer() -> None:
    for scorer, found in ((None, ["resample:scorer", "resample:ar"]), ("ar", ["resample"])):
        assert [each.label for each in all_variants(SERVED, scorer)] == ["sweep", *found, "ar", "local"]


# The table for terminals


@given(st.text(st.characters(codec=None), max_size=50))
def test_control_characters_are_not_printed(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


def test_a_failed_mode_is_listed_with_the_others() -> None:
    rows = {"sweep": result(b"sea\x1b", mode="sweep"), "ar": "host-2 is lost", "local:copy": "no copy"}
    lines = comparison("The ", rows).splitlines()
    assert lines[0].startswith("mode")
    assert lines[0].endswith("host-seconds")
    assert lines[2].split() == ["sweep", "21", "ms", "20", "ms", "93.5", "1", "2", "30", "12", "ms", "0.012"]
    assert lines[3].split(maxsplit=1) == ["ar", "host-2 is lost"]
    assert lines[6].endswith("onesweep bench quality --modes ar,local:copy")
    assert lines[-1] == "  The |sea�"


# From the command line


def test_compare_shows_every_mode(bundles: Path, local_ring: Any, onesweep: Run) -> None:
    with local_ring(bundles / "scored", 1) as client:
        code, out, err = onesweep("compare", "The sea ", "--router", client.address, "--max-bytes", 6)
        assert code == 0, err
        for label in ("sweep", "resample:scorer", "resample:ar", "ar-speculative", "local"):
            assert f"{label}:\n  The sea |" in out, label
