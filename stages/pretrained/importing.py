"""An import from beginning to end: read what it is, check it, cut it, write it stage by stage."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from stages.checkpoint import save_stage, write_manifest
from stages.errors import InputError
from stages.llama.architecture import LlamaArchitecture
from stages.llama.stage import LlamaStage
from stages.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.memory import require_memory
from stages.new_directory import new_directory, require_new
from stages.pretrained.cut import cut, stage_cost
from stages.pretrained.gate import check_loss
from stages.pretrained.gguf_file import GgufSource
from stages.pretrained.huggingface import HuggingFaceSource
from stages.pretrained.source import EMBEDDING, HEAD, NORM, Source, Speech, expected_shapes
from stages.pretrained.tokens import probe_tokens
from stages.pretrained.variant import joined
from stages.pretrained.walk import layer_tensors
from stages.probe import PROBE_TEXT
from stages.unfilled import without_memory

CHAT_TEMPLATE_NAME, SPECIAL_TOKENS_NAME = "chat_template.jinja", "special_tokens.json"
DEFAULT_CONTEXT = 8192
"""Positions that are kept of a longer context: hosts hold a rotary table of it."""
TEMPORARIES = 3
"""Times the largest tensor that is held beside a stage while one is put together."""


@dataclass(frozen=True)
class ImportSettings:
    source: Path
    """A Hugging Face folder, or a .gguf file."""
    out: Path
    blocks: int
    context: int | None = None
    """Positions to keep; None for the model's own, up to DEFAULT_CONTEXT."""
    is_untrained: bool = False


@dataclass(frozen=True)
class Imported:
    """What came of it."""

    manifest: Manifest
    nats: float
    """Cross-entropy on the probe text, a token."""


def open_source(path: Path) -> Source:
    """Raises InputError or CheckpointError."""
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufSource(path)
    raise InputError(f"{path} is neither a Hugging Face folder (config.json, safetensors) nor a .gguf file")


def import_model(settings: ImportSettings) -> Imported:
    """Make the checkpoint. Raises InputError or CheckpointError, and leaves nothing behind then."""
    require_new(settings.out)
    source = open_source(settings.source)
    source.check()
    architecture = _cut(source.architecture, settings)
    tokens = probe_tokens(source.speech.tokenizer, source.architecture, PROBE_TEXT)  # a short context tells too little
    require_memory(_needed(architecture), f"importing {settings.source}")
    nats = check_loss(source, tokens, settings.is_untrained)
    with new_directory(settings.out) as directory:
        files = _write_files(directory, source.speech)
        nothing = (None,) * architecture.parts
        data, metrics = {**source.about}, {"probe": {"next_token_nats": nats}}
        manifest = Manifest("ar", architecture, nothing, probe_text=PROBE_TEXT, tokenizer="tokens", data=data)
        write_manifest(directory, replace(manifest, metrics=metrics, probe_tokens=tokens, files=files))
        hidden = None
        for index in range(architecture.parts):
            hidden = save_stage(directory, build_stage(source, architecture, index), hidden)
        return Imported(read_manifest(directory), nats)


@torch.inference_mode()
def build_stage(source: Source, architecture: LlamaArchitecture, index: int) -> LlamaStage:
    """One stage, filled from the source. architecture: cut."""
    with without_memory():
        stage = LlamaStage(architecture, index)
    stage.restore_tables()
    tensors = {}
    if stage.is_first:
        tensors["embedding.weight"] = source.tensor(EMBEDDING)
    begin = sum(architecture.layers[:index])
    for i in range(architecture.layers_in(index)):
        layer = joined(layer_tensors(source, begin + i))
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    if stage.is_last:
        tensors["norm.weight"] = source.tensor(NORM)
        if isinstance(stage.head, nn.Linear):
            tensors["head.weight"] = source.tensor(EMBEDDING if architecture.tied_head else HEAD)
    stage.load_state_dict(tensors, assign=True)
    return stage.eval().requires_grad_(False)


def _cut(whole: LlamaArchitecture, settings: ImportSettings) -> LlamaArchitecture:
    """The same model in stages. Raises InputError."""
    context = settings.context or min(whole.positions, DEFAULT_CONTEXT)
    if not 2 <= context <= whole.positions:
        raise InputError(f"--context {context}: the model reads from 2 to {whole.positions} positions")
    return replace(whole, layers=cut(whole, settings.blocks), positions=context)


def _needed(a: LlamaArchitecture) -> int:
    """Bytes that an import takes: the largest stage, and what a tensor takes while it is converted."""
    last = a.parts - 1
    largest = max(stage_cost(a, a.layers_in(i), i == 0, i == last).held for i in range(a.parts))
    tensor = max(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in expected_shapes(a).values())
    return 4 * (largest + TEMPORARIES * tensor)


def _write_files(directory: Path, speech: Speech) -> dict[str, str]:
    """What belongs to the model beside its weights; returns the digests."""
    contents = {TOKENIZER_NAME: speech.tokenizer.encode(), **speech.licences}
    if speech.chat_template:
        contents[CHAT_TEMPLATE_NAME] = speech.chat_template.encode(errors="replace")
    if speech.special_tokens:
        contents[SPECIAL_TOKENS_NAME] = (json.dumps(speech.special_tokens, indent=2) + "\n").encode()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
