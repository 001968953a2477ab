"""Defaults of GGUF files: how llama.cpp's loader takes what a file leaves unsaid."""

# Sources, in llama.cpp: `load` of src/llama-vocab.cpp for tokenizers, `load_hparams` of src/llama-model.cpp and
# `load_arch_hparams` of src/models/ for the rest. What has no default there must be in a file here, too.

# Numbers of tokens by `tokenizer.ggml.model`; those beyond the vocabulary are none, and so is a token of `gpt2` that is
# plain text: 11 is a comma in most vocabularies.
IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
CUT = "default"  # `tokenizer.ggml.pre`, how `gpt2` cuts text before merging
BEGINNING = {"llama", "llama-bpe"}  # models of tokenizers, and ways of cutting, where a text begins with a token
# Other names of a way of cutting.
SAME_CUT = dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), "llama-bpe")
SAME_CUT |= dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum"), "gpt-2")
SAME_CUT |= dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez"), "qwen2")

# Metadata of the architecture, by their names without it.
METADATA = {"rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
OLDER_NAMES = {"rope.scaling.factor": "rope.scale_linear"}
# By `general.architecture`.
OF_ARCHITECTURE = {"gemma2": {"attention.sliding_window": 4096}}
