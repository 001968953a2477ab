"""A Hugging Face folder: config.json, safetensors with or without an index, tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onesweep.stages.errors import CheckpointError, ShapeError
from onesweep.stages.importing.source import SUPPORTED, Shape, Source, Speech, end_tokens, licence_texts, read_text
from onesweep.stages.model.llama import LlamaArchitecture, RopeScaling

# What a Hugging Face config.json says of a model.
DEFAULT_THETA, DEFAULT_WINDOW = 10000.0, 4096  # what `transformers` takes where a file does not say


def architecture_of(config: Mapping[str, Any]) -> LlamaArchitecture:
    """The shape of a model, with all layers in one stage. Raises CheckpointError for what is not supported."""
    family = _family(config)
    try:
        return _architecture(config, family)
    except KeyError as error:
        raise CheckpointError(f"config.json does not say {error.args[0]}") from None
    except (TypeError, ValueError, ArithmeticError, ShapeError) as error:
        raise CheckpointError(f"config.json cannot be read: {error}") from None


def _family(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [None]
    family = named[0] if isinstance(named, list) else named
    if family not in SUPPORTED:
        raise CheckpointError(f"the architecture {family} is not supported; there are {', '.join(SUPPORTED)}")
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantised safetensors (quantization_config) are not read: import the model unquantised, or as GGUF"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"the activation {activation!r} is not supported; there is silu")
    if config.get("mlp_bias"):
        raise CheckpointError("a bias in the MLP (mlp_bias) is not supported")
    return str(family)


def _architecture(config: Mapping[str, Any], family: str) -> LlamaArchitecture:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return LlamaArchitecture(
        layers=(config["num_hidden_layers"],),
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or width // heads,
        mlp_width=config["intermediate_size"],
        positions=_positions(config, family),
        vocabulary=config["vocab_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or DEFAULT_THETA),
        rope_scaling=_scaling(rope),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        attention_bias="qkv" if family == "Qwen2ForCausalLM" else "all" if config.get("attention_bias") else "none",
    )


def _positions(config: Mapping[str, Any], family: str) -> int:
    """Within a sliding window every position sees all before it, so that is as far as we go."""
    positions: int = config["max_position_embeddings"]
    slides = config.get("use_sliding_window", False) if family == "Qwen2ForCausalLM" else family == "MistralForCausalLM"
    window = config.get("sliding_window", DEFAULT_WINDOW) if slides else None
    return positions if window is None else min(positions, window)


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"rotary scaling {kind!r} is not supported; there are none and 'llama3'")
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        rope["original_max_position_embeddings"],
    )


MAX_JSON_BYTES = 64 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "attention_out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "mlp_out",
}
_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")  # tables that old files store and that are computed anyway


class HuggingFaceSource(Source):
    """Raises CheckpointError for a folder that holds no supported model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / "config.json")
        self.architecture = architecture_of(config)
        self._files = self._find()
        self.speech = _speech(folder, config, self.architecture.vocabulary)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "unknown")
        self.about = {"source": folder.resolve().name, "format": "safetensors", "dtype": dtype}

    def shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as tensors:
                names = [name for name in tensors.keys() if not _UNUSED.search(name)]  # noqa: SIM118
                if unlisted := [name for name in names if our_name(name) not in self._files]:
                    raise CheckpointError(f"{self.folder / INDEX} does not list {unlisted[0]}, which is in {file}")
                found |= {our_name(name): tuple(tensors.get_slice(name).get_shape()) for name in names}
        return found

    def read(self, name: str) -> Tensor:
        file, theirs = self._files[name], self._names[name]
        with self._open(file) as tensors:
            try:
                tensor: Tensor = tensors.get_tensor(theirs)
            except SafetensorError as error:
                raise CheckpointError(f"{self.folder / file}: tensor {theirs} cannot be read ({error})") from None
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.folder / file}: tensor {theirs} is {tensor.dtype}, not a floating-point one")
        return tensor.to(torch.float32)

    def _find(self) -> dict[str, str]:
        """File of each tensor, by our name."""
        self._names: dict[str, str] = {}
        if (self.folder / INDEX).is_file():
            places = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(_is_plain(file) for file in places.values()):
                raise CheckpointError(f"{self.folder / INDEX} has no weight_map of files in the same folder")
            if missing := sorted({file for file in places.values() if not (self.folder / file).is_file()}):
                count = len(set(places.values()))
                raise CheckpointError(f"{len(missing)} of {count} shards are missing: {', '.join(missing[:8])}")
        elif (self.folder / SINGLE).is_file():
            with self._open(SINGLE) as tensors:
                places = dict.fromkeys(tensors.keys(), SINGLE)
        else:
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}: only safetensors are read, pickled weights never"
            )
        self._names = {our_name(name): name for name in places if not _UNUSED.search(name)}
        return {ours: places[theirs] for ours, theirs in self._names.items()}

    def _open(self, file: str) -> Any:  # noqa: ANN401
        try:
            return safe_open(self.folder / file, "pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read ({error}); fetch it again") from None


def our_name(name: str) -> str:
    """A tensor's name in a folder -> ours; unknown ones stay."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match and match[2] in _LAYER:
        return f"layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is over {MAX_JSON_BYTES} bytes")
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return record


def _speech(folder: Path, config: dict[str, Any], vocabulary: int) -> Speech:
    read_json(folder / "tokenizer.json")  # says what is wrong with it, if anything
    settings = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
    generation = read_json(path) if (path := folder / "generation_config.json").is_file() else {}
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    template = folder / "chat_template.jinja"
    return Speech(
        read_text(folder / "tokenizer.json"),
        read_text(template) if template.is_file() else _template(settings.get("chat_template")),
        {
            "bos_token": _content(settings.get("bos_token")),
            "eos_token": _content(settings.get("eos_token")),
            "end_tokens": end_tokens(ends if isinstance(ends, list) else [ends], vocabulary),
        },
        licence_texts(folder),
    )


def _template(setting: object) -> str:
    """The chat template; of several, the one called default."""
    if isinstance(setting, list):
        named = [each for each in setting if isinstance(each, dict) and each.get("name") == "default"]
        setting = named[0].get("template") if named else None
    return setting if isinstance(setting, str) else ""


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", file) is not None
