"""A small pretrained model as `import` would leave it: random weights, a tokenizer of its own, a chat template."""

import codecs
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from serving.modes.pretrained_tokenizer import LETTERS
from stages.checkpoint.checkpoint import update_manifest
from stages.checkpoint.manifest import TOKENIZER_NAME
from stages.model.architecture import LlamaArchitecture
from stages.model.llama import LlamaStage
from stages.model.randomness import sample_tokens
from stages.model.vocabulary import Vocabulary
from tests.stages.model.tiny_llama import TINY, write_tiny

ARCHITECTURE: LlamaArchitecture = replace(TINY, vocabulary=300, positions=512)
VOCABULARY = Vocabulary(ARCHITECTURE.vocabulary)
DRAFTER = replace(ARCHITECTURE, layers=(1,))
"""The architecture of a drafter of the same tokens, in one stage."""
SPECIALS = ("<|begin|>", "<|end|>")
TEXTS = [
    "the sea and the ship and the ship and the sea",
    "море и корабль",
    "été à la mer 🚢🌊",
    "the old man said that the sea",
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "{{ bos_token }}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> Tokenizer:
    """Byte-level BPE of all 256 bytes, two special tokens, and some merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE.vocabulary, special_tokens=list(SPECIALS), initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def panicking(**changes: Any) -> str:
    """The file of such a tokenizer, with an expression that gives up on "aaa...b"."""
    file = json.loads(tokenizer().to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, file["pre_tokenizer"]]}
    return json.dumps({**file, **changes})


def ids(text: str) -> list[int]:
    """A text in tokens."""
    return tokenizer().encode(text).ids


def text_of(tokens: list[int]) -> str:
    """As a reader shows it: an incomplete character at the end is not shown."""
    names = {number: name for name, number in tokenizer().get_vocab().items() if name not in SPECIALS}
    raw = bytes(LETTERS[letter] for token in tokens for letter in names.get(token, ""))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw)


def write_model(
    directory: Path,
    ends: Sequence[int] = (),
    seed: int = 0,
    architecture: LlamaArchitecture = ARCHITECTURE,
    template: str = TEMPLATE,
    spelling: str | None = None,
) -> list[LlamaStage]:
    """Make the checkpoint, with that tokenizer if not `spelling`; returns its stages."""
    stages = write_tiny(directory, architecture, seed)
    specials = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "end_tokens": list(ends)}
    contents = {
        TOKENIZER_NAME: spelling or tokenizer().to_str(),
        "chat_template.jinja": template,
        "special_tokens.json": json.dumps(specials),
    }
    for name, content in contents.items():
        (directory / name).write_text(content)
    files = {name: hashlib.sha256(content.encode()).hexdigest() for name, content in contents.items()}
    update_manifest(directory, lambda manifest: replace(manifest, files=files))
    return stages


@torch.inference_mode()
def written(stages: Sequence[LlamaStage], prompt: list[int], count: int, **sampling: Any) -> list[int]:
    """The whole model's text in one process, each token from all before it."""
    tokens = list(prompt)
    for _ in range(count):
        x = torch.tensor([tokens])
        for stage in stages:
            x = stage.read(x)
        logits = stages[-1].next_byte(x[:, -1:])[0]
        tokens += VOCABULARY.tokens(
            sample_tokens(logits, sampling.get("temperature", 0.0), sampling.get("seed", 0), len(tokens))
        )
    return tokens[len(prompt) :]
