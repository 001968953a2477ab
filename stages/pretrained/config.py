"""What a Hugging Face config.json says of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.errors import CheckpointError, ShapeError
from stages.llama.architecture import Bias, LlamaArchitecture, RopeScaling
from stages.pretrained.source import SUPPORTED

DEFAULT_THETA, DEFAULT_WINDOW = 10000.0, 4096
"""What `transformers` takes where a file does not say."""


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
        attention_bias=_bias(config, family),
    )


def _positions(config: Mapping[str, Any], family: str) -> int:
    """Within a sliding window every position sees all before it, so that is as far as we go."""
    positions: int = config["max_position_embeddings"]
    slides = config.get("use_sliding_window", False) if family == "Qwen2ForCausalLM" else family == "MistralForCausalLM"
    window = config.get("sliding_window", DEFAULT_WINDOW) if slides else None
    return positions if window is None else min(positions, window)


def _bias(config: Mapping[str, Any], family: str) -> Bias:
    if family == "Qwen2ForCausalLM":
        return "qkv"
    return "all" if config.get("attention_bias") else "none"


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
