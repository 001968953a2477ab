"""Public surface of onesweep: clients of a router, and checkpoints as PyTorch modules.

from onesweep import Client

with Client("localhost:7700") as client:
    print(client.generate("Once upon a time", mode="resample").text)
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.client.client import AsyncClient, Client
    from serving.client.result import Result
    from stages.checkpoint.checkpoint import load_ar, load_block, load_chain, load_stage

__all__ = ["AsyncClient", "Client", "Result", "load_ar", "load_block", "load_chain", "load_stage"]


def _check_packages() -> None:
    """Raise ImportError if another distribution's package shadows ours: Coqui also has a `trainer`."""
    home = Path(__file__).resolve().parents[1]
    for name in ("stages", "serving", "trainer", "loadtest"):
        found = find_spec(name)
        if found is None or found.origin is None or Path(found.origin).resolve().parents[1] != home:
            where = found.origin if found else "nowhere"
            raise ImportError(
                f"onesweep needs its own package {name!r}, beside {home / 'onesweep'}, and Python finds it at {where}: "
                "install onesweep into an environment of its own"
            )


_check_packages()


def __getattr__(name: str) -> object:
    # Loaded on first use: a client needs gRPC but not torch, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module 'onesweep' has no attribute {name!r}")
    home = "stages.checkpoint.checkpoint" if name.startswith("load_") else "serving.client.client"
    return getattr(importlib.import_module(home), name)
