"""The judge that reads tokens: SmolLM2, whose weights one worker of the tests loads once."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from onesweep.loadtest.quality.judge import Judge
from onesweep.loadtest.quality.run import CHEATS
from tests.loadtest.quality.test_check import checked
from tests.loadtest.quality.test_judges import silent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_smollm2_knows_english(smollm2: Judge) -> None:
    prompt = b"The capital of France is"
    found = smollm2.judge(
        [prompt] * 3, [b" Paris, a city on the Seine.", b" siraP, a ytic no the enieS.", b"\xff\x00"], silent
    )
    assert found[0] < 30 < found[1]
    assert np.isfinite(found[2])


def test_smollm2_does_not_mind_where_the_prompt_ends(smollm2: Judge) -> None:
    """p(prompt end) p(rest | prompt end) is one number, whether the border is between tokens or inside one."""
    text = b"When the teacher had understood, everybody in the classroom laughed."
    bits = [smollm2.judge([text[:cut]], [text[cut:]], silent)[0] for cut in range(20, 33)]
    assert all(later <= earlier + 1e-2 for earlier, later in pairwise(bits))
    (space, inside) = (bits[25 - 20], bits[28 - 20])
    assert inside < space


def test_smollm2_is_the_same_alone_and_in_company(smollm2: Judge) -> None:
    texts = [b" a short one", b" one that is much longer than the others, and lasts for a while", b" 12345 \xc3\xa9"]
    together = smollm2.judge([b"This is"] * 3, texts, silent)
    alone = [smollm2.judge([b"This is"], [text], silent)[0] for text in texts]
    assert together == pytest.approx(alone, rel=0.02)


def test_human_text_wins_with_smollm2(smollm2: Judge, python_docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--count", "100", "--bytes", "32", "--prompt-bytes", "16", "--judge", smollm2.name]
    printed = checked(capsys, "--prompts", str(python_docs), *sizes)
    assert printed.count("holds: human text against") == len(CHEATS)
