"""A copy beside its model: how far it is from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from loadtest.workload.texts import local_distance, served_copy
from stages.checkpoint.checkpoint import update_manifest
from stages.model.llama import LlamaStage
from tests.serving.pretrained import ids, write_model


@torch.inference_mode()
def test_a_copy_is_compared_at_the_tokens_it_wrote(tmp_path: Path) -> None:
    prompt, output = "the old man", " said that the sea"

    def log_probs(stages: list[LlamaStage]) -> torch.Tensor:
        x = torch.tensor([ids(prompt + output)])
        for stage in stages:
            x = stage.read(x)
        return stages[-1].next_byte(x)[0, len(ids(prompt)) - 1 : -1].log_softmax(-1)

    p, q = (log_probs(write_model(tmp_path / name, seed=i)) for i, name in enumerate(("", "local")))
    found = local_distance(tmp_path, [(prompt.encode(), output.encode())])
    assert found["kl_nats"] == pytest.approx(float(F.kl_div(q, p, reduction="batchmean", log_target=True)), rel=1e-3)
    assert found["agreement"] == pytest.approx(float((p.argmax(1) == q.argmax(1)).float().mean()))


def test_a_model_of_another_source_is_not_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    assert local_distance(tmp_path, [(b"the sea", b" and")]) == {}
    write_model(tmp_path / "local")
    assert served_copy(tmp_path) == ("local:copy",)
    update_manifest(tmp_path / "local", lambda manifest: replace(manifest, data={"source": "another"}))
    assert served_copy(tmp_path) == ()
    assert "skipping local:copy: the router has no copy" in capsys.readouterr().out
