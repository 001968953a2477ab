"""Contents of a checkpoint, for people and scripts; checks that it loads, and that it is what it was imported from."""

import contextlib
import io
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import check_size, load_part, load_stage, new_part, read_companion
from stages.checkpoint.gate import probe_tokens
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError, InputError, OnesweepError
from stages.model.architecture import LlamaArchitecture
from stages.model.layers import GroupedLinear

SHORT = 12  # hexadecimal digits of a digest that are shown to people: as many as in a file's name
INDENT = 14


@dataclass(frozen=True)
class Check:
    """Result of loading a part (its digest, its shapes, its losses on the probe text), or a file beside them."""

    model: str
    what: str
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    def __str__(self) -> str:
        return f"{self.model} {self.what}: {self.error or 'ok'}"


def record(directory: Path) -> dict[str, Any]:
    """Name of each model in a bundle (or a single checkpoint) -> what its manifest says. Raises CheckpointError."""
    return {name: _record(path, read_manifest(path)) for name, path in _models(directory).items()}


def describe(directory: Path) -> str:
    """`record` for people."""
    return "\n\n".join(_describe(name, model) for name, model in record(directory).items())


def verify(directory: Path) -> list[Check]:
    """Load every part of every model, one at a time, and read what lies beside them."""
    checks = []
    for name, path in _models(directory).items():
        manifest = read_manifest(path)
        for i in range(len(manifest.parts)):
            what = "router net" if i == manifest.architecture.parts else f"part {i}"
            checks.append(_check(name, what, partial(load_part, path, i)))
        checks += [_check(name, file, partial(read_companion, path, manifest, file)) for file in manifest.files]
    return checks


def _check(model: str, what: str, load: Callable[[], object]) -> Check:
    try:
        load()
    except CheckpointError as error:
        return Check(model, what, str(error))
    return Check(model, what)


def _models(directory: Path) -> dict[str, Path]:
    return {name: path for name, path in vars(find_bundle(directory)).items() if path is not None}


def _record(directory: Path, manifest: Manifest) -> dict[str, Any]:
    whole = json.loads(manifest.to_json())
    counts = _parameter_counts(directory, manifest)
    for part, count in zip(whole["parts"], counts, strict=True):
        if part is not None:
            part["parameters"] = count
            part["here"] = (directory / part["file"]).is_file()
    return {
        **whole,
        "digest": manifest.digest(),
        "parameters": sum(counts),
        "untrained": [i for i, part in enumerate(manifest.parts) if part is None],
    }


def _parameter_counts(directory: Path, manifest: Manifest) -> list[int]:
    modules = [new_part(manifest, i) for i in range(len(manifest.parts))]
    for part, made in zip(manifest.parts, modules, strict=True):
        if part is not None:
            check_size(directory, part, made)
    # their matrices are no parameters
    quantised = [[each for each in module.modules() if isinstance(each, GroupedLinear)] for module in modules]
    return [
        sum(parameter.numel() for parameter in module.parameters())
        + sum(each.in_features * each.out_features for each in found)
        for module, found in zip(modules, quantised, strict=True)
    ]


def _describe(name: str, model: dict[str, Any]) -> str:
    noun = "blocks" if model["kind"] == "chain" else "stages"
    untrained = ", ".join(map(str, model["untrained"]))
    rows = {
        "model": f"{name} ({model['kind']}, format {model['format']})",
        "digest": model["digest"],
        "complete": f"no: {noun} {untrained} not trained yet" if untrained else "yes",
        "architecture": _wrap(_pairs(model["architecture"])),
        "parameters": f"{model['parameters']:,}",
        noun: _table(["", "parameters", "bytes", "sha256", "file", "on the probe"], _part_rows(model)),
    }
    if "codes" in model and model["kind"] == "chain":
        codes = model["codes"]
        rows["codes"] = _pairs({**codes, "digest": codes["digest"][:SHORT]}) if codes else "in each block's file"
    if partition := model["partition"]:
        boundaries = partition["boundaries"]
        sigmas = [[str(i), f"{boundaries[i]:.4g}", f"{boundaries[i + 1]:.4g}"] for i in range(len(boundaries) - 1)]
        prior = f", prior {_pairs(partition['prior'])}" if partition["kind"] == "equal_probability" else ""
        rows["noise"] = f"{partition['kind']}, overlap {partition['overlap']}{prior}"
        rows["ranges"] = _table([noun[:-1] if len(sigmas) > 1 else "", "sigma high", "sigma low"], sigmas)
    if "tokenizer" in model:
        rows["tokenizer"] = model["tokenizer"]
    rows |= {
        "data": _wrap(_pairs(model["data"])),
        "training": _wrap(_pairs(model["training"])),
        "losses": "\n".join(_wrap(f"{what}: {_pairs(losses)}") for what, losses in model["metrics"].items()) or "none",
    }
    return "\n".join(f"{label:<{INDENT}}{textwrap.indent(text, ' ' * INDENT)[INDENT:]}" for label, text in rows.items())


def _part_rows(model: dict[str, Any]) -> list[list[str]]:
    return [
        [str(i), "-", "-", "-", "not trained yet", "-"]
        if part is None
        else [
            str(i),
            f"{part['parameters']:,}",
            f"{part['bytes']:,}",
            part["sha256"][:SHORT],
            part["file"] if part["here"] else f"{part['file']} (not here)",
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


def _table(head: list[str], rows: list[list[str]]) -> str:
    rows = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


TOLERANCE = 1e-3  # most that a logit may differ: float32 has some 1e-6 of the largest, and layers add up


@dataclass(frozen=True)
class SourceComparison:
    """The next token at every place of the probe text, by the imported stages and by `transformers`."""

    places: int
    same: int  # places at which both find the same token the likeliest
    largest_difference: float  # of a logit, over all places

    @property
    def holds(self) -> bool:
        return self.same == self.places and self.largest_difference <= TOLERANCE

    def __str__(self) -> str:
        return (
            f"next tokens as transformers: {self.same} of {self.places}; largest difference of a logit "
            f"{self.largest_difference:.1e} (at most {TOLERANCE:.0e})"
        )


@torch.inference_mode()
def compare_with_source(checkpoint: Path, source: Path) -> SourceComparison:
    """Read the probe text of an imported model with both.

    :param source: the Hugging Face folder or .gguf file that it was imported from. Raises OnesweepError.
    """
    directory = find_bundle(checkpoint).ar
    if directory is None or not isinstance(read_manifest(directory).architecture, LlamaArchitecture):
        raise InputError(f"{checkpoint} has no imported model: --source is for what `onesweep import` makes")
    if not source.exists():
        raise InputError(f"no model at {source}: --source is what was imported, a folder or a .gguf file")
    manifest = read_manifest(directory)
    tokens = probe_tokens(manifest)
    theirs = _transformers_logits(source, tokens)
    vocabulary = manifest.text_architecture.vocabulary
    if theirs.shape[-1] != vocabulary:
        raise InputError(
            f"{source} has {theirs.shape[-1]} tokens, {directory} {vocabulary}: the checkpoint was not imported from it"
        )
    x = tokens
    for index in range(manifest.architecture.parts):
        stage = load_stage(directory, index)
        x = stage.read(x)
    ours = stage.next_byte(x)[0]
    same = int((ours.argmax(dim=1) == theirs.argmax(dim=1)).sum())
    return SourceComparison(len(ours), same, float((ours - theirs).abs().max()))


def _transformers_logits(source: Path, tokens: Tensor) -> Tensor:
    """(places, vocabulary) float32."""
    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError as error:
        raise InputError(
            f"--source needs the package transformers ({error}): pip install 'onesweep[quality]'"
        ) from None
    logging.set_verbosity_error()
    file = {"gguf_file": source.name} if source.is_file() else {}
    directory = source.parent if source.is_file() else source
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), **file, local_files_only=True, dtype=torch.float32
            ).eval()
    except Exception as error:  # of any type: the package has none of its own for it
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise OnesweepError(f"transformers cannot read {source}: {reason}") from None
    logits: Tensor = model(tokens).logits[0]
    return logits
