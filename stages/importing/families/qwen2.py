"""Qwen 2 and 2.5: a bias on queries, keys and values; a window on the last layers, if it is switched on."""

from typing import Any

from onesweep.stages.importing.families.base import Config, ModelFamily, every_layer, sliding_layers, window

# Layers below it see everything.
FIRST_WINDOW_LAYER = 28


def late_window(config: Config) -> dict[str, Any]:
    """The option of a window that only later layers have."""
    if not config.get("use_sliding_window"):
        return {}
    late = (i for i in every_layer(config) if i >= config.get("max_window_layers", FIRST_WINDOW_LAYER))
    return window({"sliding_window": 4096, **config}, sliding_layers(config, late))


QWEN2 = ModelFamily(
    "Qwen2ForCausalLM", gguf="qwen2", options=lambda config: {"attention_bias": "qkv", **late_window(config)}
)
