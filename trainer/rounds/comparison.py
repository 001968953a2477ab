"""Ways of making rounds, compared: one setting or two varied, the others equal, over several seeds, in tables."""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onesweep.stages.checkpoint.checkpoint import replace_file
from onesweep.stages.errors import ConfigError
from onesweep.trainer.blocks.config import TrainingConfig
from onesweep.trainer.blocks.data import Corpus
from onesweep.trainer.options import markdown
from onesweep.trainer.rounds.processes import GrpcEngine
from onesweep.trainer.rounds.settings import SimulatedWorkers
from onesweep.trainer.rounds.simulation import InProcessEngine, RoundsEngine, WorkerTally
from onesweep.trainer.rounds.spec import RunSpec, replica_seed

INPROCESS = "inprocess"
ENGINES: dict[str, type[RoundsEngine]] = {INPROCESS: InProcessEngine, "grpc": GrpcEngine}
ONE_PLACE = "one place"
ENGINE = "engine"
NEVER = "never"  # A sync interval: one merge, at the end
TOP = ("sequences", "learning_rate", "matrix_learning_rate", "warmup_steps", "weight_decay")
SECTIONS = ("architecture", "noise", "lookahead")
NOT_DECISIVE = ("log_every", "evaluate_every", "save_every_s")  # settings that change no result
MAX_ARMS = 1000


def engine_named(name: str) -> RoundsEngine:
    """Raises ConfigError for a name that there is not."""
    if name not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    return ENGINES[name]()


@dataclass(frozen=True)
class PooledCorpus(Corpus):
    """The text of one place that stands for all replicas: their batches, one after the other, in each step."""

    replicas: int = 1

    def batch(self, seed: int, step: int, sequences: int, length: int) -> Tensor:
        """sequences: of all replicas together."""
        each = sequences // self.replicas
        batches = [Corpus.batch(self, replica_seed(seed, i), step, each, length) for i in range(self.replicas)]
        return torch.cat(batches)


@dataclass(frozen=True)
class RoundsArm:
    """One way, by the settings in which it differs; none for the training in one place."""

    varied: tuple[tuple[str, str], ...]
    config: TrainingConfig
    fleet: SimulatedWorkers
    engine: str = INPROCESS
    pooled: int = 1  # replicas whose batches one worker reads together

    @property
    def name(self) -> str:
        return ONE_PLACE if self.pooled > 1 else " ".join(f"{key}={value}" for key, value in self.varied) or "rounds"


@dataclass(frozen=True)
class ArmResult:
    """Result of one arm with one seed."""

    arm: str
    seed: int
    losses: dict[str, float]  # validation losses in nats; "next_byte" is that of the end
    rounds: int
    workers: int
    up_bytes: int
    down_bytes: int
    copies_bytes: int
    updates: dict[str, int]
    busy: float  # share of the time in which a worker trained, on average
    seconds: float  # virtual in process; else real
    tallies: Sequence[WorkerTally] = ()  # one for each real worker
    features_bytes: int = 0

    @property
    def work(self) -> float:
        """Updates that were merged, as a share of one of each worker in each round."""
        merged = self.updates.get("in time", 0) + self.updates.get("late", 0) - self.updates.get("left out", 0)
        return merged / (self.workers * self.rounds)


def arms(
    config: TrainingConfig, fleet: SimulatedWorkers, varied: Mapping[str, Sequence[str]], one_place: bool = False
) -> list[RoundsArm]:
    """Every combination of the values of `varied`: names, as `_with` has them, to values as text.

    Raises ConfigError for a name that there is not, a value that it does not take, settings that an engine lacks.
    """
    found = []
    for values in itertools.product(*varied.values()):
        arm = RoundsArm(tuple(zip(varied, values, strict=True)), config, fleet)
        for name, text in arm.varied:
            arm = _with(arm, name, text)
        engine_named(arm.engine).check(arm.config, arm.fleet)
        found.append(arm)
        if len(found) > MAX_ARMS:
            raise ConfigError(f"more than {MAX_ARMS} ways to compare; vary less")
    if one_place and config.rounds.replicas > 1:
        pooled = config.rounds.replicas
        alone = replace(
            config.rounds, replicas=1, outer="mean", overlap="none", codec="fp32", down_codec="fp32", fragments=1
        )
        pooled_config = replace(config, rounds=alone, sequences=config.sequences * pooled)
        found.insert(0, RoundsArm((), pooled_config, SimulatedWorkers(), pooled=pooled))
    return found


def _with(arm: RoundsArm, name: str, text: str) -> RoundsArm:
    """The arm with one thing changed: a name of [rounds], the fleet or TOP, SECTION.NAME, or the engine."""
    config, settings, fleet = arm.config, arm.config.rounds, arm.fleet
    section, dot, key = name.partition(".")
    if name == ENGINE:
        return replace(arm, engine=text)
    if name == "steps_per_round" and text == NEVER:
        return replace(arm, config=replace(config, rounds=replace(settings, steps_per_round=max(config.steps, 1))))
    if name in _names(settings):
        return replace(arm, config=replace(config, rounds=_changed(settings, name, text)))
    if name in _names(fleet):
        return replace(arm, fleet=_changed(fleet, name, text))
    if name in TOP:
        return replace(arm, config=_changed(config, name, text))
    if dot and section in SECTIONS and key in _names(part := getattr(config, section)):
        return replace(arm, config=replace(config, **{section: _changed(part, key, text)}))
    raise ConfigError(
        f"nothing is called {name!r}; vary one of {', '.join((ENGINE, *_names(settings), *_names(fleet), *TOP))}, "
        f"or SECTION.NAME of {', '.join(SECTIONS)}"
    )


def run_arms(arms: Sequence[RoundsArm], seeds: Sequence[int], corpus: Corpus, out: Path) -> Iterator[ArmResult]:
    """Train each arm for each seed, where that is not done yet in `out`, and give results as they come."""
    for arm in arms:
        for seed in seeds:
            yield _run(arm, seed, corpus, out)


def _run(arm: RoundsArm, seed: int, corpus: Corpus, out: Path) -> ArmResult:
    spec, read, identity = _identity(arm, seed, corpus)
    path = out / f"{arm.name.replace(' ', '-').replace('/', '-')}-{seed}.json"
    if (done := _read(path, identity)) is not None:
        return done
    trained = engine_named(arm.engine).train(spec, read, replace(arm.fleet, seed=seed))
    traffic = trained.traffic
    result = ArmResult(
        arm=arm.name,
        seed=seed,
        losses=spec.evaluate(trained.weights, read),
        rounds=spec.rounds,
        workers=trained.workers,
        **{f"{what}_bytes": getattr(traffic, f"{what}_bytes") for what in ("up", "down", "copies", "features")},
        updates=dict(traffic.updates),
        busy=traffic.busy_s / (trained.workers * traffic.seconds),
        seconds=traffic.seconds,
        tallies=trained.tallies,
    )
    record = json.loads(json.dumps({"identity": identity, "result": asdict(result)}))
    out.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(record, indent=1), encoding="utf-8"))
    return result


def _identity(arm: RoundsArm, seed: int, corpus: Corpus) -> tuple[RunSpec, Corpus, dict[str, Any]]:
    """The spec, the text as it is read, and all that decides the result."""
    if arm.pooled > 1:
        corpus = PooledCorpus(corpus.name, corpus.train, corpus.valid, corpus.tokenizer, arm.pooled)
    spec = RunSpec.of(replace(arm.config, seed=seed), corpus)
    config = {key: value for key, value in asdict(spec.config).items() if key not in NOT_DECISIVE}
    identity: dict[str, Any] = {"config": config, "data": corpus.digest()}
    identity |= {"fleet": asdict(replace(arm.fleet, seed=seed)), "pooled": arm.pooled, "engine": arm.engine}
    return spec, corpus, json.loads(json.dumps(identity))


def _read(path: Path, identity: dict[str, Any]) -> ArmResult | None:
    """A result of the same arm, settings and text; None for any other file, which is then written anew."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before = json.loads(json.dumps({"config": asdict(TrainingConfig()), "fleet": asdict(SimulatedWorkers())}))
        if _filled(record["identity"], before) != identity:
            return None
        result = record["result"]
        return ArmResult(**{**result, "tallies": [WorkerTally(**tally) for tally in result["tallies"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _filled(record: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A record with the defaults of settings that came later, so that old results need not be measured again."""
    filled = {key: value for key, value in defaults.items() if key not in NOT_DECISIVE} | record
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(filled.get(key), dict):
            filled[key] = _filled(filled[key], default)
    return filled


def _names(settings: object) -> list[str]:
    return [field.name for field in fields(settings) if field.name != "seed"]  # type: ignore[arg-type]


def _changed(settings: Any, name: str, text: str) -> Any:  # noqa: ANN401 - of [rounds] or the fleet
    return replace(settings, **{name: _value(getattr(settings, name), name, text)})


def _value(now: object, name: str, text: str) -> object:
    """Text as a value of the setting's type. A tuple's numbers are parted by colons."""
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


Rows = Sequence[ArmResult]  # results of one arm, a seed each


def _mean(value: Callable[[ArmResult], float], form: str) -> Callable[[Rows], str]:
    return lambda rows: format(statistics.mean(map(value, rows)), form)


def _share(kind: str) -> Callable[[ArmResult], float]:
    return lambda row: row.updates.get(kind, 0) / max(sum(row.updates.values()) - row.updates.get("left out", 0), 1)


COLUMNS: Mapping[str, Callable[[Rows], str]] = {
    "rounds": lambda rows: str(rows[0].rounds),
    "up MB": _mean(lambda row: row.up_bytes / row.workers / 1e6, ".2f"),
    "down MB": _mean(lambda row: row.down_bytes / row.workers / 1e6, ".2f"),
    "copies MB": _mean(lambda row: row.copies_bytes / row.workers / 1e6, ".2f"),
    "features MB": _mean(lambda row: row.features_bytes / row.workers / 1e6, ".2f"),
    "in time": _mean(_share("in time"), ".0%"),
    "late": _mean(_share("late"), ".0%"),
    "not merged": _mean(
        lambda row: max(1 - _share("in time")(row) - _share("late")(row) + _share("left out")(row), 0.0), ".0%"
    ),
    "work": _mean(lambda row: row.work, ".0%"),
    "busy": _mean(lambda row: row.busy, ".0%"),
    "hours": _mean(lambda row: row.seconds / 3600, ".2f"),
}


def table(results: Rows) -> list[str]:
    """Markdown rows, one an arm, in means over the seeds: losses in nats of the next byte, of a chain also those of its
    earlier blocks, and COLUMNS.
    """
    blocks = [name for name in results[0].losses if name.endswith(" next_byte")] if results else []
    losses = ("next_byte", *blocks[:-1])
    cells = []
    for arm, rows in _by_arm(results).items():
        spreads = [_spread([row.losses.get(name, math.nan) for row in rows]) for name in losses]
        cells.append([arm, str(len(rows)), *spreads, *(column(rows) for column in COLUMNS.values())])
    return markdown(["arm", "seeds", *losses, *COLUMNS], cells)


def tally_table(results: Rows) -> list[str]:
    """Markdown rows of real workers' steps, one an arm, in means over the seeds; nothing where all were virtual."""
    by_arm = _by_arm([result for result in results if result.tallies])
    if not by_arm:
        return []
    head = ("arm", "next_byte", "seconds", "steps made, worker by worker", "of these merged", "trained")
    return ["", *markdown(head, (_tally_row(arm, rows) for arm, rows in by_arm.items()))]


def _tally_row(arm: str, rows: Rows) -> Sequence[str]:
    made = _each(rows, lambda tally, row: tally.made, "{:.0f}")
    merged = _each(rows, lambda tally, row: tally.merged, "{:.0f}")
    trained = _each(rows, lambda tally, row: min(tally.busy_s / row.seconds, 1.0), "{:.0%}")
    nats = statistics.mean(row.losses["next_byte"] for row in rows)
    seconds = statistics.mean(row.seconds for row in rows)
    return arm, f"{nats:.3f}", f"{seconds:.1f}", made, merged, trained


def _each(rows: Rows, value: Callable[[WorkerTally, ArmResult], float], shown: str) -> str:
    """Means over the seeds, worker by worker."""
    values = [[value(tally, row) for tally in row.tallies] for row in rows]
    return " / ".join(shown.format(statistics.mean(column)) for column in zip(*values, strict=True))


def _by_arm(results: Rows) -> dict[str, list[ArmResult]]:
    by_arm: dict[str, list[ArmResult]] = {}
    for result in results:
        by_arm.setdefault(result.arm, []).append(result)
    return by_arm


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean
