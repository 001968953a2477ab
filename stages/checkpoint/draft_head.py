"""A draft head: a few layers that continue from the hidden states of a model, to draft its next tokens; and its file.

At each place it reads the model's last hidden state and the token after it. Its output stands for the hidden state of
the next place, so it can go on from itself (EAGLE, Li et al. 2024, arXiv 2401.15077).
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stages.checkpoint.checkpoint import file_digest, replace_file, update_manifest
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.checkpoint.weights import read_weights, write_weights
from stages.errors import CheckpointError, ShapeError, regular
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from stages.model.pipeline import without_memory

# Names in a file that are not those of the module.
STORED = {"tokens": "symbols", "token_norm.weight": "symbol_norm.weight"}


class DraftHead(nn.Module):
    """The layers, and what they read. It gives probabilities of the model's most frequent tokens only, by the model's
    own head: a product with all of them would be most of its time, and rare tokens are seldom guessed right."""

    tokens: Tensor

    def __init__(self, architecture: LlamaArchitecture, count: int, layers: int = 1) -> None:
        """:param architecture: of the model.
        :param count: tokens that it can guess. Raises ShapeError for more than there are."""
        super().__init__()
        if not 1 <= count <= architecture.vocabulary:
            raise ShapeError(f"a draft head of {count} tokens, the model has {architecture.vocabulary}")
        width, epsilon = architecture.width, architecture.norm_epsilon
        self.register_buffer("tokens", torch.zeros(count, dtype=torch.int32))
        self.model_norm = nn.RMSNorm(width, eps=epsilon)  # the model's own
        self.state_norm, self.token_norm = (nn.RMSNorm(width, eps=epsilon) for _ in range(2))
        self.join = nn.Linear(2 * width, width, bias=False)
        # The second of two stages: it has layers, a norm and a head, and no embedding.
        vocabulary = max(count, 2)
        last = replace(architecture, layers=(1, layers), vocabulary=vocabulary, tied_head=False, weights="float32")
        self.stage = LlamaStage(last, 1)

    def joined(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Input of the layers. states: (..., width), normed by `model_norm`, or what they gave at the place before;
        embedded: rows of the model's head for the tokens after them, likewise."""
        return self.join(torch.cat([self.token_norm(embedded), self.state_norm(states)], dim=-1))

    def stored(self) -> dict[str, Tensor]:
        """Tensors of its file: all but the rows of the model's head."""
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name != "stage.head.weight"}
        return {STORED.get(name, name): tensor for name, tensor in tensors.items()}


DRAFT_HEAD_NAME = "draft-head.safetensors"
SCALES, LEVELS = ".scales", 127  # matrices are whole numbers of 8 bits, times a scale for each row


def has_draft_head(manifest: Manifest) -> bool:
    """True where the host of the last stage can draft."""
    return DRAFT_HEAD_NAME in manifest.files


def takes_draft_head(manifest: Manifest) -> bool:
    """True for a model whose layers a draft head can be made of: Llama's, without an option, in weights of any kind."""
    a = manifest.architecture
    return manifest.kind == "ar" and isinstance(a, LlamaArchitecture) and replace(a, weights="float32").is_plain


def read_draft_head(path: Path, manifest: Manifest, sha256: str = "") -> DraftHead:
    """The head in `path`, without the rows of its model's head. Raises CheckpointError for one of another model."""
    architecture = manifest.architecture
    if not takes_draft_head(manifest):
        raise CheckpointError(f"{path}: a draft head needs an AR model of Llama's layers without an option")
    assert isinstance(architecture, LlamaArchitecture)
    try:
        with safe_open(regular(path), framework="pt") as file:
            (count,) = file.get_slice("symbols").get_shape()
            names = [name.split(".") for name in file.keys()]  # noqa: SIM118 - it is no dict
            layers = len({name[2] for name in names if name[:2] == ["stage", "layers"]})
        size = path.stat().st_size
        with without_memory():
            head = DraftHead(architecture, count, layers)
    except (SafetensorError, OSError, ValueError, ShapeError) as error:
        raise CheckpointError(f"{path} is no draft head of this model: {error}") from None
    wanted = {name: tuple(tensor.shape) for name, tensor in head.stored().items()}
    types = {name: torch.int8 for name, shape in wanted.items() if len(shape) == 2}
    wanted |= {name + SCALES: wanted[name][:1] for name in types}
    tensors = read_weights(path, size, sha256 or file_digest(path), wanted, {"symbols": torch.int32, **types})
    for name in types:
        tensors[name] = tensors[name] * tensors.pop(name + SCALES)[:, None]
    for name, stored in STORED.items():
        tensors[name] = tensors.pop(stored)
    tokens = tensors["tokens"]
    if not bool(((tokens >= 0) & (tokens < architecture.vocabulary)).all()):
        raise CheckpointError(f"{path} is a draft head of another vocabulary: the model has {architecture.vocabulary}")
    head.load_state_dict(tensors, strict=False, assign=True)
    head.stage.restore_tables()
    return head.eval().requires_grad_(False)


def load_draft_head(directory: Path, manifest: Manifest) -> DraftHead:
    """That of a checkpoint. Raises CheckpointError where it is not the one that the manifest names."""
    return read_draft_head(directory / DRAFT_HEAD_NAME, manifest, manifest.files[DRAFT_HEAD_NAME])


def add_draft_head(directory: Path, source: Path) -> None:
    """Put the head in `source` into a checkpoint, which has another digest then. Raises CheckpointError for one of
    another model, and where it cannot be written."""
    read_draft_head(source, read_manifest(directory))
    target = directory / DRAFT_HEAD_NAME
    replace_file(target, lambda path: shutil.copyfile(source, path))
    digest = file_digest(target)
    update_manifest(directory, lambda manifest: replace(manifest, files={**manifest.files, DRAFT_HEAD_NAME: digest}))


def write_draft_head(path: Path, head: DraftHead) -> None:
    """In 8 bits, as hosts compute it: what is drafted need not be exact. Raises OSError."""
    tensors = dict[str, Tensor]()
    for name, tensor in head.stored().items():
        if tensor.dim() != 2:
            tensors[name] = tensor
            continue
        scales = tensor.detach().abs().amax(1).clamp(min=1e-20) / LEVELS
        tensors[name], tensors[name + SCALES] = (tensor / scales[:, None]).round().to(torch.int8), scales
    write_weights(path, tensors)
