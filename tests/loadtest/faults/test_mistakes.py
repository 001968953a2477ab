"""Flags of fault runs that cannot be: refused in a sentence, before anything is started."""

import pytest

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.serving.cli.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench chaos --minutes 0", "--minutes must be above 0"),
        ("bench chaos --minutes nan", "--minutes must be above 0"),
        ("bench chaos --requests-at-once 0", "--requests-at-once must be above 0"),
        ("bench chaos --seed -1", "--seed must be from 0"),
        ("bench chaos --faults flood,quake", "--faults has no 'quake'; choose from kill, "),
        ("bench chaos --faults kill,kill", "--faults names something twice"),
        ("bench chaos --faults kill,", "--faults has no ''"),
        ("bench chaos --profile loopback --count 1 --faults kill,freeze,cut", "--count 1 is less than the 2 kinds"),
        ("bench chaos --faults cut --profile loopback", "loopback has no link to cut"),
        ("bench chaos --audit 2", "--audit must be from 0 to 1"),
        ("bench chaos --audit 0.1 --faults garbage", "--audit leaves it out"),
        ("bench chaos --routers 2 --faults swap", "of several only one deploys"),
        ("bench chaos --modes poem", "--modes has no 'poem'"),
        ("bench chaos --profile moon", "no profile 'moon'"),
        ("bench chaos --profile loopback --html /nowhere/x.html", "cannot write /nowhere/x.html"),
        ("bench soak --patience-s 0", "--patience-s must be above 0"),
        ("bench soak --checkpoint /nowhere", "/nowhere"),
        ("bench flood --at 1", "--at must be above 1"),
        ("bench flood --knee 0", "--knee must be from 1 to"),
        ("bench flood --polite -1", "--polite must be from 0 to"),
        ("bench flood --mode poem", "unknown mode 'poem'"),
        ("bench flood --router nowhere", "router"),
        ("bench chaos-training --minutes 0", "--minutes must be above 0"),
        ("bench chaos-training --seed -1", "--seed must be from 0"),
        ("bench chaos-training --faults quake", "--faults has no 'quake'; choose from kill, "),
        ("bench chaos-training --faults cut --profile loopback", "loopback has no link to cut"),
        ("bench chaos-training --profile moon", "no profile 'moon'"),
        ("bench chaos-training --data /nowhere", "no text at /nowhere"),
        ("bench chaos-training --config /nowhere.toml", "cannot read /nowhere.toml"),
        ("bench chaos-training --profile loopback --json /nowhere/x.json", "cannot write /nowhere/x.json"),
        ("bench chaos-training --faults none --up-mbps 0", "--up-mbps must be above 0"),
        ("wan train --minutes 0", "--minutes must be above 0"),
        ("wan train --minutes nan", "--minutes must be above 0"),
        ("wan train --data nowhere", "no text at nowhere"),
        ("bench fuzz --inputs 0", "--inputs must be from 1 to"),
        ("bench fuzz --seconds 0", "--seconds must be above 0"),
        ("bench fuzz --seconds nan", "--seconds must be above 0"),
        ("bench fuzz --seed -1", "--seed must be from 0"),
        ("bench fuzz --targets stage,moon", "there is no target 'moon'; choose from stage, router"),
        ("bench fuzz --targets http,http", "names one twice"),
        ("bench fuzz --targets ,", "there is no target ''"),
        ("bench fuzz --json /nowhere/x.json", "cannot write /nowhere/x.json"),
    ],
)
def test_bad_flags_are_refused_in_a_sentence(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "moon" in arguments and "profile" in arguments and lab_problem():
        pytest.skip(lab_problem())
    assert main(arguments.split()) in (1, 2)
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
