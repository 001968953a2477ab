"""Flags of fault runs that cannot be: refused in a sentence, before anything is started."""

import pytest

from loadtest.lab.lab import lab_problem
from serving.cli.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench chaos --checkpoint /nowhere", "/nowhere"),
        ("bench chaos --simulate --minutes 3", "--simulate takes --seed and --schedules alone"),
        ("bench chaos --schedules 3", "--schedules is for simulations: add --simulate"),
        ("bench chaos --profile moon", "no profile 'moon'; there are loopback, "),
        ("bench chaos --profile loopback --json /nowhere/x.json", "cannot write /nowhere/x.json"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "moon" in arguments and "profile" in arguments and lab_problem():
        pytest.skip(lab_problem())
    assert main(arguments.split()) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
