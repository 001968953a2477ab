"""Resuming: after a kill, a stop, a full disk. The log has each step once and the weights are the undisturbed ones."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stages.checkpoint.manifest import read_manifest
from stages.errors import CheckpointError, ConfigError, Interrupted, OnesweepError, ResumeError
from stages.wire.secret_files import exclusive
from tests.conftest import until
from tests.trainer.blocks.test_train import digests
from tests.trainer.processes import ended, launched
from tests.trainer.small import tiny
from trainer.blocks.config import TrainingConfig
from trainer.blocks.run import Run, StepLoss
from trainer.blocks.state import load_state, read_records, save_state


class Line:
    """Fits one matrix to a number that depends on the step; may do something at a step."""

    def __init__(self, at: int = -1, action: Callable[[], None] = lambda: None) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 1))
        self.name, self.module = "line", nn.ModuleDict({"layers": layers})
        self.trained, self.at, self.action = [self.module], at, action

    def loss(self, step: int) -> StepLoss:
        if step == self.at:
            self.action()
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
        loss = (self.module["layers"](x) - x.sum()).square().mean()
        return StepLoss(loss, {"line_nats": float(loss.detach())})

    def evaluate(self) -> dict[str, float]:
        return {"valid_nats": float(self.module["layers"](torch.ones(1, 24)))}


def weights(task: Line) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in task.module.parameters()]


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "time"} for record in read_records(path)]


@pytest.fixture
def undisturbed(tmp_path: Path) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    task = Line()
    Run(task, tiny, tmp_path / "undisturbed", "run").train()
    return weights(task), without_times(tmp_path / "undisturbed" / "line.jsonl")


def check_resumed(directory: Path, tiny: TrainingConfig, undisturbed: tuple) -> None:
    task = Line()
    run = Run(task, tiny, directory, "run")
    run.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(task), undisturbed[0], strict=True))
    assert without_times(directory / "line.jsonl") == undisturbed[1]
    run.finish()
    assert not run.state_path.exists()


def test_a_run_logs_each_step_evaluates_and_ends(tmp_path: Path) -> None:
    final = Run(Line(), tiny, tmp_path, "run").train()
    records = read_records(tmp_path / "line.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 6]
    assert [("valid_nats" in r) for r in records] == [False, False, False, True, False, False, True]
    assert records[-1] == {"step": 6, "time": records[-1]["time"], "final": True, **final}
    assert {"line_nats", "gradient_norm", "rate_share", "time"} <= records[0].keys()


@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 2), (signal.SIGTERM, 0), (signal.SIGINT, 4)])
def test_a_stopped_run_saves_and_is_resumed(tmp_path: Path, undisturbed: tuple, number: int, at: int) -> None:
    config = replace(tiny, save_every_s=60.0)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped and saved at step {at + 1}; run again to resume"):
        Run(Line(at, lambda: os.kill(os.getpid(), number)), config, tmp_path / "run", "run").train()
    assert signal.getsignal(number) is before
    check_resumed(tmp_path / "run", config, undisturbed)


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Run(Line(2, twice), tiny, tmp_path, "run").train()


def test_a_run_with_a_torn_log_line_is_resumed(tmp_path: Path, undisturbed: tuple) -> None:
    def crash() -> None:
        raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        Run(Line(3, crash), tiny, tmp_path / "run", "run").train()
    with (tmp_path / "run" / "line.jsonl").open("a") as log:
        log.write('{"step": 4, "line_n')
    (tmp_path / "run" / ".line.state.safetensors.leftover").write_bytes(b"half")
    check_resumed(tmp_path / "run", tiny, undisturbed)
    assert not list((tmp_path / "run").glob(".line*"))


def test_the_state_of_another_run_and_a_second_process_are_refused(tmp_path: Path) -> None:
    Run(Line(), tiny, tmp_path, "run").train()
    with pytest.raises(ResumeError, match="other settings"):
        Run(Line(), tiny, tmp_path, "another").train()
    message = "another process is already training"
    with exclusive(tmp_path / "line.lock", ResumeError()), pytest.raises(ResumeError, match=message):
        Run(Line(), tiny, tmp_path, "run").train()
    (tmp_path / "no" / "line.lock").mkdir(parents=True)
    with pytest.raises(OnesweepError, match=r"cannot write .*line.lock: Is a directory"):
        Run(Line(), tiny, tmp_path / "no", "run").train()


@pytest.mark.parametrize("missing", ["step", "module.layers.0.weight"])
def test_an_incomplete_state_is_refused(tmp_path: Path, missing: str) -> None:
    Run(Line(), tiny, tmp_path, "run").train()
    path = tmp_path / "line.state.safetensors"
    record, tensors = load_state(path)
    del (record if missing in record else tensors)[missing]
    save_state(path, record, tensors)
    with pytest.raises(ResumeError, match=r"(?s)is of another run .*; delete it to start over"):
        Run(Line(), tiny, tmp_path, "run").train()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    task = Line()

    def spoil() -> None:
        task.module["layers"][0].weight.data.fill_(float("nan"))

    task.at, task.action = 3, spoil
    with pytest.raises(ConfigError, match="the gradient is nan at step 3; lower learning_rate"):
        Run(task, tiny, tmp_path, "run").train()
    assert [record["step"] for record in read_records(tmp_path / "line.jsonl")] == [1, 2, 3]


# A full disk


def test_a_full_disk_leaves_the_last_state(small_disk: Callable[[str], Path], undisturbed: tuple) -> None:
    disk = small_disk("128k")
    filler = disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 1024)
            except OSError:
                return

    with pytest.raises(CheckpointError, match=r"No space left on device.*free some space"):
        Run(Line(3, fill), tiny, disk / "run", "run").train()
    filler.unlink()
    check_resumed(disk / "run", tiny, undisturbed)


# A killed process


STEPS = 24


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "log", "save_every_s"), [("chain", "block-1.jsonl", 0.1), ("ar", "ar.jsonl", 0.0)])
def test_a_killed_process_loses_and_repeats_nothing(
    tmp_path: Path,
    text_file: Path,
    settings: Callable[..., Path],
    onesweep: Callable[..., Any],
    kind: str,
    log: str,
    save_every_s: float,
) -> None:
    def command(out: str) -> list[object]:
        given = ["--config", settings(save_every_s), "--data", text_file, "--steps", STEPS]
        return ["train", "text", kind, *given, "--out", tmp_path / out]

    watched = tmp_path / "killed" / "training" / log
    process = launched(tmp_path / "words", *command("killed"))
    until(lambda: len(read_records(watched)) >= 8)
    process.kill()
    assert ended(process, 60) == -signal.SIGKILL, "it ended before it could be killed"
    assert None in digests(tmp_path / "killed")

    for out in ("killed", "whole"):
        assert onesweep(*command(out), "--threads", 1).code == 0
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole"), "weights are equal bit for bit"
    for path in sorted((tmp_path / "whole" / "training").glob("*.jsonl")):
        records = without_times(tmp_path / "killed" / "training" / path.name)
        assert records == without_times(path)
        assert [r["step"] for r in records if not r.get("final")] == list(range(1, STEPS + 1))
    assert not list((tmp_path / "killed" / "training").glob("*.state.safetensors"))
    assert read_manifest(tmp_path / "killed").metrics == read_manifest(tmp_path / "whole").metrics
