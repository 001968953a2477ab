"""A GGUF file without some metadata is read as llama.cpp's loader reads it, whatever its name, and in parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import torch
from torch import Tensor

from serving.cli.models import _key
from stages.errors import CheckpointError
from stages.importing.gguf_file import GgufSource
from stages.importing.importing import open_source
from stages.importing.source import Source
from stages.importing.speech import open_tokenizer
from stages.model.architecture import LinearScaling
from stages.model.llama import LlamaStage
from tests.stages.importing.published import SHAPE, letters, taken_apart, write_gguf

CONTROL, ADDED = 3, 4
PLAIN, KINDS = [1] * 300, [1] * 256 + [CONTROL] * 44
TURN = {290: "<|im_start|>", 291: "<|im_end|>"}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return taken_apart(LlamaStage(SHAPE, 0))


@pytest.fixture
def source(tensors: dict[str, Tensor], tmp_path: Path) -> Callable[..., Source]:
    """A file of byte-level BPE with little metadata; `names` are of tokens, `more` the metadata of its tokenizer."""

    def make(names: dict[int, str] | None = None, kinds: list[int] | None = KINDS, **more: Any) -> Source:
        spelled = [(names or {}).get(i, token) for i, token in enumerate(letters())]
        more |= {"tokenizer_model": "gpt2", "token_list": spelled} | ({} if kinds is None else {"token_types": kinds})
        return open_source(write_gguf(tmp_path / "model.gguf", tensors, metadata=more))

    return make


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({}, False),
        *(
            ({"tokenizer_pre": pre}, False)
            for pre in ("default", "gpt-2", "smollm", "dbrx", "qwen2", "deepseek-r1-qwen")
        ),
        *(({"tokenizer_pre": pre}, True) for pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")),
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, False),
        ({"tokenizer_pre": "qwen2", "add_bos_token": True}, True),
    ],
)
def test_the_pre_tokenizer_decides_about_bos(source: Callable[..., Source], more: dict[str, Any], begins: bool) -> None:
    made = open_tokenizer(source(bos_token_id=256, **more).speech.tokenizer)
    assert made.encode("a").ids == [256, 64][not begins :]


# Expressions of llama.cpp where a file does not say how text is cut: each cuts what those before it left.
EXPRESSIONS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def test_text_without_a_pre_tokenizer_field_is_split_by_the_old_rules(source: Callable[..., Source]) -> None:
    text = "It's 12345 (or 7)...  x=\ny ² море 🚢!?\n\n  end"
    expected = [text]
    for expression in EXPRESSIONS:
        expected = [piece for each in expected for piece in regex.split(f"({expression})", each) if piece]
    cut = open_tokenizer(source().speech.tokenizer).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == expected


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, set()),  # llama.cpp would take token 11, which is plain text
        ({"kinds": [*PLAIN[:11], CONTROL, *PLAIN[12:]]}, {11}),
        ({"eos_token_id": 257}, {257}),
        ({"eos_token_id": 257, "eot_token_id": 258, "eom_token_id": 259}, {257, 258, 259}),
        ({"eos_token_id": 999, "eot_token_id": 258}, {258}),
        ({"names": {**TURN, 292: "</s>"}}, {291, 292}),
        ({"names": {**TURN, 292: "</s>"}, "kinds": [*KINDS[:290], 1, 1, ADDED, *KINDS[293:]]}, {291}),
        ({"names": TURN, "kinds": None, "eos_token_id": 257}, {257, 291}),
        ({"names": {290: "<EOT>"}, "kinds": PLAIN}, set()),
        ({"names": {290: "<EOT>"}, "kinds": PLAIN, "chat_template": "<EOT>"}, {290}),
    ],
)
def test_end_tokens_are_those_of_llama_cpp(source: Callable[..., Source], more: dict[str, Any], ends: set[int]) -> None:
    speech = source(**more).speech
    assert speech.ends.keys() == ends
    made = open_tokenizer(speech.tokenizer)
    for end in ends:
        assert made.encode(f"a{made.id_to_token(end)}b").ids == [64, end, 65]
        assert made.decode([64, end, 65]) == "ab"


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({}, None),
        ({"rope_scaling_factor": 4.0}, LinearScaling(4.0)),
        ({"float32": ("llama.rope.scale_linear", 2.0)}, LinearScaling(2.0)),
        ({"rope_scaling_factor": 4.0, "float32": ("llama.rope.scale_linear", 2.0)}, LinearScaling(4.0)),
        ({"rope_scaling_factor": 4.0, "rope_scaling_type": gguf.RopeScalingType.NONE}, None),
        ({"rope_scaling_type": gguf.RopeScalingType.LINEAR}, None),
        ({"rope_scaling_factor": 0.0}, None),
    ],
)
def test_a_factor_alone_is_linear_scaling(source: Callable[..., Source], more: dict[str, Any], scaling: object) -> None:
    assert source(**more).architecture.rope_scaling == scaling


@pytest.mark.parametrize(
    ("architecture", "name", "value"),
    [
        ("gemma2", "attention.sliding_window", 4096),
        ("gemma3", "attention.sliding_window", None),
        ("gemma3", "rope.freq_base", 10000.0),
    ],
)
def test_missing_metadata_has_the_default_of_the_architecture(architecture: str, name: str, value: object) -> None:
    silent = GgufSource.__new__(GgufSource)
    silent._name, silent._fields = architecture, {}
    assert silent._metadata_value(name, None) == value


def test_named_chat_templates_are_read(source: Callable[..., Source]) -> None:
    named = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    speech = source(chat_template=(named,)).speech
    assert (speech.chat_template, speech.tool_template) == ("default", "tool_use")
    with pytest.raises(CheckpointError, match="no chat template is named default, only rag, tool_use"):
        source(chat_template=(named[1:],))
    with pytest.raises(CheckpointError, match=r"writes <\|im_start\|>, which is not in the vocabulary"):
        source(names=TURN, kinds=PLAIN, chat_template="<|im_start|>{{ messages }}<|im_end|>")


@pytest.mark.parametrize("name", ["MODEL.GGUF", "0f3a"])
def test_a_gguf_file_is_recognized_by_its_content(tensors: dict[str, Tensor], tmp_path: Path, name: str) -> None:
    assert open_source(write_gguf(tmp_path / name, tensors)).architecture == SHAPE


def test_a_model_in_several_files_is_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    whole = open_source(write_gguf(tmp_path / "whole.gguf", tensors))
    write_gguf(tmp_path / "model.gguf", tensors, max_tensors=15)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        source = open_source(part)
        source.check()
        assert source.speech == whole.speech
        assert all(torch.equal(source.tensor(name), whole.tensor(name)) for name in whole.shapes())
    key = _key(parts[0], 2, None, None, [])
    parts[1].rename(tmp_path / "other")
    assert _key(parts[0], 2, None, None, []) != key, "its second part is another's"
    with pytest.raises(CheckpointError, match=r"missing 1 of 2 parts: model-00002-of-00002.gguf"):
        open_source(parts[0])
    with pytest.raises(CheckpointError, match="is one of 2 files of a model: keep the names"):
        open_source(tmp_path / "other")


def test_sampling_settings_of_a_file_are_the_defaults(source: Callable[..., Source]) -> None:
    defaults = source(sampling_temp=0.5, sampling_min_p=0.25, sampling_top_k=40).speech.sampling
    assert defaults == {"temperature": 0.5, "top_k": 40, "min_p": 0.25}
