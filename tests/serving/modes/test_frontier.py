"""The frontier file: what it holds, what is wrong with a bad one, and how sweeps follow from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.modes.frontier import Frontier, Option, read_frontier
from stages.errors import InputError

COSTS = {"output_tokens": 256, "host_ms": 90.0, "router_ms": 30.0, "wire_bytes": 9000.0}


def option(mode: str, bits: float = 2.0, sweeps: float = 8.0, high: float = 8.0, **settings: Any) -> Option:
    return Option(mode, tuple(settings.items()), bits, sweeps=sweeps, sweeps_high=high, **COSTS)


def record(**changes: Any) -> dict[str, Any]:
    frontier = Frontier(
        (option("local", 2.5, 0, 0), option("resample", scorer="ar", chunk=32, temperature=0.8)),
        {"ar": "a" * 64, "local": "b" * 64},
        "judge",
        1.5,
    )
    return {**frontier.to_record(), **changes}


def changed(**changes: Any) -> dict[str, Any]:
    return record(options=[{**record()["options"][0], **changes}])


def test_a_record_and_back(tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(record()))
    frontier = read_frontier(path)
    assert json.loads(json.dumps(frontier.to_record())) == json.loads(path.read_text())
    assert frontier.options[1].label == "resample:ar:chunk=32:temperature=0.8"
    assert frontier.human_bits == 1.5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object, not list"),
        ({"frontier": 2}, "'frontier' must be 1"),
        (record(options=[]), "'options' must be a list"),
        (record(options=None), "'options' must be a list"),
        (record(options=[3]), "an option must be a JSON object, not int"),
        (record(weights=None), "weights must be a JSON object"),
        (record(judge=3), "it: judge must be a text, not 3"),
        (changed(mode="magic"), "there is no mode 'magic'"),
        (changed(mode=["local"]), "there is no mode"),
        (changed(bits="good"), "bits must be a finite number of at"),
        (changed(sweeps=-1), "of at least 0, not -1"),
        (changed(settings={"magic": 1}), "local: magic is not a setting; there are scorer, chunk,"),
        (changed(settings={"chunk": "x"}), "chunk must be a whole number, not 'x'"),
        (changed(settings={"steps": 2}), "mode local does not take steps: leave it out, or use mode sweep, chunked"),
        (changed(mode="ar", settings={"codec": "int4"}), "mode ar has no codec 'int4' (did you mean int8?)"),
        *((changed(**{key: None}), f"local: {key} is missing") for key in ("bits", "sweeps", "sweeps_high", *COSTS)),
        (changed(mode="resample", settings={"scorer": "a"}), "mode resample has no scorer 'a' (did you mean ar?)"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match="onesweep bench quality") as error:
        read_frontier(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the frontier"):
        read_frontier(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("made", "count", "sweeps"),
    [
        (option("local"), 100, (0, 0)),
        (option("sweep"), 100, (1, 1)),
        (option("ar"), 100, (100, 100)),
        (option("chunked", chunk=32), 100, (4, 4)),
        (option("resample", chunk=48), 96, (2, 2)),
        (option("resample", candidates=16), 256, (1, 1)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 256, (32.0, 40.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 512, (64.0, 80.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 64, (8.0, 12.0)),
        (option("ar-speculative", sweeps=32.0, high=40.0), 1, (1, 1)),
        (option("ar-speculative", sweeps=200.0, high=300.0), 256, (200.0, 256)),
    ],
)
def test_sweeps(made: Option, count: int, sweeps: tuple[float, float]) -> None:
    assert made.sweeps_for(count) == pytest.approx(sweeps)
