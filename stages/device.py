"""Compute devices by name, cores, and tensors, for files that import torch only where they compute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.errors import ConfigError, quoted

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor as Tensor
else:
    Tensor = Any  # in annotations

# every command imports this file, so what takes long to import is imported where it is used

AUTO = "auto"  # a GPU if one can compute the model, else the processor
_NAME = re.compile(r"cpu|cuda(:\d{1,3})?")
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def tensor_of(numbers: NDArray[np.generic]) -> Tensor:
    """A tensor on the same memory."""
    import torch

    return torch.from_numpy(numbers)


def cgroup_texts(*names: str) -> Iterator[list[str]]:
    """The texts of files `names` in each control group of this process, own first; empty if missing (v1 and v2)."""
    with suppress(OSError):  # another system than Linux
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            for controller in controllers.split(","):  # an empty one in v2
                group = _CGROUPS / controller / own.lstrip("/")
                for each in (group, *group.parents):  # in a container `own` may be a path outside: its group is above
                    files = [each / name for name in names]
                    yield [file.read_text() if file.is_file() else "" for file in files]


def all_cores() -> int:
    """Cores that this process may use: of a quota the whole ones, since threads wait for the one that it stops."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for texts in (*cgroup_texts("cpu.max"), *cgroup_texts("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        match " ".join(texts).split():
            case [quota_us, period_us] if quota_us.isdecimal():  # not "max" or -1
                cores = min(cores, max(1, int(quota_us) // int(period_us)))
    return cores


def is_device_name(name: str) -> bool:
    """True for `cpu`, `cuda` and `cuda:N`, whether or not this machine has the device."""
    return _NAME.fullmatch(name) is not None


def check_device(name: str) -> str:
    """Return `name` if it is a device of this machine. Raises ConfigError."""
    import torch

    if not is_device_name(name):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, not {quoted(name)}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name != "cpu" and (torch.device(name).index or 0) >= count:
        there = f"GPUs 0 to {count - 1}" if count > 1 else "one GPU, 0" if count else "no usable GPU"
        raise ConfigError(f"there is no device {name} here: PyTorch {torch.__version__} sees {there}")
    return name


def device_kind(device: torch.device) -> str:
    """A device's name for other machines, such as "cuda (NVIDIA H100 80GB HBM3)".

    It omits the number: the first and the second GPU of one kind compute the same.
    """
    import torch

    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def processor() -> str:
    """The model of this machine's processor."""
    with suppress(OSError, IndexError):  # a system without that file, or without models in it
        return str(re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0])
    return os.uname().machine


@cache  # hosts are asked for it every second
def machine_kind(device: torch.device, threads: int) -> str:
    """A device with the software that computes on it: equal kinds compute the same bits."""
    from importlib.metadata import version

    import torch

    where = device_kind(device)
    if device.type == "cpu":
        where = f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), {threads} threads"
    return f"torch {torch.__version__}, onnxruntime {version('onnxruntime')} on {where}"
