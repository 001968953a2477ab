"""Defaults of GGUF files: how llama.cpp's loader takes what a file leaves unsaid."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Sources, in llama.cpp: `load` of src/llama-vocab.cpp for tokenizers, `load_hparams` of src/llama-model.cpp and
# `load_arch_hparams` of src/models/ for the rest. What has no default there must be in a file here, too.


@dataclass(frozen=True)
class TokenizerDefaults:
    """Defaults of one `tokenizer.ggml.model`; numbers beyond the vocabulary are none."""

    ids: Mapping[str, int] = field(default_factory=dict)
    begins: bool = False  # `add_bos_token`
    pre: str = ""  # how text is cut before merging


TOKENIZERS = {
    "llama": TokenizerDefaults({"bos": 1, "eos": 2, "unknown": 0}, begins=True),
    # 11 is a comma in most vocabularies: a token that is plain text is none here
    "gpt2": TokenizerDefaults({"bos": 11, "eos": 11}, pre="default"),
}
# Of `gpt2`, by the way of cutting: those that begin a text with a token all the same.
BEGINNING = ("llama-bpe",)
# Other names of a way of cutting.
SAME_CUT = dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), "llama-bpe")
SAME_CUT |= dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum"), "gpt-2")
SAME_CUT |= dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez"), "qwen2")

# Metadata of the architecture, by their names without it.
METADATA = {"rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
OLDER_NAMES = {"rope.scaling.factor": "rope.scale_linear"}
# By `general.architecture`.
OF_ARCHITECTURE = {"gemma2": {"attention.sliding_window": 4096}}
