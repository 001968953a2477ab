"""A host on a device other than the processor: the same texts, and a sentence where the device cannot serve.

No GPU is needed: the device of `fake_gpu` refuses what a GPU refuses.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
import torch
from torch import Tensor

from serving.router.journal import HOST_STATE_CODES
from stages.backends import Backend, DeviceRunner
from stages.backends.base import BranchPiece, CleanPiece
from stages.errors import InputError
from stages.host.loading import warm_up
from stages.host.parts import Parts, load_parts
from stages.host.plan import HostPlan, device_for, plan_host
from stages.model.pipeline import PipelineStage, new_caches
from tests.stages.fake_gpu import NAME, introduced
from tests.stages.hops import PROMPT, Hops, scores, steps, sweeps
from tests.stages.model.tiny_llama import OPTIONS, TINY, random_stages, write_tiny
from tests.stages.slow_runner import Paced, alone, watched
from tests.trainer.processes import ended, forked

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
NEAR = 1e-4
MODELS = {"llama": replace(TINY, layers=(1, 1))} | {name: OPTIONS[name] for name in ("experts", "capped window")}
REQUESTS: dict[str, Callable[[], Hops]] = {
    "ar": lambda: steps(count=6, temperature=0.0),
    "ar long": lambda: steps(PROMPT * 4, count=2, temperature=0.0, codec="int8"),
    "ar drafted": lambda: steps(count=6, temperature=0.0, draft=lambda text: b"xy"),
    "sweep": lambda: sweeps(chunks=(12, 6), temperature=0.0),
}


def texts_of(parts: Parts) -> dict[str, str]:
    """Every request's text, of all of them together."""
    engine = Paced(parts)
    for name, make in REQUESTS.items():
        engine.begin(name, make())
    texts = engine.finish()
    assert not engine.refusals
    return {name: text.hex() for name, text in texts.items()}


def numbers_of(stage: PipelineStage, device: torch.device) -> list[Tensor]:
    """Results of a stage as a host runs it: of a prompt and two steps, of branches, and of the head."""
    a, generator = stage.architecture, torch.Generator().manual_seed(3)

    def source(*shape: int) -> Tensor:
        if stage.is_first:
            return torch.randint(a.vocabulary, shape, generator=generator)
        return torch.randn(*shape, a.width, generator=generator)

    runner = Backend(device).stage(stage.to(device))
    assert isinstance(runner, DeviceRunner) == (device.type != "cpu")
    caches = [new_caches(len(stage.layers), a, 60, device=device) for _ in range(2)]
    found: list[Tensor] = []
    for counts in ((40, 30), (1, 1), (1, 3)):
        found += runner.read([CleanPiece(source(n), mine) for n, mine in zip(counts, caches, strict=True)])
    found += runner.branch([BranchPiece(source(3, 4), mine) for mine in caches])
    if stage.is_last:
        found += runner.next_byte([found[0], found[1]])
    assert all(x.is_cpu for x in found)
    return found


def on_the_device(bundle: Path, report: Path) -> int:
    """In a process of its own: what a host there comes to."""
    torch.set_num_threads(1)
    with introduced() as device:
        pretend = torch.device(NAME)
        for model, architecture in MODELS.items():
            for stage in random_stages(architecture):
                expected = numbers_of(copy.deepcopy(stage), torch.device("cpu"))
                for found, due in zip(numbers_of(stage, pretend), expected, strict=True):
                    torch.testing.assert_close(found, due, atol=NEAR, rtol=NEAR, msg=f"{model} {stage.index}")
        plan = plan_host(bundle, (0, 1, 2))
        parts = load_parts(plan, Backend(pretend))
        assert all(
            isinstance(x, DeviceRunner) for x in (*parts.runners["chain"].values(), *parts.runners["ar"].values())
        )
        warm_up(parts)
        one_by_one = {name: alone(parts, make()).hex() for name, make in REQUESTS.items()}
        before, engine = device.reads, Paced(parts)
        engine.begin("step", steps(count=1))
        engine.finish()
        reads = device.reads - before
        scored = alone(parts, scores(temperature=0.0)).hex()
        report.write_text(json.dumps({"texts": texts_of(parts), "alone": one_by_one, "reads": reads, "scores": scored}))
    return 0


def test_a_host_on_another_device_writes_the_same_text(bundles: Path, whole: Parts, tmp_path: Path) -> None:
    errors, report = tmp_path / "errors", tmp_path / "report"
    code = ended(forked(tmp_path / "out", errors, on_the_device, bundles / "own", report), WITHIN_S)
    assert code == 0, errors.read_text()
    found = json.loads(report.read_text())
    assert found["texts"] == found["alone"] == texts_of(whole)
    assert found["reads"] == 4, "of a step: the hidden states of three stages, and the logits"
    here, there = (
        torch.frombuffer(bytearray(nats), dtype=torch.float64)
        for nats in (alone(whole, scores(temperature=0.0)), bytes.fromhex(found["scores"]))
    )
    torch.testing.assert_close(there, here, atol=NEAR, rtol=NEAR)


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def small(directory: Path, weights: Literal["float32", "q4"] = "float32") -> HostPlan:
    sizes = {"layers": (1,), "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp_width": 64}
    write_tiny(directory, replace(TINY, **sizes, weights=weights))
    return plan_host(directory, (0,))


def test_a_gpu_is_chosen_if_it_can_compute_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    float32, four_bits = small(tmp_path / "float32"), small(tmp_path / "q4", "q4")
    gpus(monkeypatch, 1)
    assert device_for("auto", float32).type == "cuda"
    assert device_for("auto", four_bits).type == "cpu"
    assert device_for("cuda:0", float32) == torch.device("cuda:0")
    assert device_for("cpu", float32).type == "cpu"
    with pytest.raises(InputError, match=r"4-bit weights \(ar\) run only on CPUs: import the model with --weights"):
        device_for("cuda", four_bits)
    gpus(monkeypatch, 0)
    assert device_for("auto", float32).type == "cpu"
    with pytest.raises(InputError, match=r"there is no device cuda here: PyTorch .* sees no usable GPU"):
        device_for("cuda", float32)


def test_a_release_that_the_device_cannot_compute_is_refused_unread(tmp_path: Path) -> None:
    plan = small(tmp_path / "q4", "q4")
    for path in (tmp_path / "q4").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(InputError, match="this host computes on meta: 4-bit weights"):
        load_parts(plan, Backend(torch.device("meta")))


def full(least: int) -> Callable[[str, Sequence[Any]], bool]:
    """A device whose memory ends in the middle of calls with `least` pieces or more."""

    def call(method: str, pieces: Sequence[Any]) -> bool:
        if method == "read" and len(pieces) >= least:
            pieces[0].caches[0].length += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return False

    return call


def test_hops_that_do_not_fit_in_memory_together_are_computed_one_by_one(parts: Parts) -> None:
    expected = alone(parts, steps())
    engine = Paced(parts)
    for name in ("one", "two"):
        engine.begin(name, steps())
    watched(parts, 1, "ar").fails = full(2)
    assert engine.finish() == {"one": expected, "two": expected}


def test_a_hop_that_does_not_fit_in_memory_is_refused_as_exhausted(parts: Parts) -> None:
    expected = alone(parts, sweeps())
    engine = Paced(parts)
    engine.begin("step", steps())
    engine.begin("sweep", sweeps())
    watched(parts, 1, "ar").fails = full(1)
    assert engine.finish()["sweep"] == expected
    assert engine.refusals["step"].code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert engine.refusals["step"].code in HOST_STATE_CODES
