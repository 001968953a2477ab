"""The command `fuzz` and its settings."""

import argparse
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from onesweep.loadtest.faults.settings import BUNDLE, SEED
from onesweep.loadtest.report.record import write_json
from onesweep.loadtest.workload.testbed import block_count
from onesweep.stages.errors import InputError, ServiceError, one_of
from onesweep.stages.settings import add_flags, check_destination, from_flags, setting
from onesweep.stages.signals import ends_cleanly, run_interruptible

NEEDED = ("fastapi", "uvicorn")
WIRE = ("stage", "router", "answers", "answered", "http")  # targets that are reached over sockets
INSIDE = ("host", "files")  # targets in this process
TARGETS = (*WIRE, *INSIDE)


@dataclass(frozen=True)
class FuzzSettings:
    """Settings of `onesweep bench fuzz`. Raises InputError."""

    inputs: int = setting(2000, "Inputs over all targets", least=1, most=10_000_000)
    seconds: float = setting(600.0, "End then at the latest, in seconds", metavar="S", above=0, most=86_400)
    seed: int = setting(0, "Seed for the inputs", **SEED)
    targets: tuple[str, ...] = setting(TARGETS, f"Targets, of {', '.join(TARGETS)}", shown="all", metavar="T,T")
    checkpoint: Path | None = setting(None, **BUNDLE)
    attacks: float | None = setting(
        None, "Instead: each attack on the HTTP/2 of each port, so many seconds", shown="none", metavar="S", above=0
    )
    json: Path | None = setting(None, "Write the figures and findings there, too")

    def __post_init__(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise InputError(f"there is no target {target!r}{one_of(target, TARGETS)}")
        if len(set(self.targets)) < len(self.targets):
            raise InputError(f"--targets {','.join(self.targets)} names one twice")


add_fuzz = partial(add_flags, cls=FuzzSettings)


def run_fuzz(options: argparse.Namespace) -> int:
    settings = from_flags(FuzzSettings, options)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(f"`onesweep bench fuzz` needs {', '.join(missing)}: pip install 'onesweep[http,loadtest]'")
    if settings.json:
        check_destination(settings.json)
    if settings.checkpoint:
        block_count(settings.checkpoint.resolve())
    if settings.attacks:
        return _run_attacks(settings)
    from onesweep.loadtest.fuzz.run import fuzz_notes, fuzz_record, fuzz_table
    from onesweep.loadtest.fuzz.run import run_fuzz as fuzz

    print("starting two hosts, two routers and a gateway ...", flush=True)
    with ends_cleanly():
        result = run_interruptible(fuzz(settings, lambda line: print(line, flush=True)))
    print(fuzz_table(result) + "\n" + "\n".join(fuzz_notes(result)))
    if settings.json:
        write_json(settings.json, fuzz_record(result))
    if result.findings:
        raise ServiceError(f"{len(result.findings)} findings, listed above")
    return 0


def _run_attacks(settings: FuzzSettings) -> int:
    from onesweep.loadtest.fuzz.run import ATTACK_TABLE, attacks_record, run_attacks

    with ends_cleanly():
        rows = run_interruptible(run_attacks(settings, lambda line: print(line, flush=True)))
    print(ATTACK_TABLE.aligned(rows))
    if settings.json:
        write_json(settings.json, attacks_record(settings, rows))
    if trouble := [words for row in rows for words in row.trouble]:
        raise ServiceError(f"{len(trouble)} findings: {'; '.join(trouble)}")
    return 0
