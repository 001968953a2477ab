"""Public surface of onesweep: clients of a router, and checkpoints as PyTorch modules.

from onesweep import Client

with Client("localhost:7100") as client:
    print(client.generate("Once upon a time", mode="resample").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.client.client import AsyncClient, Client
    from serving.client.result import Result
    from stages.checkpoint.checkpoint import load_ar, load_block, load_chain, load_stage

__all__ = ["AsyncClient", "Client", "Result", "load_ar", "load_block", "load_chain", "load_stage"]

# The packages are links to the folders of the repository, so that a wheel installs one name and no other.
_HOMES = {
    "AsyncClient": "serving.client.client",
    "Client": "serving.client.client",
    "Result": "serving.client.result",
    "load_ar": "stages.checkpoint.checkpoint",
    "load_block": "stages.checkpoint.checkpoint",
    "load_chain": "stages.checkpoint.checkpoint",
    "load_stage": "stages.checkpoint.checkpoint",
}


def __getattr__(name: str) -> object:
    # Loaded when first used: a client needs gRPC but not torch, which takes seconds to import.
    if name not in _HOMES:
        raise AttributeError(f"module 'onesweep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
