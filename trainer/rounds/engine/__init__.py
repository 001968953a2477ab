"""What makes the rounds of a run, by name: one file for each engine."""

from __future__ import annotations

from stages.errors import ConfigError
from trainer.rounds.engine.base import Engine
from trainer.rounds.engine.in_order import InOrder
from trainer.rounds.engine.inprocess import InProcess
from trainer.rounds.engine.network import Network
from trainer.rounds.engine.torchft import Torchft

INPROCESS = "inprocess"
ENGINES: dict[str, type[Engine]] = {INPROCESS: InProcess, "in-order": InOrder, "grpc": Network, "torchft": Torchft}


def engine_named(name: str) -> Engine:
    """Raises ConfigError for a name that there is not."""
    if name not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    return ENGINES[name]()
