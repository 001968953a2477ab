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
from stages.importing.source import TensorNames
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from tests.stages.model.tiny_llama import tiny_tokenizer

SHAPE = LlamaArchitecture(
    layers=(3,), width=32, heads=4, kv_heads=2, head_dim=12, mlp_width=32, positions=256, vocabulary=300
)


def letters() -> list[str]:
    """The letter that stands for each token of the tiny tokenizer, by number."""
    tokenizer = json.loads(tiny_tokenizer(300))
    vocabulary = tokenizer["model"]["vocab"]
    return [*vocabulary, *(token["content"] for token in tokenizer["added_tokens"])]


def fitted(architecture: LlamaArchitecture = SHAPE, steps: int = 110) -> dict[str, Tensor]:
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


their_name = TensorNames("model.layers", _TOP, TENSORS).stored_name  # in a Hugging Face folder
gguf_name = TensorNames("blk", OF_GGUF, GGUF_TENSORS).stored_name


def write_folder(directory: Path, tensors: Mapping[str, Tensor], a: LlamaArchitecture = SHAPE, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({their_name(name): x.contiguous() for name, x in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_of(a) | config))
    (directory / "tokenizer.json").write_text(tiny_tokenizer(a.vocabulary))
    settings = {"chat_template": "{{ messages }}", "bos_token": {"content": "<extra_256>"}, "eos_token": "<extra_257>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "LICENSE").write_text("Do with it what you like.\n")
    return directory


def letters_metadata() -> dict[str, Any]:
    """Metadata of the tiny tokenizer in a GGUF file, by the ends of the writer's methods."""
    metadata = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_list": letters()}
    metadata |= {"token_types": [1] * 256 + [3] * 44, "token_merges": [], "eos_token_id": 257}
    return metadata | {"chat_template": "{{ messages }}"}


def random_blocks(name: str, shape: tuple[int, int], kind: Any) -> Any:
    """Rows in a kind that the package gguf reads and does not write, weights of about 0.02: (rows, bytes) uint8."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(list(name.encode()))
    blocks = random.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    at, scales = (slice(-2, None), [2e-5]) if kind.name == "Q6_K" else (slice(4), [1e-4, 7.5e-4])
    blocks[..., at] = (random.uniform(0.5, 1, (*blocks.shape[:2], 1)) * scales).astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def describe(writer: Any, a: LlamaArchitecture, metadata: Mapping[str, Any]) -> None:
    """Sizes, as GGUF names them, and the file's other metadata: a method's argument, or all of them in a tuple."""
    sizes = {"block_count": a.total_layers, "context_length": a.positions, "embedding_length": a.width}
    sizes |= {"feed_forward_length": a.mlp_width, "head_count": a.heads, "head_count_kv": a.kv_heads}
    sizes |= {"key_length": a.head_dim, "layer_norm_rms_eps": a.norm_epsilon, "rope_freq_base": a.rope_theta}
    for name, value in {**sizes, **metadata}.items():
        getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    a: LlamaArchitecture = SHAPE,
    permuted: bool = True,
    metadata: Mapping[str, Any] | None = None,
    matrices: str | Callable[[str], str] = "F32",
    max_tensors: int = 0,
) -> Path:
    """:param permuted: queries and keys interleaved, as the format wants them.

    :param matrices: quantisation of those in layers, or of all by our names; in those with K, random numbers.

    :param metadata: of its tokenizer, or whatever else; by default of the tiny one.

    :param max_tensors: of a file: a model of more is in several.

    Memory holds one tensor beside those given, which may be without numbers where they are random.
    """
    import gguf

    whole = OF_GGUF.values() if isinstance(matrices, str) else ()

    def stored(name: str) -> tuple[Any, Any]:
        """Its numbers, and their kind."""
        tensor, kind = tensors[name], name.split(".")[-2]
        if permuted and kind in ("q", "k"):
            tensor = interleaved(tensor, a.heads if kind == "q" else a.kv_heads)
        wanted = "F32" if tensor.dim() == 1 or name in whole else matrices
        quantisation = gguf.GGMLQuantizationType[wanted if isinstance(wanted, str) else wanted(name)]
        if quantisation.name.endswith("_K"):
            return random_blocks(name, tensor.shape, quantisation), quantisation
        return gguf.quantize(tensor.numpy(), quantisation), quantisation

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=max_tensors)
    describe(writer, a, letters_metadata() if metadata is None else metadata)
    for name in tensors:
        numbers, kind = stored(name)
        writer.add_tensor_info(gguf_name(name), numbers.shape, numbers.dtype, numbers.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in tensors:
        writer.write_tensor_data(stored(name)[0])
    writer.close()
    return path
