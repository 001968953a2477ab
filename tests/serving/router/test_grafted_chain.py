"""A chain made from a pretrained model, over hosts: `sweep` and `chunked` in tokens, beside `ar` of the same model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onesweep.serving.client.client import Client
from onesweep.trainer.grafting.model import GraftModel
from tests.serving.grafted import write, write_bundle
from tests.serving.pretrained import ids, text_of

PROMPT = "the old man said that the sea"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GraftModel]:
    directory = tmp_path_factory.mktemp("bundle")
    return directory, write_bundle(directory)


@pytest.fixture(scope="module")
def served(bundle: tuple[Path, GraftModel], local_ring: Any) -> Iterator[Client]:
    with local_ring(bundle[0], 3) as client:
        yield client


@pytest.mark.parametrize("sampler", ["stochastic", "ode"])
@pytest.mark.parametrize(("mode", "chunk", "sweeps"), [("sweep", None, 1), ("chunked", 5, 3), ("chunked", None, 2)])
def test_the_text_is_that_of_one_process(
    served: Client, bundle: tuple[Path, GraftModel], mode: str, chunk: int | None, sweeps: int, sampler: str
) -> None:
    size = {"sweep": 13, "chunked": chunk or 8}[mode]
    expected = write(bundle[1], ids(PROMPT), 13, size, steps=2, sampler=sampler, temperature=0.9, seed=4)
    asked: dict[str, Any] = {"max_tokens": 13, "steps": 2, "temperature": 0.9, "seed": 4, "sampler": sampler}
    result = served.generate(PROMPT, mode=mode, chunk=chunk, **asked)
    assert result.text == text_of(expected)
    assert (result.sweeps, result.output_tokens) == (sweeps, 13)


def test_the_same_hosts_serve_the_model_that_it_is_made_from(served: Client) -> None:
    result = served.generate(PROMPT, mode="ar", max_tokens=5)
    assert (result.sweeps, result.output_tokens) == (5, 5)
