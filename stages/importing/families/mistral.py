"""Mistral: Llama's layers, each with a sliding window. In GGUF both are called llama."""

from onesweep.stages.importing.families.base import ModelFamily, every_layer, window

MISTRAL = ModelFamily(
    "MistralForCausalLM",
    gguf="llama",
    options=lambda config: window(config, every_layer(config)),
    defaults={"sliding_window": 4096},
    interleaved=True,
)
