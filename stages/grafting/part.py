"""A grafted block with all that its host needs: one file of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onesweep.stages.backends.base import BlockRunner, CleanPiece, Denoised, NoisyPiece
from onesweep.stages.grafting.block import GraftArchitecture, GraftBlock, GraftHead, Noisy, Slots
from onesweep.stages.model.families import FamilyPart, PipelineStage, new_stage, without_memory
from onesweep.stages.model.llama import LlamaArchitecture
from onesweep.stages.model.partition import NoisePartition
from onesweep.stages.model.randomness import Purpose, normals


class GraftPart(FamilyPart):
    """A block, the codes, and the head, with which every block turns its slots' features into logits."""

    # The head is the last stage's own, and where the model's head is its embedding, the first block has it in that; the
    # others have a copy.

    adjective = "grafted"
    architecture: GraftArchitecture
    codes: Tensor

    def __init__(self, architecture: GraftArchitecture, index: int) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.index = index
        stage = new_stage(a.base, index)
        self.block = GraftBlock(stage, Slots(stage, a.shape))
        is_llama = isinstance(a.base, LlamaArchitecture)
        # A tied head is the embedding, which the first block holds.
        has_one = stage.is_last or (index == 0 and isinstance(a.base, LlamaArchitecture) and a.base.tied_head)
        self.own_head = None if has_one else nn.Linear(a.width, a.vocabulary, bias=not is_llama)
        self.register_buffer("codes", torch.zeros(a.vocabulary, a.code_dim))

    @staticmethod
    def of(architecture: GraftArchitecture, block: GraftBlock, codes: Tensor, last: PipelineStage) -> GraftPart:
        """Make a part of modules in memory. codes: (vocabulary, code_dim); last: the stage with the head."""
        with without_memory():
            part = GraftPart(architecture, block.index)
        part.block, part.codes = block, codes
        if part.own_head is not None:
            assert isinstance(last.head, nn.Linear), "of several stages, the last has a matrix of its own"
            part.own_head = last.head
        return part

    @property
    def head(self) -> GraftHead:
        stage = self.block.stage
        found = self.own_head or stage.head or stage.embedding
        assert found is not None
        bias = found.bias if isinstance(found, nn.Linear) else None
        return GraftHead(found.weight, self.codes, bias)

    @property
    def embedding(self) -> nn.Embedding | None:
        return self.block.stage.embedding

    def restore_tables(self) -> None:
        """Compute what is not stored, for a part that was built on the meta device."""
        self.block.stage.restore_tables()
        self.block.added.restore_tables()

    @torch.inference_mode()
    def probe(
        self, partition: NoisePartition, known: Tensor, features: Tensor | None
    ) -> tuple[dict[str, float], Tensor]:
        """Cross-entropies (nats) on the probe text, and the block's own clean features (positions, width).

        Measured are its slots, which begin with the block before's features of the known text, and in the last block
        the pretrained model's own next symbol.
        """
        block = self.block
        clean, memory = block.read(known if features is None else features[None])
        high, low = partition.range(self.index)
        half = known.shape[1] // 2
        target, place = known[:, half:], half - 1
        sigma, slots = torch.full((1, 1), (high * low) ** 0.5, device=known.device), target.shape[1]
        noise = normals(0, Purpose.INITIAL_NOISE, half, slots, self.codes.shape[1])[None].to(known.device)
        z = self.codes[target] + sigma[..., None] * noise
        first = torch.arange(slots, device=known.device) == 0
        before = block.enter(known[:, place:-1], first) if features is None else features[None, place:-1]
        prefix = [(keys[:, :, :place], values[:, :, :place]) for keys, values in memory]
        noisy = Noisy(z, torch.zeros_like(z), sigma, first, start=place)
        hidden = block.added.way_out(block.denoise(before, noisy, prefix))
        logits = self.head.logits(hidden[0], noisy.likelihood())
        measures = {"denoise_nats": float(F.cross_entropy(logits, target[0]))}
        if block.stage.is_last:
            following = block.stage.next_byte(clean)[0, :-1]
            measures["next_token_nats"] = float(F.cross_entropy(following, known[0, 1:]))
        return measures, clean[0]

    def runner(self) -> GraftRunner:
        """The block as the torch backend runs it."""
        return GraftRunner(self)


class GraftRunner(BlockRunner):
    """Grafted blocks in PyTorch, one piece at a time: whole-sequence work fills a processor by itself, and the result
    of one piece then cannot depend on others."""

    # Pieces and results are on the CPU, where samplers and codecs are; caches are where the part is.

    def __init__(self, part: GraftPart) -> None:
        self.block, self.head = part.block, part.head

    @torch.inference_mode()
    def read(self, pieces: Sequence[CleanPiece]) -> list[Tensor]:
        device = self.head.codes.device
        return [self.block.read(piece.source[None].to(device), piece.caches)[0][0].cpu() for piece in pieces]

    @torch.inference_mode()
    def denoise(self, pieces: Sequence[NoisyPiece]) -> list[Denoised]:
        return [self._denoise(piece) for piece in pieces]

    def _denoise(self, piece: NoisyPiece) -> Denoised:
        assert piece.before is not None
        # slots sit one position before what they fill: the first one where the last known symbol is, which it reads
        place, slots, device = piece.start - 1, len(piece.z), self.head.codes.device
        memory = [(keys[:, :, :place], values[:, :, :place]) for keys, values in (c.stored() for c in piece.caches)]
        first = torch.arange(slots, device=device) == 0
        before = piece.before[None].to(device)
        if self.block.index == 0:
            before = self.block.enter(before.expand(1, slots), first)
        z, estimate = piece.z[None].to(device), piece.estimate[None].to(device)
        noisy = Noisy(z, estimate, torch.tensor([[piece.sigma]], device=device), first, start=place)
        features = self.block.denoise(before, noisy, memory)
        hidden, likelihood = self.block.added.way_out(features)[0], noisy.likelihood()
        logits = self.head.logits(hidden, likelihood)
        point = (logits / piece.divisor).softmax(dim=1) @ self.head.codes
        return Denoised(logits.cpu(), point.cpu(), features[0].cpu())
