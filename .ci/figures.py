"""The measured figures of README and docs: made by commands, kept in docs/results.json, written into the pages.

    python .ci/figures.py measure NAME [NAME ...]   run a command; keep its values with command, commit and machine
    python .ci/figures.py keep NAME FILE [COMMIT [COMMAND]]   the same for a record that it wrote with --json
    python .ci/figures.py slow FILE                 keep the result of `make test-slow`, from its JUnit file
    python .ci/figures.py write                     put the values into the pages
    python .ci/figures.py list                      what is kept, and what can be measured

docs/results.json says where each stands, under `places`: a page, the heading of a table (none in prose), a line of it
with `#` for every number, and what these numbers are; null is not measured. A page keeps the decimals that it has.
Of a command that went, or is called otherwise now, only the values that a page shows are kept; it says `at commit`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results.json"
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.(\d+))?")

Record = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A command that writes a record with --json, and the values that the pages quote of it."""

    command: str
    values: Callable[[Record], dict[str, float]]
    prints: bool = False  # it prints its record where others write a file


def _rows(rows: list[Record], by: str, keys: dict[str, str]) -> dict[str, float]:
    """`NAME_KEY` for each row: NAME is its value of `by`, and `keys` says what is called KEY."""
    return {
        f"{re.sub(r'[^a-z0-9]+', '_', row[by])}_{name}": row[key]
        for row in rows
        for key, name in keys.items()
        if row[key] is not None
    }


def _mode(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.replace("ar-speculative", "spec"))


def _host(record: Record) -> dict[str, float]:
    """The value of each row, by its name."""
    return {re.sub(r"[^a-z0-9]+", "_", row["name"].lower()): row["value"] for row in record["rows"]}


def _wan(record: Record) -> dict[str, float]:
    found: dict[str, float] = {}
    several = len({row["profile"] for row in record["rows"]}) > 1
    for row in record["rows"]:
        name = (f"{row['profile'].replace('-', '')}_" if several else "") + _mode(row["mode"])
        found |= {f"{name}_s": row["p50_ms"] / 1000, f"{name}_ratio": row["ratio"], f"{name}_trips": row["sweeps"]}
    return found


def _drawn(record: Record) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in record["rows"]:
        name = f"{row['profile'].replace('-', '')}_{_mode(row['mode'])}_{row['length']}"
        found |= {f"{name}_s": row["p50_ms"] / 1000, f"{name}_ratio": row["ratio"], f"{name}_trips": row["sweeps"]}
        found[f"{name}_host_ms"] = row["host_seconds"] * 1000
    return found


def _quality(record: Record) -> dict[str, float]:
    rows = [{**row, "mode": _mode(row["mode"])} for row in record["rows"]]
    return _rows(rows, "mode", {"judge_bits_per_byte": "bits", "gram_entropy": "entropy", "sweeps": "trips"})


def _chaos(record: Record) -> dict[str, float]:
    return {name: record["requests"][name] for name in ("requests", "lost", "wrong")}


def _load(record: Record) -> dict[str, float]:
    """Of each mode, the row at its knee."""
    found: dict[str, float] = {}
    for knee in record["knees"]:
        (row,) = [row for row in record["rows"] if (row["mode"], row["users"]) == (knee["mode"], knee["users"])]
        name = _mode(knee["mode"])
        keys = {"users": "users", "throughput_rps": "rps", "p95_ms": "p95_ms"}
        found |= {f"{name}_knee_{short}": row[key] for key, short in keys.items()}
    return found


def _near_model(record: Record) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in record["rows"]:
        mode = "ar_" if row["mode"].partition(":")[0] == "ar" else ""
        name = ("copying_" if row["text"] == "copying" else "") + mode
        found |= {
            f"{name}tokens_per_s": row["tokens_per_s"],
            f"{name}s": row["p50_ms"] / 1000,
            f"{name}trips": row["sweeps"],
            f"{name}ratio": row["ratio"],
        }
    return found


MEASUREMENTS: dict[str, Measurement] = {
    "host": Measurement("onesweep bench host", _host),
    "drawn_host": Measurement("onesweep bench host --checkpoint weights/pictures --rounds 15", _host),
    "drawn": Measurement(
        "onesweep bench wan --checkpoint weights/pictures --modes chain,steps,steps:int8,local"
        " --profile links-20,links-60,links-150 --levels 6,12 --requests 15",
        _drawn,
    ),
    "wan": Measurement(
        "onesweep bench wan --profile links-20,links-60,links-150 --modes sweep,ar,ar-speculative --bytes 128"
        " --requests 3",
        _wan,
    ),
    "modes": Measurement(
        "onesweep bench wan --profile links-60 --modes local,sweep,resample,resample:chunk=52:candidates=64,"
        "ar-speculative,ar --bytes 256 --requests 3",
        _wan,
    ),
    "quality": Measurement("onesweep bench quality --prompts $TEXT --count 60", _quality),
    "chaos": Measurement("onesweep bench chaos --minutes 5", _chaos),
    "load": Measurement(
        "onesweep bench loadtest --mode sweep,ar-speculative --profile links-60 --bytes 64 --seconds 8"
        " --users 1,2,4,8,16,32,64",
        _load,
    ),
    "near_model": Measurement(
        "onesweep bench wan --profile links-60 --checkpoint $MODEL --modes ar,ar-speculative --text novel,copying"
        " --max-tokens 128 --temperature 1 --requests 2",
        _near_model,
    ),
}


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{len(names)} cores of {names[0]}, {memory_gb:.0f} GB, {platform.system()}, Python {platform.python_version()}"
    )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def load() -> Record:
    """docs/results.json: the values `measured`, and their `places` in each page."""
    return json.loads(RESULTS.read_text())


def values() -> dict[str, float]:
    """Every kept value by its full name."""
    return {
        f"{name}.{key}": value for name, entry in load()["measured"].items() for key, value in entry["values"].items()
    }


def keep(name: str, record: Record, commit: str = "", command: str = "") -> None:
    """`command`: what it was called at `commit`, if it has another name today."""
    results = load()
    results["measured"][name] = {
        "command": command or MEASUREMENTS[name].command,
        "commit": commit or _git("rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "values": {key: float(f"{value:.4g}") for key, value in MEASUREMENTS[name].values(record).items()},
    }
    results["measured"] = dict(sorted(results["measured"].items()))
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def measure(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "record.json"
        made = MEASUREMENTS[name]
        command = [*shlex.split(os.path.expandvars(made.command)), "--json", *([] if made.prints else [str(file)])]
        command[0] = str(Path(sys.executable).with_name(command[0]))
        with file.open("w") as printed:
            # Exit code 1 says that an aim is missed; the record has what was measured.
            subprocess.run(command, cwd=ROOT, stdout=printed if made.prints else None)
        keep(name, json.loads(file.read_text()))


def keep_slow_tests(file: Path) -> None:
    """Keep how many slow tests passed, failed and were skipped."""
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    results = load()
    results["slow tests"] = {
        "command": "make test-slow",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "passed": total - failed - errors - skipped,
        "failed": failed + errors,
        "skipped": skipped,
        "minutes": round(sum(float(suite.get("time", 0)) for suite in suites) / 60, 1),
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def written(text: str, places: list[Record], known: dict[str, float]) -> str:
    """A page with the values of today. Raises KeyError for a place or a value that is not there."""
    pending = defaultdict[tuple[str, str], deque[list[str | None]]](deque)
    for place in places:
        pending[place["table"], place["row"]].append(place["figures"])
    lines, table, before = list[str](), "", ""
    for line in text.split("\n"):
        if line.startswith("|") and not before.startswith("|"):
            table = line
        before = line
        key = (table if line.startswith("|") else "", NUMBER.sub("#", line))
        names = iter(pending[key].popleft() if pending.get(key) else [])
        lines.append(NUMBER.sub(partial(_shown, known, names), line))
    if lost := [row for (_, row), left in pending.items() if left]:
        raise KeyError(f"no such line: {lost[0]}")
    return "\n".join(lines)


def _shown(known: dict[str, float], names: Iterator[str | None], number: re.Match[str]) -> str:
    """The value of the next name as the page shows it; the number itself where it has none."""
    if (name := next(names, None)) is None:
        return number[0]
    decimals = len(number[1] or "")
    shown = round(known[name], decimals) + 0.0  # no "-0.0"
    return f"{shown:{',' if ',' in number[0] else ''}.{decimals}f}"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["measure", *names] if names:
            for name in names:
                measure(name)
        case ["keep", name, file, *origin]:
            keep(name, json.loads(Path(file).read_text()), *origin)
        case ["slow", file]:
            keep_slow_tests(Path(file))
        case ["write"]:
            for name, places in load()["places"].items():
                page = ROOT / name
                page.write_text(written(page.read_text(), places, values()))
        case ["list"]:
            for name, entry in load()["measured"].items():
                print(name, entry["commit"], entry["date"], json.dumps(entry["values"]))
            print("measurements:", ", ".join(MEASUREMENTS))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
