"""Models as they are published, in small: the folder and the GGUF file of given weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from stages.checkpoint.gate import PROBE_TEXT
from stages.importing.family import GGUF_TENSORS, TENSORS
from stages.importing.gate import interleaved
from stages.importing.gguf_file import _TOP as OF_GGUF
from stages.importing.huggingface import _TOP
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from tests.stages.model.tiny_llama import tiny_tokenizer

SHAPE = LlamaArchitecture(
    layers=(3,), width=32, heads=4, kv_heads=2, head_dim=12, mlp_width=32, positions=256, vocabulary=300
)
GGUF_NAMES = {ours: theirs for theirs, ours in GGUF_TENSORS.items()}
GGUF_TOP = {ours: theirs for theirs, ours in OF_GGUF.items()}


def letters() -> list[str]:
    """The letter that stands for each token of the tiny tokenizer, by number."""
    tokenizer = json.loads(tiny_tokenizer(300))
    vocabulary = tokenizer["model"]["vocab"]
    return [*vocabulary, *(token["content"] for token in tokenizer["added_tokens"])]


def learnt(architecture: LlamaArchitecture = SHAPE, steps: int = 110) -> dict[str, Tensor]:
    """Weights that know the probe text by heart, by the importer's names. A second or two."""
    torch.manual_seed(0)
    stage = LlamaStage(architecture, 0)
    number = {letter: i for i, letter in enumerate(letters())}
    known = torch.tensor([number[{" ": "Ġ", "\n": "Ċ"}.get(letter, letter)] for letter in PROBE_TEXT])[None]
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = F.cross_entropy(stage.next_byte(stage.read(known))[0, :-1], known[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return taken_apart(stage)


def taken_apart(stage: LlamaStage) -> dict[str, Tensor]:
    """A whole model's tensors by the importer's names."""
    a, tensors = stage.architecture, {}
    for name, tensor in stage.state_dict().items():
        if ".qkv." in name:
            sizes = [a.query_width, *[a.kv_heads * a.head_dim] * 2]
            parts = zip(("q", "k", "v"), tensor.split(sizes), strict=True)
            tensors |= {name.replace("qkv", part): x.clone() for part, x in parts}
        elif ".mlp_in." in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            tensors |= {name.replace("mlp_in", part): x.clone() for part, x in parts}
        else:
            tensors[name] = tensor.clone()
    return tensors


def config_of(a: LlamaArchitecture) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": a.width,
        "num_hidden_layers": sum(a.layers),
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.mlp_width,
        "max_position_embeddings": a.positions,
        "vocab_size": a.vocabulary,
        "rms_norm_eps": a.norm_epsilon,
        "rope_theta": a.rope_theta,
        "tie_word_embeddings": a.tied_head,
        "eos_token_id": 257,
    }


def their_name(name: str) -> str:
    """A tensor's name in a Hugging Face folder."""
    top = {ours: theirs for theirs, ours in _TOP.items()}
    if name in top:
        return top[name]
    _, layer, kind, end = name.split(".")
    theirs = next(theirs for theirs, ours in TENSORS.items() if ours == kind)
    return f"model.layers.{layer}.{theirs}.{end}"


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file."""
    if not name.startswith("layers."):
        return GGUF_TOP[name]
    _, layer, kind, end = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES[kind]}.{end}"


def write_folder(directory: Path, tensors: Mapping[str, Tensor], a: LlamaArchitecture = SHAPE, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({their_name(name): x.contiguous() for name, x in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_of(a) | config))
    (directory / "tokenizer.json").write_text(tiny_tokenizer(a.vocabulary))
    settings = {"chat_template": "{{ messages }}", "bos_token": {"content": "<extra_256>"}, "eos_token": "<extra_257>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "LICENSE").write_text("Do with it what you like.\n")
    return directory


def describe_letters(writer: Any) -> None:
    """The tiny tokenizer, as a GGUF file has it."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters())
    writer.add_token_types([1] * 256 + [3] * 44)
    writer.add_token_merges([])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages }}")


def random_blocks(rows: int, columns: int, kind: Any, seed: int | None = None) -> Any:
    """Rows in a kind that the package gguf reads and does not write, weights of about 0.02: (rows, bytes) uint8."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(rows if seed is None else seed)
    blocks = random.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    at, scales = (slice(-2, None), [2e-5]) if kind.name == "Q6_K" else (slice(4), [1e-4, 7.5e-4])
    blocks[..., at] = (random.uniform(0.5, 1, (*blocks.shape[:2], 1)) * scales).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def describe_shape(writer: Any, a: LlamaArchitecture) -> None:
    """Sizes, as GGUF names them."""
    writer.add_block_count(a.total_layers)
    writer.add_context_length(a.positions)
    writer.add_embedding_length(a.width)
    writer.add_feed_forward_length(a.mlp_width)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.norm_epsilon)
    writer.add_rope_freq_base(a.rope_theta)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    a: LlamaArchitecture = SHAPE,
    permuted: bool = True,
    describe: Callable[[Any], None] = describe_letters,
    matrices: str | Callable[[str], str] = "F32",
    most_tensors: int = 0,
) -> Path:
    """:param permuted: queries and keys interleaved, as the format wants them.

    :param matrices: quantisation of those in layers, of all or by our names; in those with K, random numbers.

    :param describe: writes what the file says of its tokenizer.

    :param most_tensors: of a file: a model of more is in several.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=most_tensors)
    describe_shape(writer, a)
    describe(writer)
    for name, tensor in tensors.items():
        if not name.startswith("layers."):
            writer.add_tensor(gguf_name(name), tensor.numpy())
            continue
        kind = name.split(".")[2]
        if permuted and kind in ("q", "k"):
            tensor = interleaved(tensor, a.heads if kind == "q" else a.kv_heads)
        of_matrix = matrices if isinstance(matrices, str) else matrices(name)
        stored = gguf.GGMLQuantizationType[of_matrix if tensor.dim() == 2 else "F32"]
        is_random = stored.name.endswith("_K")
        numbers = random_blocks(*tensor.shape, stored) if is_random else gguf.quantize(tensor.numpy(), stored)
        writer.add_tensor(gguf_name(name), numbers, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
