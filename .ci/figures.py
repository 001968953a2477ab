"""The measured figures of README and docs: made by commands, kept in docs/results.json, written into the pages.

    python .ci/figures.py measure NAME [NAME ...]   run a command; keep its values with command, commit and machine
    python .ci/figures.py keep NAME FILE [COMMIT [COMMAND]]   the same for a record that it wrote with --json
    python .ci/figures.py write                     put the values into the pages
    python .ci/figures.py list                      what is kept, and what can be measured

A page marks a figure by its name in a comment: `8.8<!--overhead.sweep_ms-->`. It keeps the decimals that it has there.
A new one is written as `{overhead.sweep_ms:.1f}`. tests/test_docs.py refuses a measured figure without such a mark.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results.json"
MARK = re.compile(r"(-?\d[\d,]*(?:\.(\d+))?)<!--([\w.:@/-]+)-->")
NEW = re.compile(r"\{(\w+\.[\w.:@/-]+?):(,?\.\df)\}")
UNITS = r"x|×|ms|s|seconds|minutes|hours|KB|MB|GB|nats|bits|tokens a second|requests a second"
FIGURE = re.compile(rf"(?<![\w.<>-])\d[\d,]*(?:\.\d+)?(?:\s?%|\s?(?:{UNITS})\b)")
CELL = re.compile(rf"{FIGURE.pattern}|(?<![\w.<>-])\d+\.\d+\b(?![.\w])")  # in a table the unit may stand above

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


def _leak(record: Record) -> dict[str, float]:
    found = {}
    for row in record["rows"]:
        name = f"{row['model']}_{row['layers']}" + (f"_{row['noise']:g}" if row["noise"] else "")
        if row["codec"] != "int8":  # whose rows are those of fp32
            found |= {f"{name}_{how}": 100 * row[how]["mean"] for how in ("probe", "nearest") if row[how]}
            found |= {f"{name}_half": 100 * row["nearest"]["half"]}
            found |= {} if row["nats"] is None else {f"{name}_nats": row["nats"]}
    return found


def _mode(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.replace("ar-speculative", "spec"))


def _idle(record: Record) -> dict[str, float]:
    shares = {row["process"]: row["processor_percent"] for row in record["rows"]}
    return {
        "host_percent": max(share for name, share in shares.items() if name != "router"),
        "router_percent": shares["router"],
    }


def _memory(record: Record) -> dict[str, float]:
    ready, after = record["ratios"]["ready"], record["ratios"]["after_requests"]
    return {
        "ready_ratio": ready["rss"],
        "after_ratio": after["rss"],
        "peak_ratio": max(ready["peak"], after["peak"]),
        "idle_mb": record["idle"]["rss"] / 2**20,
    }


def _stage(record: Record) -> dict[str, float]:
    names = {"plain": "plain", "torch": "torch", "onnxruntime": "onnx", "onnxruntime-int8": "int8"}
    single = [row for row in record["rows"] if row["batch"] == 1 and row["backend"] in names]
    single = [row for row in single if row["dtype"] != "bfloat16"]
    steps = {names[row["backend"]]: row for row in single if row["what"] == "denoise"}
    tokens = {names[row["backend"]]: row for row in single if row["what"] == "ar step"}
    return {f"{name}_denoise_ratio": row["ratio"] for name, row in steps.items()} | {
        f"{name}_ar_ms": row["ms"] for name, row in tokens.items()
    }


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


def _pictures(record: Record) -> dict[str, float]:
    keys = {"distance": "fd", "per_host_second": "rate", "seconds_60": "s"}
    rows = [{**row, "mode": f"{row['mode']}_{row['levels']}"} for row in record["rows"] if row["levels"]]
    return _rows(rows, "mode", keys)


def _quality(record: Record) -> dict[str, float]:
    rows = [{**row, "mode": _mode(row["mode"])} for row in record["rows"]]
    return _rows(rows, "mode", {"judge_bits_per_byte": "bits", "gram_entropy": "entropy", "sweeps": "trips"})


def _matched(record: Record) -> dict[str, float]:
    """Shares of the way from `local` to `ar` at the entropy of `ar`, in percent, with their intervals."""
    keys = {"gap_share": "percent", "gap_share_low": "low", "gap_share_high": "high"}
    return {
        f"{_mode(row['spec'].partition(':temperature')[0])}_{name}": 100 * row[key]
        for row in record["rows"]
        if row.get("gap_share") is not None
        for key, name in keys.items()
    }


def _chaos(record: Record) -> dict[str, float]:
    """Requests of all modes; the 95th percentile of the waits that began with the death of a host."""
    counts, waits = record["modes"]["all"], record["stalls"]["kill"]["waits_s"]
    found = {name: counts[name] for name in ("requests", "lost", "wrong")}
    return found | {"kill_p95_s": statistics.quantiles(waits, n=20)[-1] if len(waits) > 1 else waits[0]}


def _flood(record: Record) -> dict[str, float]:
    return {"goodput_percent": 100 * record["goodput"], "refusal_p95_ms": record["flood"]["refusal_p95_ms"]}


def _load(record: Record) -> dict[str, float]:
    """Of each mode, the row at its knee."""
    found: dict[str, float] = {}
    for knee in record["knees"]:
        (row,) = [row for row in record["rows"] if (row["mode"], row["users"]) == (knee["mode"], knee["users"])]
        name = _mode(knee["mode"])
        keys = {"users": "users", "throughput_rps": "rps", "p95_ms": "p95_ms"}
        found |= {f"{name}_knee_{short}": row[key] for key, short in keys.items()}
    return found


def _fuzz(record: Record) -> dict[str, float]:
    return {"inputs": record["inputs"], "findings": len(record["findings"])}


def _pretrained(record: Record) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in record["rows"]:
        name = ("copying_" if row["text"] == "copying" else "") + ("ar" if row["mode"] == "ar" else "lookup")
        found |= {
            f"{name}_tokens_per_s": row["tokens_per_s"],
            f"{name}_s": row["p50_ms"] / 1000,
            f"{name}_trips": row["sweeps"],
            f"{name}_ratio": row["ratio"],
        }
    return found


def _losses(record: Record) -> dict[str, float]:
    exact = next(row["nats"] for row in record["rows"] if (row["backend"], row["codec"]) == ("torch", "fp32"))
    found: dict[str, float] = {}
    for row in record["rows"]:
        name = row["backend"].replace("-", "_") + ("" if row["codec"] == "fp32" else f"_{row['codec']}")
        found |= {f"{name}_cost": row["nats"] - exact, f"{name}_ms": row["step_ms"], f"{name}_mb": row["weights_mb"]}
    return found


def _weights(record: Record) -> dict[str, float]:
    (row,) = record["rows"]
    return {"nats": row["nats"], "mb": row["weights_mb"]}


LOSSES = "onesweep bench losses --text $TEXT/valid.txt --symbols 1024"
MEASUREMENTS: dict[str, Measurement] = {
    "overhead": Measurement(
        "onesweep bench overhead --hosts 3",
        lambda record: _rows(
            record["figures"],
            "mode",
            {"overhead_ms_per_sweep": "ms", "latency_to_compute": "ratio", "latency_p50_ms": "p50_ms"},
        ),
    ),
    "batching": Measurement(
        "onesweep bench batching --batch 16 --max-tokens 128 --rounds 5",
        lambda record: _rows(record["figures"], "mode", {"together": "together", "bare": "bare", "ratio": "ratio"}),
    ),
    "drawn_batching": Measurement(
        "onesweep bench batching --checkpoint weights/pictures --batch 16 --levels 12 --rounds 15",
        lambda record: _rows(
            record["figures"],
            "mode",
            {"together": "together", "bare": "bare", "bare_one_core": "bare_one_core", "ratio": "ratio"},
        ),
    ),
    "drawn": Measurement(
        "onesweep bench wan --checkpoint weights/pictures --modes chain,steps,steps:int8,local"
        " --profile links-20,links-60,links-150 --levels 6,12 --requests 15",
        _drawn,
    ),
    "pictures": Measurement(
        "onesweep bench pictures --data $PICTURES --levels 3,6,12,24 --count 300 --modes chain,steps,local",
        _pictures,
    ),
    "idle": Measurement("onesweep bench idle", _idle),
    "memory": Measurement("onesweep bench memory", _memory),
    "stage": Measurement("onesweep bench stage", _stage),
    "wan": Measurement(
        "onesweep bench wan --profile links-20,links-60,links-150 --modes sweep,ar,ar-speculative --bytes 128"
        " --requests 3",
        _wan,
    ),
    "modes": Measurement(
        "onesweep bench wan --profile links-60 --modes local,sweep,resample,resample:52x64,"
        "ar-speculative,ar --bytes 256 --requests 3",
        _wan,
    ),
    "quality": Measurement("onesweep bench quality --prompts $TEXT --count 60", _quality),
    "matched": Measurement(
        "onesweep bench quality --prompts $TEXT --count 60 --temperatures 0.7,0.8,0.9 --modes ar:temperature=0.8,local,"
        "local:candidates=16,resample,resample:candidates=64,resample:candidates=64:chunk=52",
        _matched,
    ),
    "chaos": Measurement("onesweep bench chaos --minutes 5", _chaos),
    "flood": Measurement("onesweep bench flood --keys --knee 4 --max-requests 4", _flood),
    "fuzz": Measurement("onesweep bench fuzz", _fuzz),
    "load": Measurement(
        "onesweep bench loadtest --find-knee --mode sweep,ar-speculative --profile links-60 --bytes 64 --seconds 8"
        " --users 64",
        _load,
    ),
    "pretrained": Measurement(
        "onesweep bench wan --profile links-60 --checkpoint $MODEL --modes ar,ar-speculative:lookup"
        " --text novel,copying --max-tokens 64 --temperature 0 --requests 1 --no-control",
        _pretrained,
    ),
    "losses": Measurement(f"{LOSSES} --checkpoint $MODEL", _losses),
    "leak": Measurement("onesweep bench leak --text $TEXT/train.txt", _leak),
    "leak_pretrained": Measurement(
        "onesweep bench leak --checkpoint $MODEL --text $TEXT/train.txt --symbols 10240 --noise 0.3", _leak
    ),
    "weights_float32": Measurement(f"{LOSSES} --checkpoint $MODEL --backends torch --codecs fp32", _weights),
    "weights_bfloat16": Measurement(f"{LOSSES} --checkpoint $MODEL_BF16 --backends torch --codecs fp32", _weights),
    "weights_q4": Measurement(f"{LOSSES} --checkpoint $MODEL_Q4 --backends torch --codecs fp32", _weights),
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
    """docs/results.json: `measured`, and for each page the `settings` that look like figures and are none."""
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
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


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


def pages() -> list[Path]:
    """README and the pages of docs/, without the research logs and what is generated from the code."""
    return [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "reference.md")]


def written(text: str, known: dict[str, float]) -> str:
    """A page with the values of today. Raises KeyError for a name that is not kept."""
    text = NEW.sub(lambda m: f"{known[m[1]]:{m[2]}}<!--{m[1]}-->", text)

    def value(match: re.Match[str]) -> str:
        comma = "," if "," in match[1] else ""
        decimals = len(match[2] or "")
        shown = round(known[match[3]], decimals) + 0.0  # no "-0.0"
        return f"{shown:{comma}.{decimals}f}<!--{match[3]}-->"

    return MARK.sub(value, text)


def unmarked(text: str) -> Iterator[str]:
    """Figures with a unit that stand in prose or tables without a mark."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    for line in re.sub(MARK, " ", prose).splitlines():
        pattern = CELL if line.startswith("|") else FIGURE
        yield from (re.sub(r"\s+", " ", match[0]) for match in pattern.finditer(line))


def main(arguments: list[str]) -> int:
    match arguments:
        case ["measure", *names] if names:
            for name in names:
                measure(name)
        case ["keep", name, file, *origin]:
            keep(name, json.loads(Path(file).read_text()), *origin)
        case ["write"]:
            known = values()
            for page in pages():
                page.write_text(written(page.read_text(), known))
        case ["list"]:
            for name, entry in load()["measured"].items():
                print(name, entry["commit"], entry["date"], json.dumps(entry["values"]))
            print("can be measured:", ", ".join(MEASUREMENTS))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
