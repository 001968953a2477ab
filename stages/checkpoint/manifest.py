"""The manifest of a checkpoint: everything that defines a model except its weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from stages.errors import CheckpointError, ConfigError, InputError, MissingCheckpoint, ShapeError, regular
from stages.limits import MAX_NESTING, nesting
from stages.model.architecture import (
    CONTEXT,
    PICTURES,
    VOCABULARY,
    Architecture,
    LlamaArchitecture,
    PictureArchitecture,
    TextArchitecture,
    drop_defaults,
)
from stages.model.partition import LogNormalPrior, NoisePartition
from stages.model.randomness import Codes
from stages.settings import as_written, from_toml

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20

TOKENIZER_NAME = "tokenizer.json"
MAX_FILES = 16
MAX_PROBE_TOKENS = 4096
MAX_CODES = 1 << 24  # numbers in a table of codes, which is computed when a manifest is read

Kind = Literal["chain", "ar", "steps"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AnyArchitecture = TextArchitecture | PictureArchitecture


@dataclass(frozen=True)
class Part:
    """The file of one block (chain) or one stage (AR)."""

    file: str
    sha256: str
    bytes: int
    probe: dict[str, float]  # the gate's measures when the part was saved: name -> value


@dataclass(frozen=True)
class Manifest:
    """`kind` is `chain` (blocks with noise ranges), `ar` (text stages, trained end to end) or `steps` (picture stages,
    likewise)."""

    kind: Kind
    architecture: AnyArchitecture
    parts: tuple[Part | None, ...]
    codes: Codes | None = None  # only of a chain
    partition: NoisePartition | None = None
    probe_text: str = ""
    # How far a measure of the gate may be from the recorded one: nats, or relative error for hidden states.
    probe_tolerance: float = 0.02
    tokenizer: str = "bytes"  # kind of tokens: `bytes`, or `tokens` of the file tokenizer.json
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    # The probe text in tokens, if the model reads tokens, so loading weights needs no tokenizer.
    probe_tokens: tuple[int, ...] = ()
    # Other files of a token model, next to the manifest: file name -> SHA-256. The tokenizer, the chat template,
    # texts of the licence.
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        record: dict[str, Any] = {"format": FORMAT, **self._record()}
        if self.codes is not None:
            record["codes"]["digest"] = self.codes.digest()
        return json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n"

    def digest(self) -> str:
        """Identifies the weights: SHA-256 over kind, architecture, codes, partition and the parts' own digests.

        It excludes losses and notes about the data, so adding a measurement does not make another model.
        """
        record = self._record()
        named = ("kind", "architecture", "codes", "partition", "tokenizer", "files")
        identity = {key: record[key] for key in named if key in record}
        identity["parts"] = [part.sha256 if part else None for part in self.parts]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _record(self) -> dict[str, Any]:
        """All fields as JSON values, without defaults: tokens that are bytes, and unused options."""
        record = asdict(self)
        drop_defaults(record["architecture"])
        if isinstance(self.architecture, Architecture):
            record["architecture"]["context"] = CONTEXT
        if isinstance(self.architecture, PictureArchitecture):
            del record["codes"], record["probe_text"], record["probe_tokens"], record["tokenizer"], record["files"]
        elif self.tokenizer == "bytes":
            del record["probe_tokens"], record["files"]
            record["architecture"].pop("vocabulary", None)
            if self.codes is not None:
                del record["codes"]["size"]
        return record

    @cached_property
    def picture_architecture(self) -> PictureArchitecture:
        """Architecture of a picture model. Raises CheckpointError for a text model."""
        if not isinstance(self.architecture, PictureArchitecture):
            raise CheckpointError("this is a text model: it cannot draw")
        return self.architecture

    @property
    def tokens(self) -> tuple[str, int, str | None]:
        """Kind and number of the tokens, and the digest of their tokenizer: equal for models with the same tokens."""
        return self.tokenizer, self.text_architecture.vocabulary, self.files.get(TOKENIZER_NAME)

    @cached_property
    def text_architecture(self) -> TextArchitecture:
        """Architecture of a text model. Raises CheckpointError for a picture model."""
        if isinstance(self.architecture, PictureArchitecture):
            raise CheckpointError("this is a picture model: it cannot write")
        return self.architecture

    @property
    def draws(self) -> bool:
        """True for a picture model."""
        return isinstance(self.architecture, PictureArchitecture)

    @cached_property
    def own_architecture(self) -> Architecture:
        """Architecture of a model that was trained here. Raises CheckpointError for a pretrained one."""
        if not isinstance(self.text_architecture, Architecture):
            raise CheckpointError("this is a pretrained model: only models trained from scratch are accepted here")
        return self.text_architecture

    @property
    def probe(self) -> Sequence[int]:
        """The probe text as the model's tokens, cut to the context."""
        whole = self.probe_text.encode() if self.tokenizer == "bytes" else self.probe_tokens
        return whole[: self.text_architecture.positions]

    def with_part(self, index: int, part: Part) -> Manifest:
        """The same model with one part added or replaced."""
        return replace(self, parts=(*self.parts[:index], part, *self.parts[index + 1 :]))

    @property
    def complete(self) -> bool:
        return all(part is not None for part in self.parts)


def read_manifest(directory: Path) -> Manifest:
    """Read and validate `directory`/manifest.json. Raises CheckpointError."""
    path = directory / MANIFEST_NAME
    return _parse(read_json(path, f"no checkpoint in {directory}: {MANIFEST_NAME} is missing"), path)


def read_json(path: Path, missing: str = "", max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError. :param missing: message if there is no checkpoint."""
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path} has more than {max_bytes} bytes: it is not a {path.name}")
        record = json.loads(regular(path).read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
    except (FileNotFoundError, NotADirectoryError):
        raise (MissingCheckpoint(missing) if missing else CheckpointError(f"{path} is missing")) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold an object")
    if nesting(record) > MAX_NESTING:
        raise CheckpointError(f"{path} is damaged: its objects and lists are nested more than {MAX_NESTING} deep")
    return record


def _finite(literal: str) -> float:
    """A finite number. JSON's grammar has no NaN or Infinity, but Python's reader accepts them, and 1e999 too."""
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal} is not a finite number")
    return value


def _parse(record: dict[str, Any], path: Path) -> Manifest:
    if type(record.get("format")) is not int:
        raise CheckpointError(f"{path} has no format number: it is not an onesweep manifest")
    if record["format"] != FORMAT:
        advice = "upgrade onesweep" if record["format"] > FORMAT else "export it again with this version"
        raise CheckpointError(f"{path} has format {record['format']}, this version reads {FORMAT}: {advice}")
    try:
        return _build(record)
    except (CheckpointError, InputError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; fetch it again") from None


_NOUNS: dict[type, str] = {dict: "an object", float: "a number", int: "a whole number", list: "a list", str: "a string"}


def _get(record: dict[str, Any], name: str, kind: type) -> Any:  # noqa: ANN401 - of this kind
    """A field of one of the manifest's objects. Raises ConfigError if it is missing, or of another kind."""
    if name not in record:
        raise ConfigError(f"{name} is missing")
    if type(value := record[name]) not in ({int, float} if kind is float else {kind}):
        raise ConfigError(f"{name} must be {_NOUNS[kind]}, not {as_written(value)}")
    return value


def _build(record: dict[str, Any]) -> Manifest:
    kind, shape = _get(record, "kind", str), _get(record, "architecture", dict)
    draws = shape.get("family") == PICTURES
    if kind not in KINDS:
        raise CheckpointError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if kind == ("ar" if draws else "steps"):
        raise CheckpointError(f"kind {kind!r} is for {'text' if draws else 'picture'} models")
    drawing = from_toml(PictureArchitecture, shape, "architecture") if draws else None
    architecture: AnyArchitecture = drawing or read_architecture(shape)
    parts = tuple(None if part is None else _part(part) for part in _get(record, "parts", list))
    if len(parts) != (count := architecture.parts):
        raise CheckpointError(f"{len(parts)} parts listed, but the architecture has {count}")
    text = {} if isinstance(architecture, PictureArchitecture) else _text(kind, architecture, parts, record)
    partition = None
    if kind == "chain" or draws:  # each block of a chain has its own range; all other nets share all noise levels
        noise, ranges = _get(record, "partition", dict), architecture.parts if kind == "chain" else 1
        prior = from_toml(LogNormalPrior, _get(noise, "prior", dict), "noise partition")
        partition = from_toml(NoisePartition, {**noise, "prior": prior}, "noise partition")
        if len(partition.boundaries) != ranges + 1:
            raise CheckpointError(f"{len(partition.boundaries)} boundaries for {ranges} noise ranges")
    return Manifest(kind, architecture, parts, partition=partition, **_notes(record), **text)


def read_architecture(record: Mapping[str, Any]) -> TextArchitecture:
    """The architecture in a manifest's JSON object, of any family. Raises InputError."""
    if "family" in record:
        return LlamaArchitecture.from_record(record)
    names = [*(f.name for f in fields(Architecture) if f.name != "vocabulary"), "context"]  # bytes need no vocabulary
    if missing := [name for name in names if name not in record]:
        raise ShapeError(f"architecture: {', '.join(missing)} missing")
    sizes = dict(record)
    if (context := sizes.pop("context")) != CONTEXT:
        words = f"context must be {CONTEXT!r}, not {as_written(context)}: every block reads the text"
        raise ShapeError(f"architecture: {words}")
    return from_toml(Architecture, sizes, "architecture")


def _text(
    kind: Kind, architecture: TextArchitecture, parts: tuple[Part | None, ...], record: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a text model."""
    found = {name: _get(record, name, str) for name in ("probe_text", "tokenizer")}
    is_pretrained = isinstance(architecture, LlamaArchitecture)
    if kind == "chain" and is_pretrained:
        raise CheckpointError("a pretrained model is an AR pipeline, not a chain of blocks")
    if record["tokenizer"] not in ("bytes", "tokens"):
        raise CheckpointError(f"tokenizer {record['tokenizer']!r} is neither 'bytes' nor 'tokens'")
    if record["tokenizer"] == "bytes" and (is_pretrained or architecture.vocabulary != VOCABULARY):
        raise CheckpointError(f"tokenizer 'bytes' has {VOCABULARY} tokens, the architecture {architecture.vocabulary}")
    if len(record["probe_text"].encode()) < 2:
        raise CheckpointError("the probe text must have at least two bytes, or the gate checks nothing")
    if kind == "chain" and isinstance(architecture, Architecture):
        found["codes"] = _codes(_get(record, "codes", dict), architecture, parts)
    if record["tokenizer"] == "tokens":
        found["probe_tokens"] = _probe_tokens(_get(record, "probe_tokens", list), architecture.vocabulary)
        found["files"] = _files(_get(record, "files", dict))
    return found


def _notes(record: dict[str, Any]) -> dict[str, Any]:
    if not 0 < _get(record, "probe_tolerance", float) <= 1:
        raise CheckpointError(f"probe tolerance {record['probe_tolerance']} must be above 0 and at most 1")
    notes = {name: _get(record, name, dict) for name in ("data", "training", "metrics")}
    for name, found in notes["metrics"].items():
        if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
            raise CheckpointError(f"metrics of {name} must map names to numbers, not {found!r}")
    return {"probe_tolerance": record["probe_tolerance"], **notes}


def _probe_tokens(tokens: list[int], vocabulary: int) -> tuple[int, ...]:
    if not 2 <= len(tokens) <= MAX_PROBE_TOKENS:
        raise CheckpointError(f"the probe must have 2 to {MAX_PROBE_TOKENS} tokens, not {len(tokens)}")
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise CheckpointError(f"the probe's tokens must be whole numbers from 0 to {vocabulary - 1}")
    return tuple(tokens)


def _files(files: dict[str, str]) -> dict[str, str]:
    if TOKENIZER_NAME not in files or len(files) > MAX_FILES:
        raise CheckpointError(
            f"a model with tokens must list {TOKENIZER_NAME}, and at most {MAX_FILES} files besides its weights"
        )
    for name in files:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == MANIFEST_NAME:
            raise CheckpointError(f"file {name!r} must be a plain name in the same directory")
        if not re.fullmatch(r"[0-9a-f]{64}", _get(files, name, str)):
            raise CheckpointError(f"file {name!r} needs its SHA-256")
    return files


def _part(record: object) -> Part:
    part = from_toml(Part, record, "an entry of parts")
    if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", part.file):
        raise CheckpointError(f"part file {part.file!r} must be a plain .safetensors name in the same directory")
    if part.bytes < 1 or not re.fullmatch(r"[0-9a-f]{64}", part.sha256):
        raise CheckpointError(f"part file {part.file!r} needs its size in bytes and its SHA-256")
    if not isinstance(part.probe, dict) or not all(isinstance(value, int | float) for value in part.probe.values()):
        raise CheckpointError(f"part file {part.file!r}: the probe's measures must be numbers")
    return part


def _codes(record: dict[str, Any], architecture: Architecture, parts: tuple[Part | None, ...]) -> Codes:
    a = architecture
    codes = Codes(_get(record, "seed", int), _get(record, "dim", int), a.vocabulary)
    if codes.dim != a.code_dim:
        raise CheckpointError(f"codes have {codes.dim} dimensions, but the architecture has {a.code_dim}")
    # both inputs of codes and both heads, in 16 bits: smaller files are refused before the table is computed
    least = 4 * a.width * (a.code_dim + a.vocabulary)
    if codes.dim * codes.size > MAX_CODES or any(part is not None and part.bytes < least for part in parts):
        what = f"{codes.size} codes of {codes.dim} dimensions"
        raise CheckpointError(f"{what}: the limit is {MAX_CODES} numbers, and block files have at least {least} bytes")
    if codes.digest() != (digest := _get(record, "digest", str)):
        raise CheckpointError(f"codes from seed {codes.seed} do not have the recorded digest {digest[:12]}")
    return codes
