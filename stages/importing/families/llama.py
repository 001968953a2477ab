"""Llama and those that have its layers (SmolLM2, TinyLlama), and Mistral, whose layers have a window, too. In GGUF both
are called llama."""

from onesweep.stages.importing.families.base import ModelFamily, every_layer, window

LLAMA = ModelFamily("LlamaForCausalLM")
MISTRAL = ModelFamily(
    "MistralForCausalLM",
    gguf="llama",
    options=lambda config: window(config, every_layer(config)),
    defaults={"sliding_window": 4096},
    interleaved=True,
)
