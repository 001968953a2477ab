"""A pretrained model in small: random weights, and the checkpoint that an import of it would make."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stages.checkpoint.checkpoint import save_parts, write_manifest
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest
from stages.model.architecture import Experts, LinearScaling, LlamaArchitecture
from stages.model.architecture import SlidingWindow as Window
from stages.model.few_bits import GroupedLinear, QuantLinear, quantised, rounded
from stages.model.llama import LlamaStage

TINY = LlamaArchitecture(
    layers=(2, 1, 1), width=32, heads=4, kv_heads=2, head_dim=12, mlp_width=48, positions=128, vocabulary=300
)
"""Each stage of another size, heads that are not the width, and grouped queries."""
ONE = replace(TINY, layers=(2,), positions=64)
# Differences between families, each in one stage.
OPTIONS: dict[str, LlamaArchitecture] = {
    "norm of each head": replace(ONE, qk_norm="head"),
    "norms after": replace(ONE, qk_norm="projection", norms="after"),
    "a part of a head": replace(ONE, rotary_dim=8, window=Window(5, (0, 1))),
    "norms before and after": replace(
        ONE, norms="both", activation="gelu_tanh", query_scalar=20, attention_softcap=2.0, logit_softcap=3.0
    ),
    "two kinds of layers": replace(ONE, qk_norm="head", query_scalar=20, window=Window(5, (1,), rope_theta=50.0)),
    "capped window": replace(ONE, attention_softcap=2.0, window=Window(5, (0,)), rope_scaling=LinearScaling(4.0)),
    "experts": replace(ONE, experts=Experts(5, 2, True)),
}
PROBE = "The letter left the coast before dawn."


def tiny_tokenizer(vocabulary: int) -> str:
    """tokenizer.json of a byte-level BPE without merges: a byte is a token, the others are <extra_N>."""
    letters = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    extra = [
        {"id": i, "content": f"<extra_{i}>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in range(256, vocabulary)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    parts: dict[str, Any] = {"version": "1.0", "added_tokens": extra, "pre_tokenizer": level, "decoder": level}
    parts |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return json.dumps({**parts, "model": model})


def random_stages(architecture: LlamaArchitecture = TINY, seed: int = 0) -> list[LlamaStage]:
    """Weights so large that every path through the model shows in its output."""
    torch.manual_seed(seed)
    stages = [LlamaStage(architecture, i).eval().requires_grad_(False) for i in range(architecture.parts)]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape))
        for each in stage.modules():
            if isinstance(each, GroupedLinear):
                weight = 0.15 * torch.randn(each.out_features, each.in_features)
                found = quantised(weight) if isinstance(each, QuantLinear) else rounded(weight)
                each.load_state_dict(found, strict=False)
    if architecture.tied_head:
        first, last = stages[0].embedding, stages[-1].head
        last.load_state_dict(first.state_dict(), strict=False)  # a tied head on the same stage has none
    return stages


def write_tiny(directory: Path, architecture: LlamaArchitecture = TINY, seed: int = 0) -> list[LlamaStage]:
    """Make a checkpoint of random weights, whose tokens are bytes; returns its stages."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / TOKENIZER_NAME).write_text(tiny_tokenizer(architecture.vocabulary))
    digest = hashlib.sha256((directory / TOKENIZER_NAME).read_bytes()).hexdigest()
    letters = json.loads((directory / TOKENIZER_NAME).read_text())["model"]["vocab"]
    probe = tuple(letters[{" ": "Ġ"}.get(letter, letter)] for letter in PROBE)
    nothing = (None,) * architecture.parts
    files = {TOKENIZER_NAME: digest}
    write_manifest(
        directory,
        Manifest("ar", architecture, nothing, probe_text=PROBE, tokenizer="tokens", probe_tokens=probe, files=files),
    )
    stages = random_stages(architecture, seed)
    save_parts(directory, stages)
    return stages
