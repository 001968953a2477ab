"""A long prompt over far links: prefill in pieces against prefill in one hop, and the floor of each.

And the second turn of a chat, whose beginning hosts have in memory, against the same prompt read anew. Beside the
router of a deployment stand two over the same hosts that have nothing kept, one of which sends every prompt in one hop
(`python -m onesweep.loadtest.latency.first_token TOPOLOGY LISTEN HOPS`); requests to the three take turns.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.lab.profile import ROUTER, Link, Profile
from onesweep.loadtest.latency.commands import FirstTokenSettings, WarmSettings
from onesweep.loadtest.latency.floor import course_of, least_delay_ms, wire_ms
from onesweep.loadtest.latency.interleave import Sample, Seat, ask_once, collect, ended_well
from onesweep.loadtest.latency.rows import row_of
from onesweep.loadtest.report.record import this_machine
from onesweep.loadtest.report.table import Table, number_column, text_column
from onesweep.loadtest.workload.arms import Arm, Length
from onesweep.loadtest.workload.caller import Access
from onesweep.loadtest.workload.testbed import Testbed, default_hosts, deployed, open_network, started_testbed
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.modes.ar import ArMode
from onesweep.serving.modes.tokenizer import Tokenizer, tokenizer_of
from onesweep.serving.router.server import serve
from onesweep.serving.router.settings import RingSettings, RouterSettings
from onesweep.serving.router.topology import read_topology
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError, OnesweepError, one_of
from onesweep.stages.model.prefill import MAX_PREFILL_CHUNKS, READ_POSITIONS, max_new_symbols
from onesweep.stages.model.vocabulary import Alphabet
from onesweep.stages.telemetry.observability import start_log
from onesweep.stages.v1 import stage_pb2
from onesweep.stages.wire.channel import parse_address
from onesweep.stages.wire.messages import StageWork, prefill_hops, work_of
from onesweep.stages.wire.tls import Security
from onesweep.trainer.blocks.data import read_utf8

PLAIN_ROUTER = [sys.executable, "-P", "-m", "onesweep.loadtest.latency.first_token"]
PORTS_APART = 50  # of the routers: beyond the ports of the hosts
READY_S, POLL_S, STOP_S = 120.0, 0.5, 15.0  # as long as a router on a busy machine may take
# Places of a text where a prompt of exactly the wanted length is looked for: a cut may change the last symbols.
TRIES = 200
NEW_SYMBOLS = 100  # of a second turn, about
CHECKED_SYMBOLS = 32  # of a text from memory that must be the one that is read anew
WITH_MEMORY = ("--prefix-mb", "256")

Tell = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class PieceArm:
    """Requests that differ in nothing but their turn."""

    codec: str
    most_pieces: int  # hops that a prompt travels in at most


def arms_of(settings: FirstTokenSettings) -> list[PieceArm]:
    return [PieceArm(codec, most) for codec in dict.fromkeys(settings.codecs) for most in (MAX_PREFILL_CHUNKS, 1)]


def prompt_for(settings: FirstTokenSettings, profile: Profile) -> tuple[str, Alphabet]:
    """The prompt, and the symbols that it is counted in. Raises OnesweepError for what cannot be measured."""
    for codec in settings.codecs:
        if codec not in ArMode.codecs:
            raise InputError(f"unknown codec {codec!r}{one_of(codec, ArMode.codecs)}")
    directory = find_bundle(settings.checkpoint).ar
    if directory is None:
        raise InputError(f"{settings.checkpoint} has no AR model: prompts of other modes travel in one sweep")
    positions = read_manifest(directory).text_architecture.positions
    most = min(positions - 1, max_new_symbols(positions))
    if not READ_POSITIONS < settings.prompt_symbols <= most:
        raise InputError(
            f"--prompt-tokens must be {READ_POSITIONS + 1} to {most}, not {settings.prompt_symbols}: "
            "shorter ones are one piece, longer ones do not fit one hop"
        )
    profile.check_hosts(default_hosts(settings.checkpoint))
    tokenizer = tokenizer_of(directory)
    prompt = _cut(_text(settings.text), settings.prompt_symbols, tokenizer)
    if problem := lab_problem():
        raise OnesweepError(problem)
    return prompt, tokenizer.alphabet


@dataclass(frozen=True)
class SecondTurns:
    """Prompts of second turns after the same first one."""

    first: str
    added: tuple[str, ...]  # by each; they differ from their first symbol on, so none finds what another one left

    @property
    def prompts(self) -> tuple[str, ...]:
        return tuple(self.first + each for each in self.added)


def second_turns(settings: FirstTokenSettings, first: str) -> SecondTurns | None:
    """Prompts that go on after `first`: one a request, and two more; None where the context has no room for them."""
    directory = find_bundle(settings.checkpoint).ar
    assert directory is not None
    positions = read_manifest(directory).text_architecture.positions
    if settings.prompt_symbols + 2 * NEW_SYMBOLS + CHECKED_SYMBOLS > positions:
        return None
    text, length = _text(settings.text), len(first) * NEW_SYMBOLS // settings.prompt_symbols
    starts = [i * length % max(len(text) - length, 1) for i in range(settings.requests + 2)]
    return SecondTurns(first, tuple(f"\n{i} {text[at : at + length]}" for i, at in enumerate(starts)))


def _text(path: Path | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    return read_utf8(path).decode()


def _cut(text: str, count: int, tokenizer: Tokenizer) -> str:
    """A part of `text` that is `count` symbols long. Raises InputError where none was found."""
    if len(symbols_of(tokenizer, text[: 64 * count].encode())) < count:
        raise InputError(f"the text is shorter than {count} {tokenizer.noun}: give a longer one with --text")
    for start in range(TRIES):
        low, high = 0, min(64 * count, len(text) - start)
        while low < high:  # the shortest part with at least so many
            middle = (low + high) // 2
            if len(symbols_of(tokenizer, text[start : start + middle].encode())) < count:
                low = middle + 1
            else:
                high = middle
        prompt = text[start : start + low]
        if len(symbols_of(tokenizer, prompt.encode())) == count:
            return prompt
    raise InputError(f"found no part of the text with exactly {count} {tokenizer.noun}: give another one with --text")


# The least time to a first token that the booked bytes and arithmetic allow, for the best schedule of the pieces.
#
# Booked are sums over all pieces, so each piece is given the share of its symbols. That is a little less than the
# truth for the last ones, which attend to more.


@dataclass(frozen=True)
class Booked:
    """Cost of one request, as the servers booked it."""

    wire_bytes: tuple[int, ...]  # payload to each host, and of the result
    host_ms: tuple[float, ...]  # arithmetic of each host

    @classmethod
    def of(cls, record: dict[str, Any]) -> Booked:
        """From `Result.as_json()`."""
        return cls(tuple(record["wire_bytes"]), tuple(host["compute_ms"] for host in record["hosts"]))


def floor_ms(booked: Booked, links: Sequence[Link], shares: Sequence[float]) -> float:
    """Time of the best schedule where every host is a machine of its own.

    Pieces go in order through link, host, link, host ..., each of which serves one at a time (a permutation flow shop);
    a piece is at the next as soon as it is done here, on a link after its delay. What comes back is one message.

    :param links: to each host, and back to the router.
    :param shares: of the whole that each piece is; (1.0,) for a prompt in one hop.
    """
    ready = [0.0] * len(shares)
    for link, size, host_ms in zip(links, booked.wire_bytes, booked.host_ms, strict=False):
        sent = _one_at_a_time(ready, [wire_ms(size, link.rate_mbps) * share for share in shares])
        ready = [end + least_delay_ms(link) for end in sent]
        ready = _one_at_a_time(ready, [host_ms * share for share in shares])
    return ready[-1] + wire_ms(booked.wire_bytes[-1], links[-1].rate_mbps) + least_delay_ms(links[-1])


def shared_floor_ms(booked: Booked, links: Sequence[Link], cores: int) -> float:
    """Lower bound for any schedule where all hosts share `cores` of one machine.

    No host computes before the first piece is there, and none after the result has left.
    """
    return least_delay_ms(links[0]) + sum(booked.host_ms) / cores + least_delay_ms(links[-1])


def _one_at_a_time(ready: Sequence[float], takes: Sequence[float]) -> list[float]:
    ends, free = list[float](), 0.0
    for begin, took in zip(ready, takes, strict=True):
        free = max(begin, free) + took
        ends.append(free)
    return ends


def measure_first_token(
    settings: FirstTokenSettings, profile: Profile, prompt: str, alphabet: Alphabet, tell: Tell
) -> tuple[list[Row], list[Row]]:
    """A row for each arm, and for the second turn of a chat. Raises OnesweepError."""
    hosts, turns = default_hosts(settings.checkpoint), second_turns(settings, prompt)
    with (
        started_testbed(profile, hosts, settings.checkpoint, host_options=WITH_MEMORY) as testbed,
        _plain_router(testbed, MAX_PREFILL_CHUNKS) as plain,
        _plain_router(testbed, 1) as whole,
    ):
        course = course_of(testbed.network)
        links = [course.link(*pair) for pair in course.sweep_path()]
        arms = {
            arm: Seat(plain if arm.most_pieces > 1 else whole, PromptRequest((prompt,), arm.codec))
            for arm in arms_of(settings)
        }
        ways = dict[str, Seat]()
        if turns is not None:
            codec = settings.codecs[0]
            tell("a first turn of a chat, and whether the text of a second one is the same from memory ...")
            _keep(testbed, PromptRequest((turns.first,), codec))
            _check_second_turn(testbed, plain, PromptRequest(turns.prompts[-1:], codec, CHECKED_SYMBOLS))
            ways = {
                "second turn, from memory": Seat(testbed, PromptRequest(turns.prompts, codec)),
                "second turn, read anew": Seat(plain, PromptRequest(turns.prompts, codec)),
                "its new tokens alone": Seat(plain, PromptRequest(turns.added, codec)),
            }
        seats = [*arms.values(), *ways.values()]
        tell(f"{settings.requests} requests of each of {len(seats)} arms, after two that warm up ...")
        # the request that warms up has the prompt of the first one, which then is in memory to its end
        taken = {seat: samples[1:] for seat, samples in collect(seats, settings.requests + 1, 1).items()}
    shares = {arm: _shares(settings.prompt_symbols, alphabet, arm) for arm in arms}
    return (
        [_row(arm, taken[seat], links, shares[arm]) for arm, seat in arms.items()],
        [_turn_row(way, taken[seat]) for way, seat in ways.items()],
    )


@dataclass(frozen=True)
class PromptRequest:
    """Requests for the first token after a prompt, or the first few; prompts take turns."""

    prompts: tuple[str, ...]
    codec: str
    tokens: int = 1
    idle_s: float = 0.0

    def call(self, number: int, seed: int) -> dict[str, Any]:
        call = {"prompt": self.prompts[number % len(self.prompts)], "mode": "ar", "max_tokens": self.tokens}
        return call | {"temperature": 0.0, "seed": seed} | ({"codec": self.codec} if self.codec else {})


def _keep(testbed: Testbed, request: PromptRequest) -> None:
    """Return when the hosts have a prompt's beginning in memory. Raises OnesweepError."""
    deadline = time.monotonic() + READY_S
    while not (sample := ask_once(testbed, request, 0, 0)).error and not sample.booked["cached_tokens"]:
        if time.monotonic() > deadline:
            raise OnesweepError("the hosts do not keep the beginning of a prompt: see the logs above")
    if sample.error:
        raise OnesweepError(f"the first turn failed: {sample.error}")


def _check_second_turn(testbed: Testbed, plain: Testbed, request: PromptRequest) -> None:
    """Raise OnesweepError unless a text is the same from memory and read anew."""
    recalled, anew = (ask_once(each, request, 0, 1) for each in (testbed, plain))
    if error := recalled.error or anew.error:
        raise OnesweepError(f"the second turn failed: {error}")
    if not recalled.booked["cached_tokens"] or anew.booked["cached_tokens"]:
        raise OnesweepError("the second turn did not find the first one in memory, or one that must not did")
    if recalled.booked["output_hex"] != anew.booked["output_hex"]:
        raise OnesweepError("the text from memory is not the one that is read anew: keep its prompt, and report it")


@contextlib.contextmanager
def _plain_router(testbed: Testbed, pieces: int) -> Iterator[Testbed]:
    """Another router over the hosts of a testbed, ready: it sends prompts in so many hops at most, and has nothing
    kept. Raises OnesweepError."""
    assert testbed.deployment is not None
    host, port = parse_address(testbed.network.address(ROUTER))
    address, directory = f"{host}:{port + PORTS_APART + pieces}", testbed.deployment.directory
    command = testbed.beside([*PLAIN_ROUTER, str(directory / "topology.toml"), address, str(pieces)])
    with (
        (directory / f"plain-{pieces}.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True) as router,
    ):
        plain = Testbed(Access(address, insecure=True), testbed.network)
        try:
            _wait_for(plain)
            yield plain
        finally:
            plain.close()
            router.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                router.wait(STOP_S)
            router.kill()


def _wait_for(plain: Testbed) -> None:
    """Return when its router serves. Raises OnesweepError."""
    deadline = time.monotonic() + READY_S
    while error := ask_once(plain, PromptRequest(("a",), ""), 0, 0).error:
        if time.monotonic() > deadline:
            raise OnesweepError(f"a router beside the first does not serve: {error}")
        time.sleep(POLL_S)


def _shares(count: int, alphabet: Alphabet, arm: PieceArm) -> list[float]:
    """Share of the prompt in each piece."""
    whole = stage_pb2.Hop(decode=stage_pb2.Decode(clean=alphabet.encode([0] * count)))
    works = (work_of(hop) for hop in prefill_hops(whole, alphabet, arm.most_pieces))
    return [alphabet.count(work.clean) / count for work in works if isinstance(work, StageWork)]


def _row(arm: PieceArm, samples: Sequence[Sample], links: Sequence[Link], shares: Sequence[float]) -> Row:
    """Medians over the requests that ended well."""
    good, error = ended_well(samples)
    row: Row = {"codec": arm.codec, "pieces": len(shares), "requests": len(samples), "failed": len(samples) - len(good)}
    row["error"] = error
    if not good:
        return row
    cores, booked = this_machine().cores, [Booked.of(sample.booked) for sample in good]
    own = [floor_ms(each, links, shares) for each in booked]
    times = [sample.latency_ms for sample in good]
    return row | {
        "p50_ms": statistics.median(times),
        "floor_ms": statistics.median(own),
        "ratio": statistics.median(time_ms / floor for time_ms, floor in zip(times, own, strict=True)),
        "shared_floor_ms": statistics.median(shared_floor_ms(each, links, cores) for each in booked),
        "host_s": statistics.median(sum(each.host_ms) for each in booked) / 1000,
        "wire_bytes": statistics.median_low(sum(each.wire_bytes) for each in booked),
        "samples": [{"latency_ms": t, **asdict(each)} for t, each in zip(times, booked, strict=True)],
    }


_COSTS = (number_column("host-s", "host_s", 2), number_column("bytes", "wire_bytes", 0), text_column("failed"))
FIRST_TOKEN: Table[Row] = Table(
    (
        text_column("codec"),
        text_column("pieces"),
        number_column("p50 ms", "p50_ms", 0),
        number_column("floor ms", "floor_ms", 0),
        number_column("x floor", "ratio", 2),
        number_column("shared cores ms", "shared_floor_ms", 0),
        *_COSTS,
    )
)


def _turn_row(way: str, samples: Sequence[Sample]) -> Row:
    """Medians over the requests of a second turn that ended well."""
    good, error = ended_well(samples)
    row: Row = {"turn": way, "requests": len(samples), "failed": len(samples) - len(good), "error": error}
    if not good:
        return row
    return row | {
        "prompt_tokens": statistics.median_low(sample.booked["prompt_tokens"] for sample in good),
        "cached_tokens": statistics.median_low(sample.booked["cached_tokens"] for sample in good),
        "p50_ms": statistics.median(sample.latency_ms for sample in good),
        "host_s": statistics.median(sample.host_ms for sample in good) / 1000,
        "wire_bytes": statistics.median_low(sample.booked["wire_bytes_total"] for sample in good),
    }


TURNS: Table[Row] = Table(
    (
        text_column("turn"),
        number_column("prompt tokens", "prompt_tokens", 0),
        number_column("from memory", "cached_tokens", 0),
        number_column("p50 ms", "p50_ms", 0),
        *_COSTS,
    )
)


def first_token_table(rows: list[Row], turns: list[Row]) -> str:
    """For a terminal; below it, why requests failed."""
    errors = [f"{row['codec']}, {row['pieces']} pieces: {row['error']}" for row in rows if row["error"]]
    errors += [f"{row['turn']}: {row['error']}" for row in turns if row["error"]]
    second = ["", TURNS.aligned(turns)] if turns else []
    return "\n".join([FIRST_TOKEN.aligned(rows), *second, *errors])


# What pieces and memory are held against: `python -m ... TOPOLOGY LISTEN HOPS`


def serve_plain(topology: str, listen: str, pieces: str) -> None:
    """Serve a router that sends prompts in so many hops at most, and has hosts keep nothing of them."""
    start_log("text", "router")
    found = read_topology(Path(topology))
    ring, security = RingSettings(pieces=int(pieces), memory=False), Security(insecure=True)
    serve(RouterSettings(found, listen, found.checkpoint, ring=ring, threads=1, security=security, anybody=True))


if __name__ == "__main__":
    serve_plain(*sys.argv[1:])


SITUATIONS = ("steady", "after start", "after idle", "after reconnect")
STEADY = 3  # requests between the others, which are the measure for them

WARM: Table[dict[str, Any]] = Table(
    (
        *map(text_column, ("mode", "situation", "requests")),
        number_column("p50 ms", "p50_ms"),
        number_column("worst ms", "p95_ms"),
        number_column("floor ms", "floor_ms"),
        number_column("x floor", "ratio", 2),
        text_column("failed", "failures"),
    )
)


def measure_warm(settings: WarmSettings, profile: Profile) -> list[dict[str, Any]]:
    """A row for each mode and situation."""
    arms = [Arm(choice, Length(settings.max_bytes)) for choice in settings.choices]
    samples: dict[tuple[Arm, str], list[Sample]] = defaultdict(list)
    options = () if settings.keep_warm else ("--keep-warm-ms", "0")
    with open_network(profile, default_hosts(settings.checkpoint)) as network:
        for turn in range(settings.rounds):
            for arm in arms:
                # a deployment for each mode: a second one would find links that the first has warmed
                with deployed(network, settings.checkpoint, host_options=options, router_options=options) as testbed:
                    for situation, sample in _story(testbed, arm, turn, settings.idle_s):
                        samples[arm, situation].append(sample)
    return [
        {"situation": situation, **row_of(profile.name, arm, samples[arm, situation])}
        for arm in arms
        for situation in SITUATIONS
    ]


def _story(testbed: Testbed, arm: Arm, seed: int, idle_s: float) -> Iterator[tuple[str, Sample]]:
    assert testbed.deployment is not None
    yield "after start", ask_once(testbed, arm, 0, seed)
    for _ in range(STEADY):
        yield "steady", ask_once(testbed, arm, 0, seed)
    time.sleep(idle_s)
    yield "after idle", ask_once(testbed, arm, 0, seed)
    testbed.deployment.kill(testbed.network.nodes[-1])
    happened = testbed.mend()
    sample = ask_once(testbed, arm, 0, seed)
    yield "after reconnect", replace(sample, error=f"{happened}: {sample.error}") if sample.error else sample
