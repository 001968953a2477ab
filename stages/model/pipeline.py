"""AR pipelines: models cut into contiguous stages, both those trained here and the Llama family."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stages.model.architecture import Architecture, TextArchitecture
from stages.model.layers import CausalStage, Layer, LayerCache, initialise, listed, rotary_table
from stages.model.llama import LlamaStage


class ArStage(CausalStage):
    """One stage of a model trained here."""

    layers: Sequence[Layer]

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__(index, architecture.parts)
        self.architecture = a = architecture
        self.embedding = nn.Embedding(a.vocabulary, a.width) if self.is_first else None
        self.layers = listed(Layer(a.width, a.heads) for _ in range(a.layers))
        self.norm = nn.RMSNorm(a.width) if self.is_last else None
        self.head = nn.Linear(a.width, a.vocabulary) if self.is_last else None
        self.register_buffer("rotary", rotary_table(a.context_length, a.head_dim), persistent=False)
        initialise(self, a.layers * a.parts)

    def restore_tables(self) -> None:
        """Compute the tables, which are not stored, for a stage that was built on the meta device."""
        self.rotary = rotary_table(self.architecture.context_length, self.architecture.head_dim)


class ArModel(nn.Module):
    """All stages in one process, for training and the local baseline."""

    stages: Sequence[ArStage]

    def __init__(self, architecture: Architecture, stages: Sequence[ArStage] | None = None) -> None:
        """:param stages: those of a loaded model; by default new ones."""
        super().__init__()
        self.architecture = architecture
        self.stages = listed(stages or (ArStage(architecture, i) for i in range(architecture.parts)))

    def forward(self, source: Tensor) -> Tensor:
        """Next-token logits (batch, positions, vocabulary) for tokens (batch, positions)."""
        x = source
        for stage in self.stages:
            x = stage.read(x)
        return self.stages[-1].next_byte(x)


PipelineStage = ArStage | LlamaStage


def new_caches(
    layers: int, architecture: TextArchitecture, capacity: int, batch: int = 1, device: torch.device | None = None
) -> list[LayerCache]:
    """Empty KV caches of `layers` layers for `capacity` clean positions."""
    shape = (batch, architecture.kv_heads, capacity, architecture.head_dim)
    return [LayerCache(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(layers)]


def cache_bytes(layers: int, architecture: TextArchitecture, capacity: int) -> int:
    """Bytes that `new_caches` takes for one sequence."""
    return layers * 2 * capacity * architecture.kv_heads * architecture.head_dim * 4


# torch's own meta device imports the compiler with its first random number: 1.7 s of processor in every host.
class _SkipInitialisation(TorchFunctionMode):
    """Skips the functions that give new weights their first values."""

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
def on_meta_device() -> Iterator[None]:
    """Modules made within it have only shapes: their weights are read later, or never."""
    with torch.device("meta"), _SkipInitialisation():
        yield
