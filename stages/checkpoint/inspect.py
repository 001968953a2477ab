"""Contents of a checkpoint, for people and scripts; checks that it loads."""

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import check_size, load_part, new_part
from stages.checkpoint.files import read_companion
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError
from stages.model.few_bits import GroupedLinear
from stages.model.llama import LlamaStage
from stages.progress import aligned

SHORT = 12  # hexadecimal digits of a digest shown to people: as many as in a file's name
INDENT = 14


@dataclass(frozen=True)
class Check:
    """Result of loading a part (its digest, its shapes, its losses on the probe text), or a file next to them."""

    model: str
    what: str
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    def __str__(self) -> str:
        return f"{self.model} {self.what}: {self.error or 'ok'}"


def record(directory: Path) -> dict[str, Any]:
    """Name of each model in a bundle (or a single checkpoint) -> its manifest's contents. Raises CheckpointError."""
    return {name: _record(path, read_manifest(path)) for name, path in find_bundle(directory).models.items()}


def describe(directory: Path) -> str:
    """`record` as text for people."""
    return "\n\n".join(_describe(name, model) for name, model in record(directory).items())


def verify(directory: Path) -> list[Check]:
    """Load every part of every model, one at a time, and read the files next to them."""
    checks = []
    for name, path in find_bundle(directory).models.items():
        manifest = read_manifest(path)
        checks += [_check(name, f"part {i}", partial(load_part, path, i)) for i in range(len(manifest.parts))]
        checks += [_check(name, file, partial(read_companion, path, manifest, file)) for file in manifest.files]
    return checks


def _check(model: str, what: str, load: Callable[[], object]) -> Check:
    try:
        load()
    except CheckpointError as error:
        return Check(model, what, str(error))
    return Check(model, what)


def _record(directory: Path, manifest: Manifest) -> dict[str, Any]:
    whole = json.loads(manifest.to_json())
    counts, twice = _parameter_counts(directory, manifest)
    for part, count in zip(whole["parts"], counts, strict=True):
        if part is not None:
            part["parameters"] = count
            part["here"] = (directory / part["file"]).is_file()
    return {
        **whole,
        "digest": manifest.digest(),
        "parameters": sum(counts) - twice,
        "untrained": [i for i, part in enumerate(manifest.parts) if part is None],
    }


def _parameter_counts(directory: Path, manifest: Manifest) -> tuple[list[int], int]:
    """Parameters of each part, and how many of them the model stores in two: a head tied to the embedding."""
    modules = [new_part(manifest, i) for i in range(len(manifest.parts))]
    for part, made in zip(manifest.parts, modules, strict=True):
        if part is not None:
            check_size(directory, part, made)
    last = modules[-1]
    head = last.head if isinstance(last, LlamaStage) and last.architecture.tied_head else None
    return list(map(_parameters, modules)), _parameters(head) if head else 0


def _parameters(module: nn.Module) -> int:
    # matrices of few bits are not parameters of the module
    quantised = [each for each in module.modules() if isinstance(each, GroupedLinear)]
    return sum(map(torch.numel, module.parameters())) + sum(each.in_features * each.out_features for each in quantised)


def _describe(name: str, model: dict[str, Any]) -> str:
    noun = "blocks" if model["kind"] == "chain" else "stages"
    untrained = ", ".join(map(str, model["untrained"]))
    rows = {
        "model": f"{name} ({model['kind']}, format {model['format']})",
        "digest": model["digest"],
        "complete": f"no: {noun} {untrained} have no weights yet" if untrained else "yes",
        "architecture": _wrap(_pairs(model["architecture"])),
        "parameters": f"{model['parameters']:,}",
        noun: "\n".join(aligned([["", "parameters", "bytes", "sha256", "file", "on the probe"], *_part_rows(model)])),
    }
    rows |= {key: _wrap(_pairs(model[key])) for key in ("codes", "partition", "tokenizer") if model.get(key)}
    rows |= {
        "data": _wrap(_pairs(model["data"])),
        "training": _wrap(_pairs(model["training"])),
        "losses": "\n".join(_wrap(f"{what}: {_pairs(losses)}") for what, losses in model["metrics"].items()) or "none",
    }
    return "\n".join(f"{label:<{INDENT}}{textwrap.indent(text, ' ' * INDENT)[INDENT:]}" for label, text in rows.items())


def _part_rows(model: dict[str, Any]) -> list[list[str]]:
    return [
        [str(i), "-", "-", "-", "no weights yet", "-"]
        if part is None
        else [
            str(i),
            f"{part['parameters']:,}",
            f"{part['bytes']:,}",
            part["sha256"][:SHORT],
            part["file"] if part["here"] else f"{part['file']} (missing)",
            _pairs(part["probe"]),
        ]
        for i, part in enumerate(model["parts"])
    ]


def _pairs(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_pairs(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list):
        return " ".join(map(_pairs, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
