"""Workers on different devices: the error without a GPU, and the weights of a mixed run."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages.device import check_device
from stages.errors import ConfigError
from tests.conftest import PATIENCE_S, until
from tests.trainer.small import corpus, rounds_config
from trainer.rounds.codecs import norm, subtract
from trainer.rounds.parts import load_copies
from trainer.rounds.spec import RunSpec

MIXED_TOLERANCE = 0.02
"""Share of the way from the first weights that a mixed run may end beside the one of one device, in float32."""


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:1234", "meta", "cpu:0"])
def test_a_device_has_one_of_three_names(name: str) -> None:
    with pytest.raises(ConfigError, match="--device must be cpu, cuda or cuda:N, not"):
        check_device(name)


@pytest.mark.parametrize(("count", "there"), [(0, "no usable GPU"), (1, "one GPU, 0"), (2, "GPUs 0 to 1")])
def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch, count: int, there: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert check_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=rf"there is no device cuda:{count} here: PyTorch .* sees {there}"):
        check_device(f"cuda:{count}")
    if count:
        assert check_device("cuda") == "cuda"


@pytest.mark.parametrize(("part", "rounds"), [(0, {"model": "scorer"}), (1, {}), (0, {"model": "ar"})])
def test_training_uses_no_tensor_of_another_device(part: int, rounds: dict[str, Any]) -> None:
    """On a device without numbers, arithmetic with a tensor of the CPU fails; reading a number is what comes last."""
    config = replace(rounds_config, rounds=replace(rounds_config.rounds, **rounds))
    spec = RunSpec.of(config, corpus)
    task = spec.task(part, replace(corpus, device="meta"), 0)
    load_copies(task, spec.initial())
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        task.loss(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
def test_a_cpu_and_a_gpu_make_the_weights_of_one_device(network: Callable[..., Any]) -> None:
    net = network(replace(rounds_config, bfloat16=False))
    places = [(part, device) for part in (0, 1) for device in ("cpu", "cuda")]
    with ThreadPoolExecutor(len(places)) as pool:
        jobs = [pool.submit(net.work, f"{d}-{part}", part=part, device=d) for part, d in places]
        assert [job.result(PATIENCE_S) for job in jobs] == [3] * len(places)
    until(lambda: net.over)
    begin = net.spec.initial()
    for part, expected in net.in_one_process().items():
        missed, way = subtract(net.ledger.weights(part), expected), subtract(expected, begin[part])
        assert norm(missed) <= MIXED_TOLERANCE * norm(way)
