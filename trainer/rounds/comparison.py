"""Ways of making rounds, compared: one setting or two varied, the others equal, over several seeds."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stages.checkpoint import replace_file
from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.engine import INPROCESS, engine_named
from trainer.rounds.engine.base import Tally
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.shards import PooledCorpus

ONE_PLACE = "one place"
ENGINE = "engine"
NEVER = "never"
"""A sync interval: one merge, at the end."""
MAX_ARMS = 1000


@dataclass(frozen=True)
class Arm:
    """One way, by what it differs in; none for the training in one place."""

    varied: tuple[tuple[str, str], ...]
    config: TrainingConfig
    fleet: Fleet
    engine: str = INPROCESS
    pooled: int = 1
    """Replicas whose batches one worker reads together."""

    @property
    def name(self) -> str:
        return ONE_PLACE if self.pooled > 1 else " ".join(f"{key}={value}" for key, value in self.varied) or "rounds"


@dataclass(frozen=True)
class Result:
    """What one arm came to with one seed."""

    arm: str
    seed: int
    losses: dict[str, float]
    """Validation losses in nats; "next_byte" is that of the end."""
    rounds: int
    workers: int
    up_bytes: int
    down_bytes: int
    copies_bytes: int
    updates: dict[str, int]
    busy: float
    """Share of the time in which a worker trained, on average."""
    seconds: float
    """Virtual in process; else real."""
    tallies: Sequence[Tally] = ()
    """Of real workers."""

    @property
    def in_time(self) -> float:
        return self.updates.get("in time", 0) / max(sum(self.updates.values()), 1)


def arms(
    config: TrainingConfig, fleet: Fleet, varied: Mapping[str, Sequence[str]], one_place: bool = False
) -> list[Arm]:
    """Every combination of the values of `varied`: "engine", or a name of [rounds] or of the fleet, to values as text.

    Raises ConfigError for a name that there is not, a value that it does not take, what an engine cannot do.
    """
    found = []
    for values in itertools.product(*varied.values()):
        settings, virtual, engine = config.rounds, fleet, INPROCESS
        for name, text in zip(varied, values, strict=True):
            if name == "steps_per_round" and text == NEVER:
                settings = replace(settings, steps_per_round=max(config.steps, 1))
            elif name == ENGINE:
                engine = text
            elif name in _names(settings):
                settings = _changed(settings, name, text)
            elif name in _names(virtual):
                virtual = _changed(virtual, name, text)
            else:
                known = ", ".join((ENGINE, *_names(settings), *_names(virtual)))
                raise ConfigError(f"nothing is called {name!r}; vary one of {known}")
        arm = Arm(tuple(zip(varied, values, strict=True)), replace(config, rounds=settings), virtual, engine)
        engine_named(engine).check(arm.config, virtual)
        found.append(arm)
        if len(found) > MAX_ARMS:
            raise ConfigError(f"more than {MAX_ARMS} ways to compare; vary less")
    if one_place and config.rounds.replicas > 1:
        pooled = config.rounds.replicas
        alone = replace(
            config.rounds, replicas=1, outer="mean", overlap="none", codec="fp32", down_codec="fp32", fragments=1
        )
        sequences = config.sequences * pooled
        found.insert(0, Arm((), replace(config, rounds=alone, sequences=sequences), Fleet(), pooled=pooled))
    return found


def run_arms(arms: Sequence[Arm], seeds: Sequence[int], corpus: Corpus, out: Path) -> Iterator[Result]:
    """Train each arm for each seed, where that is not done yet in `out`, and give results as they come."""
    for arm in arms:
        for seed in seeds:
            yield _run(arm, seed, corpus, out)


def table(results: Sequence[Result]) -> list[str]:
    """Markdown rows, one an arm: means over the seeds, with the standard deviation of the losses."""
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        by_arm.setdefault(result.arm, []).append(result)
    blocks = [name for name in results[0].losses if name.endswith(" next_byte")] if results else []
    shown = ["next_byte", *blocks[:-1]]
    lines = [
        f"| arm | seeds | rounds | {' | '.join(shown)} | up MB | down MB | copies MB | in time | late | not merged "
        "| busy | hours |",
        f"|---|---|---|{'---|' * len(shown)}---|---|---|---|---|---|---|---|",
    ]
    for arm, rows in by_arm.items():
        losses = " | ".join(_spread([row.losses[name] for row in rows]) for name in shown)
        sums = [sum(row.updates.values()) for row in rows]
        late = statistics.mean(row.updates.get("late", 0) / total for row, total in zip(rows, sums, strict=True))
        in_time = statistics.mean(row.in_time for row in rows)
        lost = max(1 - in_time - late, 0.0)
        up, down, copies = (
            statistics.mean(getattr(row, name) / row.workers for row in rows) / 1e6
            for name in ("up_bytes", "down_bytes", "copies_bytes")
        )
        lines.append(
            f"| {arm} | {len(rows)} | {rows[0].rounds} | {losses} | {up:.2f} | {down:.2f} | {copies:.2f} "
            f"| {in_time:.0%} | {late:.0%} | {lost:.0%} | {statistics.mean(r.busy for r in rows):.0%} "
            f"| {statistics.mean(r.seconds for r in rows) / 3600:.2f} |"
        )
    return lines


def _run(arm: Arm, seed: int, corpus: Corpus, out: Path) -> Result:
    if arm.pooled > 1:
        corpus = PooledCorpus(corpus.name, corpus.train, corpus.valid, arm.pooled)
    frame, fleet = Frame.of(replace(arm.config, seed=seed), corpus), replace(arm.fleet, seed=seed)
    identity = {"run": frame.identity(corpus), "fleet": asdict(fleet), "engine": arm.engine, "pooled": arm.pooled}
    path = out / f"{arm.name.replace(' ', '-').replace('/', '-')}-{seed}.json"
    if (done := _read(path, identity)) is not None:
        return done
    trained = engine_named(arm.engine).train(frame, corpus, fleet)
    traffic = trained.traffic
    result = Result(
        arm=arm.name,
        seed=seed,
        losses=frame.evaluate(trained.weights, corpus),
        rounds=frame.config.rounds.rounds,
        workers=trained.workers,
        up_bytes=traffic.up_bytes,
        down_bytes=traffic.down_bytes,
        copies_bytes=traffic.copies_bytes,
        updates=dict(traffic.updates),
        busy=traffic.busy_s / (trained.workers * traffic.seconds),
        seconds=traffic.seconds,
        tallies=trained.tallies,
    )
    record = json.loads(json.dumps({"identity": identity, "result": asdict(result)}))
    out.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(record, indent=1), encoding="utf-8"))
    return result


def _read(path: Path, identity: dict[str, Any]) -> Result | None:
    """A result of the same arm, settings and text; None for any other file, which is then written anew."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["identity"] != json.loads(json.dumps(identity)):
            return None
        result = record["result"]
        return Result(**{**result, "tallies": [Tally(**tally) for tally in result["tallies"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _names(settings: object) -> list[str]:
    return [field.name for field in fields(settings) if field.name != "seed"]  # type: ignore[arg-type]


def _changed(settings: Any, name: str, text: str) -> Any:  # noqa: ANN401 - of [rounds] or the fleet
    return replace(settings, **{name: _value(getattr(settings, name), name, text)})


def _value(now: object, name: str, text: str) -> object:
    """Text as what the setting is now. A tuple's numbers are parted by colons."""
    try:
        if isinstance(now, bool):
            return {"true": True, "false": False}[text]
        if isinstance(now, int):
            return int(text)
        if isinstance(now, float):
            return float(text)
        if isinstance(now, tuple):
            return tuple(float(part) for part in text.split(":"))
    except (ValueError, KeyError):
        raise ConfigError(f"{name} does not take {text!r}") from None
    return text


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean
