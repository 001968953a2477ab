"""A published family of pretrained models: its names in files, and the kind of its layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stages.errors import CheckpointError, ShapeError
from stages.model.architecture import (
    MAX_LAYERS,
    Activation,
    LinearScaling,
    LlamaArchitecture,
    RopeScaling,
    SlidingWindow,
    check_whole,
)

Config = Mapping[str, Any]  # settings by their names in config.json; a GGUF file's settings get these names, too

# Tensors of Llama's layers, in safetensors and in GGUF -> ours. If a stored tensor holds several of ours, they are in
# the order of its rows; `*` is the number of an expert, or the first axis if the stored name has none.
TENSORS = {
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
GGUF_TENSORS = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "attention_out",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "mlp_out",
}
QK_NORM = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}
GGUF_QK_NORM = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
EXPERTS = {
    "mlp.gate": "router",
    "mlp.experts.*.gate_proj": "experts.*.gate",
    "mlp.experts.*.up_proj": "experts.*.up",
    "mlp.experts.*.down_proj": "experts.*.mlp_out",
}
GGUF_EXPERTS = {
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "experts.*.gate",
    "ffn_up_exps": "experts.*.up",
    "ffn_down_exps": "experts.*.mlp_out",
}

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SCALINGS = ("default", "linear", "llama3")
NORMS = ("attention_norm", "attention_after", "mlp_norm", "mlp_after", "q_norm", "k_norm", "norm")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelFamily:
    """Everything in which one family differs from the others."""

    name: str  # in `architectures` of config.json
    gguf: str = ""  # in `general.architecture`; empty if its GGUF files are not supported
    is_mixture: bool = False  # of experts: distinguishes families with one name in GGUF
    tensors: Mapping[str, str] = field(default_factory=lambda: TENSORS)
    gguf_tensors: Mapping[str, str] = field(default_factory=lambda: GGUF_TENSORS)
    # Fields of the architecture that differ from Llama's, from the settings.
    options: Callable[[Config], dict[str, Any]] = lambda _: {}
    # Settings that `transformers` assumes if config.json does not give them.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_theta: float = 10000.0
    activation: tuple[str, str] = ("hidden_act", "silu")  # the setting's name, and its default
    # Settings that a GGUF file omits, derived from the others.
    gguf_settings: Callable[[Config], dict[str, Any]] = lambda _: {}
    offset_norms: bool = False  # safetensors store the weights of norms minus one
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of the width
    interleaved: bool = False  # GGUF has rotary pairs side by side: 0 and 1, 2 and 3

    def architecture(self, config: Config) -> LlamaArchitecture:
        """The shape of a model, with all layers in one stage.

        Raises CheckpointError for unsupported options; ShapeError, KeyError, TypeError, ValueError or ArithmeticError
        for impossible ones.
        """
        config, rope = {**self.defaults, **config}, rope_of(config)
        if config.get("rope_theta") is None:
            config["rope_theta"] = rope.get("rope_theta")
        check_whole("layers of a stage", config["num_hidden_layers"], 1, MAX_LAYERS)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rope_theta"):
            if (value := config.get(name)) is not None and not (isinstance(value, int | float) and value > 0):
                raise ValueError(f"{name} must be a number above 0, not {value!r:.60}")
        width, heads = config["hidden_size"], config["num_attention_heads"]
        if config.get("mlp_bias"):
            raise CheckpointError("a bias in the MLP (mlp_bias) is not supported")
        if (activation := config.get(self.activation[0]) or self.activation[1]) not in ACTIVATIONS:
            known = " and ".join(ACTIVATIONS)
            raise CheckpointError(f"the activation {activation!r} is not supported; supported: {known}")
        fields = {
            "layers": (config["num_hidden_layers"],),
            "width": width,
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or width // heads,
            "mlp_width": config["intermediate_size"],
            "positions": config["max_position_embeddings"],
            "vocabulary": config["vocab_size"],
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "rope_theta": float(config["rope_theta"] or self.rope_theta),
            "rope_scaling": _scaling(rope),
            "tied_head": bool(config.get("tie_word_embeddings", False)),
            "attention_bias": "all" if config.get("attention_bias") else "none",
            "activation": ACTIVATIONS[activation],
        }
        return LlamaArchitecture(**fields | self.options(config))

    def adapted(self, name: str, tensor: Tensor, a: LlamaArchitecture) -> Tensor:
        """A tensor as the layers here need it: folds a family's fixed computations into its weights."""
        kind = name.split(".")[-2]
        if self.scaled_embedding and name == "embedding.weight":
            return tensor * a.width**0.5
        if self.scaled_embedding and a.tied_head and name == "norm.weight":
            return tensor / a.width**0.5  # the tied head multiplies by the embedding, which is scaled
        if a.rotary_dim is not None and kind in ("q", "k", "q_norm", "k_norm"):
            return rotated_in_halves(tensor, a)
        return tensor


@contextmanager
def refused_with(what: str) -> Iterator[None]:
    """A `with` block that makes an architecture: impossible settings raise a CheckpointError that names `what`."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{what} does not give {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, ShapeError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from None


def rotated_in_halves(tensor: Tensor, a: LlamaArchitecture) -> Tensor:
    """Rows of each head, reordered so that number i is paired with i + head_dim / 2, also if the family pairs the first
    `rotary_dim` numbers among themselves and leaves the others alone."""
    assert a.rotary_dim is not None
    turned, still = (list(range(*ends)) for ends in ((a.rotary_dim,), (a.rotary_dim, a.head_dim)))
    pairs, others = len(turned) // 2, len(still) // 2
    order = [*turned[:pairs], *still[:others], *turned[pairs:], *still[others:]]
    return tensor.unflatten(0, (-1, a.head_dim))[:, order].flatten(0, 1)


def rope_of(config: Config, layers: str = FULL) -> dict[str, Any]:
    """Settings of the rotary embedding, for one kind of layer if each kind has its own."""
    given = _within(config, "rope_scaling") | _within(config, "rope_parameters")
    return _within(given, layers) if FULL in given or SLIDING in given else given


def _within(config: Config, name: str) -> dict[str, Any]:
    if not isinstance(found := config.get(name) or {}, dict):
        raise TypeError(f"{name} must be an object of settings, not {found!r:.60}")
    return found


def _scaling(rope: Config) -> RopeScaling | LinearScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        raise CheckpointError(f"rotary scaling {kind!r} is not supported; supported: none, 'linear' and 'llama3'")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(rope, "factor"))
    factor, low, high = (_number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return RopeScaling(factor, low, high, rope["original_max_position_embeddings"])


def _number(rope: Config, name: str) -> Any:  # noqa: ANN401 - what is no number is refused by who gets it
    return float(value) if isinstance(value := rope[name], int) else value


def every_layer(config: Config) -> range:
    """Indices of all layers."""
    return range(config["num_hidden_layers"])


def sliding_layers(config: Config, otherwise: Iterable[int]) -> list[int]:
    """Indices of the layers that slide by `layer_types`, or `otherwise` if that is missing. Raises
    CheckpointError."""
    kinds = config.get("layer_types")
    if kinds is None:
        return list(otherwise)
    if len(kinds) != config["num_hidden_layers"] or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(f"layer_types must list {FULL} or {SLIDING} for each layer")
    return [i for i, kind in enumerate(kinds) if kind == SLIDING]


def window(config: Config, layers: Iterable[int]) -> dict[str, Any]:
    """The option of a sliding window, if there is one."""
    size, numbers = config.get("sliding_window"), tuple(layers)
    return {"window": SlidingWindow(size, numbers)} if size is not None and numbers else {}
