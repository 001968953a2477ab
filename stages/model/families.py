"""Families of models: AR pipelines (byte models, the Llama family), and chains with blocks of their own kind.

A chain trained here is made of stages/model/block.py. Chains of another family are made of a pipeline's stages; they
come in by their architecture, which is registered here by the name that manifests have. Nothing else in this project
knows such a family by name: it asks the architecture for a part, and the part for its probe and its runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onesweep.stages.model.architecture import Architecture, Context
from onesweep.stages.model.llama import LlamaArchitecture, LlamaStage
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.pipeline import ArStage

# Name of a family in manifests -> module and class of its architecture, imported when a checkpoint of it is read.
CHAIN_FAMILIES = {"graft": ("onesweep.stages.grafting.block", "GraftArchitecture")}

PipelineStage = ArStage | LlamaStage


def new_stage(architecture: Architecture | LlamaArchitecture, index: int) -> PipelineStage:
    """A stage of the architecture's family, with weights as before training."""
    return ArStage(architecture, index) if isinstance(architecture, Architecture) else LlamaStage(architecture, index)


@dataclass(frozen=True)
class FamilyArchitecture(ABC):
    """The shape of a chain whose blocks are made of a pipeline's stages."""

    base: Architecture | LlamaArchitecture  # the pipeline; its stages are the blocks
    context: ClassVar[Context] = "chained"
    # A layer in the middle of a pipeline expects features, not codes, so a block hands on its slots' features.
    hands_on_slots: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def from_record(record: Mapping[str, Any]) -> FamilyArchitecture:
        """Build from a manifest's JSON object. Raises ShapeError, KeyError or TypeError."""

    @abstractmethod
    def new_part(self, index: int) -> FamilyPart:
        """A block with weights as before training."""

    @property
    @abstractmethod
    def code_dim(self) -> int: ...

    @property
    def parts(self) -> int:
        return self.base.parts

    @property
    def width(self) -> int:
        return self.base.width

    @property
    def positions(self) -> int:
        """Symbols in a context."""
        return self.base.positions

    @property
    def vocabulary(self) -> int:
        return self.base.vocabulary

    @property
    def kv_heads(self) -> int:
        return self.base.kv_heads

    @property
    def head_dim(self) -> int:
        return self.base.head_dim

    def layers_in(self, part: int) -> int:
        """Transformer layers of one block."""
        return self.base.layers_in(part)


class FamilyPart(nn.Module):
    """One block of such a chain with all that its host needs: one file of a checkpoint."""

    adjective: ClassVar[str]  # for error messages: "grafted" blocks
    architecture: FamilyArchitecture
    index: int

    @property
    def embedding(self) -> nn.Embedding | None:
        """The first block's; the others read features."""
        raise NotImplementedError

    def restore_tables(self) -> None:
        """Compute what is not stored, for a part that was built on the meta device."""
        raise NotImplementedError

    def probe(
        self, partition: NoisePartition, known: Tensor, features: Tensor | None
    ) -> tuple[dict[str, float], Tensor]:
        """The gate's measures (nats) on the probe text, and the block's own clean features (positions, width).

        known: symbols (1, positions) int64; features: (positions, width) from the block before, None for the first.
        """
        raise NotImplementedError

    def runner(self) -> Any:  # noqa: ANN401 - a BlockRunner, which a layer above defines
        """The block as the torch backend runs it."""
        raise NotImplementedError


def read_architecture(record: Mapping[str, Any]) -> Architecture | LlamaArchitecture | FamilyArchitecture:
    """The architecture of a manifest's JSON object, of whatever family. Raises ShapeError, KeyError or TypeError."""
    if record.get("family") in CHAIN_FAMILIES:
        module, name = CHAIN_FAMILIES[record["family"]]
        found: FamilyArchitecture = getattr(import_module(module), name).from_record(record)
        return found
    return LlamaArchitecture.from_record(record) if "family" in record else Architecture(**record)


# torch's own meta device imports the compiler with its first random number: 1.7 s of processor in every host.
class _Unfilled(TorchFunctionMode):
    """Leaves out what gives new weights their first values."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are made in it have shapes only: their weights are read later, or never.

    Their first values are not drawn either: without memory torch does so by way of its compiler, whose import takes
    as long as that of all the rest.
    """
    with torch.device("meta"), _Unfilled():
        yield
