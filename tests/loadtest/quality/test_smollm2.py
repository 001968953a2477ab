"""The judge of text: SmolLM2, whose weights one worker of the tests loads once."""

from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

from loadtest.quality.judge import PACKAGES, LanguageModel, open_judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    if any(find_spec(package) is None for package in PACKAGES):
        pytest.skip("the judge is not installed (extra `judge`)")
    return open_judge()


def silent(texts: int) -> None:
    """No progress bar."""


def test_the_judge_prefers_english(smollm2: LanguageModel) -> None:
    prompt = b"The capital of France is"
    found = smollm2.judge(
        [prompt] * 3, [b" Paris, a city on the Seine.", b" siraP, a ytic no the enieS.", b"\xff\x00"], silent
    )
    assert found[0] < 30 < found[1]
    assert np.isfinite(found[2])


def test_the_judge_allows_a_prompt_to_end_inside_a_token(smollm2: LanguageModel) -> None:
    """p(prompt end) p(rest | prompt end) is one number, whether the border is between tokens or inside one."""
    text = b"When the teacher had understood, everybody in the classroom laughed."
    bits = [smollm2.judge([text[:cut]], [text[cut:]], silent)[0] for cut in range(20, 33)]
    assert all(later <= earlier + 1e-2 for earlier, later in pairwise(bits))
    (space, inside) = (bits[25 - 20], bits[28 - 20])
    assert inside < space


def test_the_judge_gives_the_same_result_alone_and_in_a_batch(smollm2: LanguageModel) -> None:
    texts = [b" a short one", b" one that is much longer than the others, and lasts for a while", b" 12345 \xc3\xa9"]
    together = smollm2.judge([b"This is"] * 3, texts, silent)
    alone = [smollm2.judge([b"This is"], [text], silent)[0] for text in texts]
    assert together == pytest.approx(alone, rel=0.02)
