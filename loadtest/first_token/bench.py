"""The run: one lab, one deployment, and beside its router one that sends prompts in one hop; requests take turns."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from loadtest.first_token.floor import Booked, floor_ms, shared_floor_ms
from loadtest.first_token.settings import Arm, FirstTokenSettings
from loadtest.machine import commit, this_machine
from loadtest.table import aligned
from loadtest.wan.lab import Lab, temporary_lab
from loadtest.wan.profile import node_names
from loadtest.wan_bench.deployment import FIRST_PORT, deployed
from loadtest.wan_bench.floor import Course, Wire
from loadtest.wan_bench.station import CALLER, Caller
from serving.topology import Topology
from stages.alphabet import Alphabet
from stages.errors import OnesweepError
from stages.pieces import MAX_PIECES, hops_of
from stages.transport import parse_address
from stages.v1 import stage_pb2

WHOLE = ["-P", "-m", "loadtest.first_token.whole_router"]
WHOLE_PORT = FIRST_PORT + 50
READY_S, POLL_S, STOP_S = 120.0, 0.5, 15.0

Tell = Callable[[str], None]
Row = dict[str, Any]


def measure_first_token(settings: FirstTokenSettings, prompt: str, alphabet: Alphabet, tell: Tell) -> list[Row]:
    """A row for each arm. Raises OnesweepError."""
    course = Course(node_names(settings.hosts)[1:], settings.profile.link)
    links = [course.link(*pair) for pair in course.sweep_path()]
    samples: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in settings.arms()}
    with temporary_lab(settings.profile, settings.hosts) as lab, _callers(lab, settings) as callers:
        for turn in range(settings.requests + 1):
            tell(f"turn {turn} of {settings.requests}" if turn else "warming up")
            for arm, taken in samples.items():
                call = {"prompt": prompt, "mode": "ar", "max_tokens": 1, "temperature": 0.0, "codec": arm.codec}
                (answer,) = callers[arm.most_pieces].ask([{**call, "seed": turn}])
                if turn:
                    taken.append(answer)
    return [_row(arm, taken, links, _shares(settings.prompt_symbols, alphabet, arm)) for arm, taken in samples.items()]


@contextlib.contextmanager
def _callers(lab: Lab, settings: FirstTokenSettings) -> Iterator[dict[int, Caller]]:
    """Clients of two routers over the same hosts, by the pieces that these send."""
    with contextlib.ExitStack() as stack:
        deployment = stack.enter_context(deployed(lab, settings.checkpoint))
        other = stack.enter_context(_whole_router(lab, deployment.topology, str(deployment.directory)))
        callers = {}
        for pieces, address in ((MAX_PIECES, deployment.topology.router), (1, other)):
            callers[pieces] = Caller(lab.command("router", [sys.executable, *CALLER, address]))
            stack.callback(callers[pieces].close)
        _wait_for(callers[1])
        yield callers


@contextlib.contextmanager
def _whole_router(lab: Lab, topology: Topology, directory: str) -> Iterator[str]:
    host, _ = parse_address(topology.router)
    address = f"{host}:{WHOLE_PORT}"
    command = lab.command("router", [sys.executable, *WHOLE, f"{directory}/topology.toml", address])
    with (
        open(f"{directory}/whole.log", "wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True) as router,
    ):
        try:
            yield address
        finally:
            router.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                router.wait(STOP_S)
            router.kill()


def _wait_for(caller: Caller) -> None:
    """Return when its router serves. Raises OnesweepError."""
    deadline = time.monotonic() + READY_S
    while "error" in (answer := caller.ask([{"prompt": "a", "mode": "ar", "max_tokens": 1, "temperature": 0.0}])[0]):
        if time.monotonic() > deadline:
            raise OnesweepError(f"the second router does not serve: {answer['error']}")
        time.sleep(POLL_S)


def _shares(count: int, alphabet: Alphabet, arm: Arm) -> list[float]:
    """Of the prompt, piece by piece."""
    whole = stage_pb2.Hop(step=stage_pb2.Step(clean=alphabet.encode([0] * count)))
    return [alphabet.count(hop.step.clean) / count for hop in hops_of(whole, alphabet, arm.most_pieces)]


def _row(arm: Arm, answers: list[dict[str, Any]], links: list[Wire], shares: list[float]) -> Row:
    """Medians over the requests that ended well."""
    good = [answer for answer in answers if "error" not in answer]
    row: Row = {"codec": arm.codec, "pieces": len(shares), "requests": len(answers), "failed": len(answers) - len(good)}
    row["error"] = next((answer["error"] for answer in answers if "error" in answer), None)
    if not good:
        return row
    cores, booked = this_machine().cores, [Booked.of(answer["account"]) for answer in good]
    own = [floor_ms(each, links, shares) for each in booked]
    shared = [shared_floor_ms(each, links, cores) for each in booked]
    times = [answer["latency_ms"] for answer in good]
    return row | {
        "p50_ms": statistics.median(times),
        "floor_ms": statistics.median(own),
        "ratio": statistics.median(time_ms / floor for time_ms, floor in zip(times, own, strict=True)),
        "shared_floor_ms": statistics.median(shared),
        "host_s": statistics.median(sum(each.host_ms) for each in booked) / 1000,
        "wire_bytes": statistics.median_low(sum(each.wire_bytes) for each in booked),
        "samples": [{"latency_ms": t, **asdict(each)} for t, each in zip(times, booked, strict=True)],
    }


def first_token_table(rows: list[Row]) -> str:
    """For a terminal; below it, why requests failed."""
    header = ("codec", "pieces", "p50 ms", "floor ms", "x floor", "shared cores ms", "host-s", "bytes", "failed")
    cells = []
    for row in rows:
        figures = (
            (
                *(f"{row[key]:,.0f}" for key in ("p50_ms", "floor_ms")),
                f"{row['ratio']:.2f}",
                *(f"{row['shared_floor_ms']:,.0f}", f"{row['host_s']:.2f}", f"{row['wire_bytes']:,}"),
            )
            if "p50_ms" in row
            else ("-",) * 6
        )
        cells.append((row["codec"], str(row["pieces"]), *figures, str(row["failed"])))
    errors = [f"{row['codec']}, {row['pieces']} pieces: {row['error']}" for row in rows if row["error"]]
    return "\n".join([aligned(header, cells), *errors])


def first_token_record(settings: FirstTokenSettings, rows: list[Row], command: str) -> dict[str, Any]:
    """Figures, and what they were measured on, for a JSON file."""
    return {
        "bench": "first-token",
        "command": command,
        "commit": commit(),
        "machine": asdict(this_machine()),
        "profile": settings.profile.name,
        "prompt_symbols": settings.prompt_symbols,
        "rows": rows,
    }
