"""Benchmarks of one machine refuse what they cannot measure: in a sentence, before anything is started."""

from pathlib import Path

import pytest

from onesweep.serving.cli.__main__ import main
from tests.loadtest.conftest import check_refused

NOWHERE = "--json /no/such/folder.json"
NO_FOLDER = "cannot write /no/such/folder.json: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("audit --modes swep", "unknown mode 'swep' (did you mean sweep?); choose from sweep,"),
        ("audit --requests 1", "--requests must be from 2 to"),
        ("audit --rounds 0", "--rounds must be from 1 to"),
        ("audit --sweeps 0", "--sweeps must be from 1 to"),
        ("audit --share nan", "--share must be above 0, not nan"),
        ("audit --share 0", "--share must be above 0, not 0.0"),
        ("audit --share 1.1", "--share must be at most 1, not 1.1"),
        ("memory --block-mb 0", "--block-mb must be at least 1, not 0"),
        (f"memory {NOWHERE}", NO_FOLDER),
        ("shapes --widths 100", "--widths must be multiples of 64, not 100"),
        ("shapes --widths x", "--widths 'x' must be numbers such as 1,3"),
        ("shapes --widths=", "--widths is empty"),
        ("shapes --dtype int3", "--dtype must be one of fp32, bf16, not 'int3'"),
        ("shapes --slots 0", "--slots must be 1 to 4096"),
        ("shapes --profile moon", "no profile 'moon'; there are"),
        ("stage --batch 1,many", "--batch"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ("--requests 0", 2, "--requests must be at least 1, not 0"),
        ("--bytes 1000", 2, "--bytes must be 1 to 53"),
        ("--bytes 9 --hosts 9", 2, "9 hosts cannot share 2 blocks"),
        ("--hosts two", 2, "--hosts 'two' must be numbers"),
        (f"--bytes 8 {NOWHERE}", 2, NO_FOLDER),
        ("--bytes 8 --json .", 2, "cannot write .: Is a directory"),
        ("--checkpoint no/such", 1, "no checkpoint in "),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_printed_before_it(
    bundle: Path, arguments: str, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(capsys, ["bench", "overhead", "--checkpoint", str(bundle), *arguments.split()], sentence, code)
