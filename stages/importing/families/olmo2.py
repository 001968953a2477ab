"""OLMo 2: norms after attention and MLP, not before; queries and keys of all heads are normed together."""

from onesweep.stages.importing.families.base import GGUF_QK_NORM, GGUF_TENSORS, QK_NORM, TENSORS, ModelFamily

OLMO2 = ModelFamily(
    "Olmo2ForCausalLM",
    gguf="olmo2",
    tensors=TENSORS
    | QK_NORM
    | {"post_attention_layernorm": "attention_after", "post_feedforward_layernorm": "mlp_after"},
    gguf_tensors=GGUF_TENSORS | GGUF_QK_NORM | {"post_attention_norm": "attention_after", "post_ffw_norm": "mlp_after"},
    options=lambda _: {"qk_norm": "projection", "norms": "after"},
    defaults={"rms_norm_eps": 1e-5},
)
