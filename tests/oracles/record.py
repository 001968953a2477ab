"""Makes the outputs that are frozen, and compares them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.oracles import rig
from tests.oracles.rig import Ring

FOLDER = Path(__file__).parent
PROMPT = "The old man looked at the sea and "
PROMPTS = {1: PROMPT, 2: "I went to see this film because ", 3: (PROMPT * 5)[:150]}
"""A seed's: the last one is longer than what hosts read in one pass."""
OTHERS = {"one host": (1, 1), "two and one block": (2, 1), "two replicas of each": (3, 2)}
"""Hosts, and replicas of each: usual are three, and one."""
ENTRANTS: dict[str, dict[str, Any]] = {
    "sweep": {"mode": "sweep"},
    "sweep ode": {"mode": "sweep", "sampler": "ode", "steps": 3},
    "chunked": {"mode": "chunked", "chunk": 10},
    "resample:scorer": {"mode": "resample", "scorer": "scorer", "chunk": 8, "candidates": 4},
    "resample:ar": {"mode": "resample", "scorer": "ar", "chunk": 8, "candidates": 4},
    "ar": {"mode": "ar"},
    "ar-speculative": {"mode": "ar-speculative", "draft": 4, "branches": 1},
    "local": {"mode": "local"},
    "auto": {"mode": "auto"},
}
"""The length of drafts, which time would decide, is fixed. `auto` has no budget, so it chooses the best text."""
WITHOUT_CODEC = {"local", "auto"}
ALSO_INT4 = {"sweep", "chunked"}
BYTES = 20
TIMES = ("_ms", "_mbps")
OF_A_RUN = {
    *("request", "reason", "lost", "address", "version", "problem", "warning"),
    *("sessions", "session_bytes", "queued", "audits", "requests"),
    *("healthy", "system", "congestion_control", "slow_start_after_idle", "findings"),
}
"""With the endings before: values of JSON that are of the moment or the machine."""
BY_DEVICE = {
    *("sha256", "text", "output_hex", "symbols"),
    *("digest", "ar_digest", "scorer_digest", "file", "release", "releases"),
}
"""Parts that may differ on a processor that rounds otherwise; numbers beside it are compared loosely there."""


LOOSE = 0.02
"""A few steps of training, by a processor with other instructions, came 0.005 apart."""


# Frozen files


def frozen(name: str) -> tuple[dict[str, Any], bool]:
    """The frozen record, and whether this machine computes as the one did that froze it."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record["frozen"], record["machine"] == rig.machine()


def freeze(name: str, found: dict[str, Any]) -> None:
    text = json.dumps({"machine": rig.machine(), "frozen": found}, indent=1, ensure_ascii=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def differences(old: Any, new: Any, exact: bool, at: str = "") -> list[str]:
    """The places where two records differ. exact: bit for bit; else numbers may be a little apart."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [
            each
            for key in old
            if exact or key not in BY_DEVICE
            for each in differences(old[key], new[key], exact, f"{at}/{key}")
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            each for i, pair in enumerate(zip(old, new, strict=True)) for each in differences(*pair, exact, f"{at}/{i}")
        ]
    if not exact and isinstance(old, float) and isinstance(new, float):
        return [] if math.isclose(old, new, rel_tol=LOOSE, abs_tol=LOOSE / 20) else [f"{at}: {old} became {new}"]
    return [] if old == new and type(old) is type(new) else [f"{at}: {old!r:.200} became {new!r:.200}"]


def plain(record: Any) -> Any:
    """As JSON brings it back."""
    return json.loads(json.dumps(record))


# The frozen outputs


def texts(ring: Ring, turn: int | None = None) -> dict[str, str]:
    """The text of every mode, seed and codec, in hexadecimal; in a `turn` of three, one seed of each."""
    found = {}
    for name, settings in ENTRANTS.items():
        codecs = (
            (None,) if name in WITHOUT_CODEC else ("int8", "fp32", "int4") if name in ALSO_INT4 else ("int8", "fp32")
        )
        for codec in codecs:
            for seed, prompt in PROMPTS.items():
                if turn is not None and (len(name) + turn) % 3 != seed - 1:
                    continue
                result = ring.client.generate(prompt, seed=seed, max_bytes=BYTES, codec=codec, **settings)
                found[f"{name}, {codec}, seed {seed}"] = result.output.hex()
    return found


def scoring(ring: Ring) -> dict[str, Any]:
    """Scores of candidates and draft tokens, and the choices of the modes."""
    found: dict[str, Any] = {}
    drafted = b"said that"
    for scorer in ("scorer", "ar"):
        for codec in ("int8", "fp32"):
            where = {"scorer": scorer, "codec": codec}
            candidates = [b"said tha", b"was dead", b"the end.", b"\x00\xff zqxjk"]
            _, scores = rig.trip(ring, "score", clean=PROMPT.encode(), candidates=candidates, **where)
            drawn = rig.trip(ring, "draft", clean=PROMPT.encode() + drafted, draft=len(drafted), **where)[1]
            found[f"{scorer}, {codec}"] = {"scores": scores, "confirmed": drawn}
    for name in ("resample:scorer", "resample:ar"):
        for seed, prompt in PROMPTS.items():
            result = ring.client.generate(prompt, seed=seed, max_bytes=BYTES, **ENTRANTS[name]).as_json()
            keys = ("scorer", "sweeps", "drafted", "accepted", "reached", "chunk", "candidates", "effective_samples")
            found[f"{name}, seed {seed}"] = {key: result[key] for key in (*keys, "divergence_bits")}
    return found


def wire(ring: Ring) -> dict[str, Any]:
    """`payload`: bytes of the states themselves, whatever the message around them; they must never change.

    `hops`: whole messages as the accounts report them; a new layout of messages may change them by a few bytes.
    """
    works: dict[str, tuple[str, dict[str, Any]]] = {}
    known = {"clean": PROMPT.encode()}
    for codec in ("fp32", "int8", "int4"):
        works[f"sweep, {codec}"] = "sweep", {**known, "start": 0, "slots": 24, "codec": codec}
    for codec in ("fp32", "int8"):
        where = {**known, "scorer": "ar", "codec": codec}
        works[f"ar step, {codec}"] = "step", where
        works[f"verify, {codec}"] = "step", {**where, "draft": 4}
        works[f"score, {codec}"] = "step", {**where, "candidates": [b"said tha", b"was dead"]}
    payload = {}
    for name, (kind, work) in works.items():
        states, _ = rig.trip(ring, kind, **work)
        payload[name] = [{"bytes": len(state), "sha256": rig.sha256(state)} for state in states]
    hops = {}
    for name, settings in ENTRANTS.items():
        for codec in () if name in WITHOUT_CODEC else ("int8", "fp32"):
            result = ring.client.generate(PROMPT, seed=1, max_bytes=BYTES, codec=codec, **settings)
            counted = {"sweeps": result.sweeps, "hops": result.hops, "of each hop": result.wire_bytes}
            hops[f"{name}, {codec}"] = {**counted, "total": result.wire_bytes_total}
    return {"payload": payload, "codecs": rig.state_payloads(), "updates": rig.update_payloads(), "hops": hops}


def training(directory: Path) -> dict[str, Any]:
    """Weights after short trainings, some of them stopped and resumed, and after rounds of virtual workers."""
    found: dict[str, Any] = {}

    def fresh() -> Path:
        where = directory / str(len(list(directory.iterdir())))
        where.mkdir()
        return where

    for what, run in (("chain", "block-1"), ("ar", "ar"), ("scorer", "scorer")):
        found[what] = rig.trained(what, fresh())
        assert rig.trained(what, fresh(), stop_at=(run, 5)) == found[what], "a stop changes nothing"
    late = {"in_time": 0.6, "lost": 0.2, "slowness": (1.0, 3.0)}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "mean": ({}, {"codec": "fp32", "down_codec": "fp32", "deadline_s": 0}),
        "nesterov": ({}, {"outer_momentum": 0.3, "codec": "int8", "down_codec": "int8", "deadline_s": 0}),
        "scorer": ({}, {"model": "scorer", "context_by": "copies", "codec": "int8", "deadline_s": 0}),
        "late": (late, {"model": "ar", "codec": "e3m0", "down_codec": "int8", "rounds": 4}),
    }
    for name, (fleet, settings) in ways.items():
        found[f"rounds, {name}"] = rig.rounds(fresh(), fleet, **settings)
    return found


def commands(ring: Ring, directory: Path) -> dict[str, Any]:
    """The `--json` of commands: keys, types, and the values that are not of the moment."""
    router, text = ("--router", ring.topology.router), directory / "text.txt"
    topology, settings = directory / "ring.toml", directory / "settings.toml"
    rig.corpus(directory)
    text.write_text((FOLDER / "prose.txt").read_text(encoding="utf-8"), encoding="utf-8")
    topology.write_text(ring.topology.to_toml(), encoding="utf-8")
    sizes = "parts = 2\nlayers = 1\nwidth = 16\nheads = 2\ncontext_length = 32\ncode_dim = 8\ncondition_dim = 8\n"
    settings.write_text(
        f"sequences = 2\nwarmup_steps = 2\nbfloat16 = false\nchunks = [1, 4, 0]\n[architecture]\n{sizes}"
        "[rounds]\nrounds = 1\n"
    )
    asked = (PROMPT, "--seed", 1, "--max-bytes", BYTES, "--json", *router)
    lined = "ar,local,sweep,resample:scorer,auto"
    alone = ("--threads", 1, "--json")
    tiny = ("--config", settings, "--data", directory / "words.txt", *alone)
    ways: dict[str, tuple[bool, tuple[object, ...]]] = {
        "generate": (True, ("generate", *asked, "--mode", "sweep")),
        "generate, auto": (True, ("generate", *asked, "--mode", "auto")),
        "compare": (True, ("compare", *asked, "--modes", lined)),
        "status": (True, ("status", "--json", *router)),
        "doctor": (True, ("doctor", "--topology", topology, "--json")),
        "inspect": (False, ("inspect", ring.weights, "--json")),
        "evaluate": (False, ("evaluate", ring.weights, "--data", text, "--windows", 2, "--steps", 1, *alone)),
        "train simulate": (
            False,
            ("train", "simulate", *tiny, "--steps", 4, "--vary", "codec=fp32,int8"),
        ),
    }
    found = {}
    for name, (of_the_moment, arguments) in ways.items():
        out = rig.command(*arguments).replace(str(directory), "TMP").replace(str(ring.weights), "WEIGHTS")
        found[name] = lasting(json.loads(out)) if of_the_moment else json.loads(out)
    return found


def lasting(record: Any) -> Any:
    """`record` with the type in place of every value that is of the moment."""
    if isinstance(record, dict):
        return {
            key: kinds(value) if key in OF_A_RUN or key.endswith(TIMES) else lasting(value)
            for key, value in record.items()
        }
    return [lasting(each) for each in record] if isinstance(record, list) else record


def kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return "list"
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


OF_A_RING: dict[str, Callable[[Ring], dict[str, Any]]] = {"texts": texts, "scoring": scoring, "wire": wire}
