"""Memory of a training step: one block, the same blocks end to end, and the AR model of the same depth."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from onesweep.stages.model.block import Block, Codes
from onesweep.stages.model.pipeline import ArModel
from onesweep.trainer.blocks.checkpoint_dir import make_partition
from onesweep.trainer.blocks.config import RunConfig, TrainingConfig
from onesweep.trainer.blocks.data import Corpus, precision
from onesweep.trainer.blocks.losses import ChunkLayout, Corruption, block_loss, next_byte_loss
from onesweep.trainer.blocks.optimizer import OptimizerSet, state_bytes

FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of real tensors around one step. `activations` are what the forward pass saved for the backward pass."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def to_record(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def measure_training(config: TrainingConfig, corpus: Corpus) -> dict[str, MemoryUse]:
    """Take one real step each way, on the same batch, and measure it.

    `block`: the last block alone, with the earlier ones' frozen weights where the chain is `chained`.
    `end to end`: all blocks at once, every block's loss, gradients through the estimate (and, where `chained`, the
    features) that one block hands to the next. `ar`: the AR model with as many layers.
    """
    blocks = _blocks(config)
    text = corpus.batch(config.seed, 0, config.sequences, config.architecture.context_length + 1)
    chain = _Chain(blocks, config, corpus, text)
    last = blocks[-1]
    frozen = blocks[:-1] if config.architecture.context == "chained" else []
    alone = measure(last, config, chain.last_loss, frozen)
    whole = measure(nn.ModuleList(blocks), config, chain.loss)
    model = ArModel(replace(config.architecture, context="own"))
    ar = measure(model, config, lambda: next_byte_loss(model(text[:, :-1]), text))
    return {"block": alone, "end to end": whole, "ar": ar}


class _Chain:
    """The objective of all blocks on one batch, with the noise that each would get."""

    def __init__(self, blocks: list[Block], config: TrainingConfig, corpus: Corpus, text: Tensor) -> None:
        a = config.architecture
        self.blocks, self.config, self.text = blocks, config, text
        partition = make_partition(config.noise, a.parts, Codes(config.noise.code_seed, a.code_dim), corpus.train)
        self.layout = ChunkLayout(a.context_length, a.context_length)
        generator = torch.Generator().manual_seed(config.seed)
        self.corruptions = [Corruption.draw(b, partition, self.layout, len(text), generator) for b in blocks]

    def last_loss(self) -> Tensor:
        """The last block's loss, as in training: what it reads of the others carries no gradient."""
        features = None
        if not self.blocks[-1].reads_bytes:
            with torch.no_grad():
                features = self.text[:, :-1]
                for block in self.blocks[:-1]:
                    features, _ = block.read(features)
            features = features.float()
        return block_loss(
            self.blocks[-1],
            self.text,
            features,
            self.layout,
            self.corruptions[-1],
            self_condition=True,
            anchor=self.config.anchor,
        ).total

    def loss(self) -> Tensor:
        """The sum of all blocks' losses, with gradients through the whole chain."""
        total, clean, estimate = torch.zeros(()), None, None
        for block, corruption in zip(self.blocks, self.corruptions, strict=True):
            loss = block_loss(
                block,
                self.text,
                None if block.reads_bytes else clean,
                self.layout,
                corruption,
                self_condition=False,
                anchor=self.config.anchor,
                estimate=estimate,
            )
            total, clean, estimate = total + loss.total, loss.clean, block.point(loss.logits)
        return total


def _blocks(config: TrainingConfig) -> list[Block]:
    torch.manual_seed(config.seed)
    codes = Codes(config.noise.code_seed, config.architecture.code_dim)
    return [Block(config.architecture, index, codes) for index in range(config.architecture.parts)]


def measure(
    module: nn.Module, config: RunConfig, loss: Callable[[], Tensor], frozen: Sequence[nn.Module] = ()
) -> MemoryUse:
    """Take one step of `loss()`; `frozen`: copies of others, which count as parameters."""
    # Frozen copies count as parameters: a worker holds them, too.
    held = [*module.parameters(), *(p for copy in frozen for p in copy.parameters())]
    optimizers = OptimizerSet(module, config)
    with (
        precision(config.bfloat16, "cpu"),
        saved_for_backward({p.untyped_storage().data_ptr() for p in held}) as saved,
    ):
        total = loss()
    activations = sum(saved.values())
    total.backward()
    gradients = state_bytes(p.grad for p in module.parameters() if p.grad is not None)
    optimizers.step(0)
    return MemoryUse(state_bytes(held), gradients, state_bytes(optimizers.tensors().values()), activations)


def trained_bytes(module: nn.Module, config: TrainingConfig) -> int:
    """Weights and gradients once, one moment under Muon and two under AdamW: all fp32."""
    muon, adamw = (
        sum(p.numel() for p in optimizer.param_groups[0]["params"])
        for optimizer in OptimizerSet(module, config).optimizers
    )
    return (3 * muon + 4 * adamw) * FP32_BYTES


@contextmanager
def saved_for_backward(not_counted: set[int]) -> Iterator[dict[int, int]]:
    """Collects address -> bytes of every storage that the graph keeps, each once, but those in `not_counted`."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage: several views of one tensor are saved, and are held once.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
