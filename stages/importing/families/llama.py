"""Llama and those that have its layers: SmolLM2, TinyLlama."""

from onesweep.stages.importing.families.base import ModelFamily

LLAMA = ModelFamily("LlamaForCausalLM")
