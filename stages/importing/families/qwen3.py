"""Qwen 3: each head's queries and keys are normed before they are rotated."""

from onesweep.stages.importing.families.base import GGUF_QK_NORM, GGUF_TENSORS, QK_NORM, TENSORS, ModelFamily
from onesweep.stages.importing.families.qwen2 import late_window

QWEN3 = ModelFamily(
    "Qwen3ForCausalLM",
    gguf="qwen3",
    tensors=TENSORS | QK_NORM,
    gguf_tensors=GGUF_TENSORS | GGUF_QK_NORM,
    options=lambda config: {"qk_norm": "head", **late_window(config)},
    defaults={"head_dim": 128},
)
