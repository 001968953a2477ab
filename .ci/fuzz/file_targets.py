"""Targets that are files: of a checkpoint, a deployment, a training's settings, a model as others publish it."""

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import RopeScalingType
from safetensors.torch import save_file
from target import Target, changed_header, changed_json, changed_metadata

from serving.modes.pretrained_tokenizer import read_pretrained_tokenizer
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
from stages.errors import InputError, OnesweepError
from stages.importing import huggingface
from stages.importing.families import FAMILIES
from stages.importing.gguf_file import GgufSource
from stages.importing.gguf_tokenizer import NAMED, SPLITS, GgufVocabulary, tokenizer_json
from stages.importing.source import expected_shapes, is_matrix
from stages.importing.speech import probe_tokens
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from stages.settings import from_toml, read_toml
from stages.wire.status import StatusError
from tests.fuzz.readers import readers
from tests.stages.importing.published import config_of, letters_metadata, taken_apart, their_name, write_gguf
from tests.stages.model.tiny_llama import tiny_tokenizer
from trainer.blocks.config import TrainingConfig, parse_config

SHAPE = LlamaArchitecture((1,), 32, 4, 2, 8, 32, 64, 300)
MAX_NUMBERS = 1 << 17  # of a tensor in a folder
MAX_TENSORS = 100  # of those that a file describes
# A vocabulary of SentencePiece's kind, and GGUF's numbers for the kinds of its tokens.
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁a", "bc"]
KINDS = [2, 3, 3] + [6] * 256 + [1] * 6
TOML = b'steps = 5\nchunks = [1, 8]\n[architecture]\nwidth = 64\n[noise]\npartition = "equal_probability"\n[rounds]\n'


def read(kind: str) -> Target:
    """The readers of tests/fuzz/readers.py whose names begin so; the first byte of an input chooses one of several."""
    found = [each for each in readers(Path(tempfile.mkdtemp())) if each.name.startswith(kind)]

    def parse(data: bytes) -> None:
        made = found[data[0] % len(found)].read(data[1:])
        if isinstance(made, Manifest):
            made.to_json()
            made.digest()

    seeds = [bytes([i]) + each.sample for i, each in enumerate(found)]
    return Target(parse, seeds, (OnesweepError,), changed_header if kind == "weights" else changed_json, chooses=1)


manifest, weights, topology, files = (partial(read, kind) for kind in ("manifest", "weights", "topology", ""))


def config() -> Target:
    """Settings of a training: as JSON, which a coordinator sends, or as a TOML file; the first byte chooses."""
    path = Path(tempfile.mkdtemp()) / "config.toml"

    def parse(data: bytes) -> None:
        if data[0] < 128:
            made = parse_config(data[1:].decode(errors="replace"), "settings")
            parse_config(json.dumps(asdict(made)), "settings")
        else:
            path.write_bytes(data[1:])
            from_toml(TrainingConfig, read_toml(path), "file", TrainingConfig())

    seeds = [b"\0" + json.dumps(asdict(TrainingConfig())).encode()]
    return Target(parse, [*seeds, b"\xff" + TOML], (InputError,), changed_json, chooses=1)


def gguf() -> Target:
    """A GGUF file, to its last tensor and its tokenizer."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "model.gguf"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        source = GgufSource(path)
        source.check()
        probe_tokens(source.speech.tokenizer, source.architecture, PROBE_TEXT)
        for name in itertools.islice(source.shapes(), MAX_TENSORS):
            source.tensor(name)
        cut = replace(source.architecture, weights="q4", eight_bits=source.wide_matrices())
        for name, size in itertools.islice(source.shapes().items(), MAX_TENSORS):
            if is_matrix(name, size):
                source.parts(name, cut)

    pieces: dict[str, Any] = {
        "tokenizer_model": "llama",
        "token_list": [*PIECES, *(f"<{i}>" for i in range(300 - len(PIECES)))],
        "token_scores": [-float(i) for i in range(300)],
        "token_types": KINDS + [4] * (300 - len(KINDS)),
        "rope_scaling_type": RopeScalingType.LINEAR,
        "rope_scaling_factor": 2.0,
        "sliding_window": 16,
    }

    def seeds() -> Iterator[bytes]:
        tensors, seed = taken_apart(LlamaStage(SHAPE, 0)), folder / "seed.gguf"
        for matrices in ("F32", "Q4_0", "Q4_1"):
            for metadata in (letters_metadata(), pieces):
                yield write_gguf(seed, tensors, SHAPE, metadata=metadata, matrices=matrices).read_bytes()

    return Target(parse, seeds(), (OnesweepError,), changed_metadata)


def folder() -> Target:
    """A Hugging Face folder, as JSON: its files of settings, and the shapes of its tensors."""
    base = Path(tempfile.mkdtemp())
    (base / "tokenizer.json").write_text(tiny_tokenizer(300))
    names = ("config", "tokenizer_config", "generation_config", "special_tokens_map", "added_tokens", "chat_template")
    settings = {name: f"{name}.json" for name in names}
    settings["index"] = huggingface.INDEX

    def parse(data: bytes) -> None:
        try:
            parsed = json.loads(data)
            sizes = dict(parsed["tensors"])
            stored = {name: torch.zeros(size) for name, size in sizes.items() if math.prod(size) <= MAX_NUMBERS}
        except (ValueError, TypeError, LookupError, RuntimeError, RecursionError, OverflowError):
            return  # describes no folder
        for name, file in settings.items():
            (base / file).unlink(missing_ok=True)
            if parsed.get(name) is not None:
                (base / file).write_text(json.dumps(parsed[name]))
        save_file(stored, base / huggingface.SINGLE)
        source = huggingface.HuggingFaceSource(base)
        source.check()
        for name, size in itertools.islice(source.shapes().items(), MAX_TENSORS):
            source.tensor(name)
            if is_matrix(name, size) and size[1] % 32 == 0:
                source.parts(name, replace(source.architecture, weights="q4"))

    def seeds() -> Iterator[bytes]:
        for family in FAMILIES:
            config: dict[str, Any] = {**config_of(SHAPE), "architectures": [family.name], "head_dim": 8}
            config |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
            config |= {"hidden_activation": "gelu_pytorch_tanh"}
            expected = expected_shapes(family.architecture(config))
            sizes = {their_name(name): size for name, size in expected.items() if not name.startswith("layers.")}
            for theirs, ours in family.tensors.items():
                names = [f"layers.0.{each}.weight".replace("*", "0") for each in ours.split()]
                if expected.keys() >= {*names}:
                    rows, *columns = expected[names[0]]
                    rows += sum(expected[name][0] for name in names[1:])
                    sizes[f"model.layers.0.{theirs}.weight".replace("*", "0")] = (rows, *columns)
            yield json.dumps({"config": config, "tensors": sizes, "tokenizer_config": {"eos_token": "x"}}).encode()

    return Target(parse, seeds(), (OnesweepError,), changed_json)


def tokenizer() -> Target:
    """A tokenizer.json, and texts through what it describes."""
    base = Path(tempfile.mkdtemp())
    plain = Manifest("ar", LlamaArchitecture((1,), 32, 2, 1, 8, 32, 64, 300), (None,), probe_tokens=(1, 2))

    def parse(data: bytes) -> None:
        (base / TOKENIZER_NAME).write_bytes(data)
        named = replace(plain, tokenizer="tokens", files={TOKENIZER_NAME: hashlib.sha256(data).hexdigest()})
        made = read_pretrained_tokenizer(base, named)
        text = "the sea,\n  <s> é🚢 12345 </s>"
        tokens = made.encode_piece(text)
        made._encode(text, True)
        reader = made.detokenizer(tokens)
        for token in range(0, 300, 7):
            made.token_text(token)
            reader.feed(made.vocabulary.encode([token]))
        reader.end()

    def seeds() -> Iterator[bytes]:
        yield tiny_tokenizer(300).encode()
        spelled, kinds = [*PIECES, "<x>"], [*KINDS, 4]
        scores = [-float(i) for i in range(len(spelled))]
        numbers = {**dict.fromkeys(NAMED), "bos": 1, "eos": 2, "unknown": 0}
        for pre, model in [*((pre, "gpt2") for pre in SPLITS), ("default", "llama")]:
            parsed = GgufVocabulary(model, pre, spelled, kinds, scores, ["b c"], numbers, True, True, False)
            yield tokenizer_json(parsed).encode()

    return Target(parse, seeds(), (OnesweepError, StatusError), changed_json)
