"""How commands that measure reach a router: as those do that use one."""

import argparse
import json
from dataclasses import asdict

import pytest

from loadtest.workload.caller import Access, add_access_options
from serving.cli.__main__ import main
from stages.errors import InputError


def access(*words: str) -> Access | None:
    parser = argparse.ArgumentParser()
    add_access_options(parser)
    return Access.of(parser.parse_args(words))


def test_what_the_options_say_goes_through_json() -> None:
    assert access() is None
    found = access("--router", "10.8.0.9:7700", "--tls-ca", "ca.pem")
    assert found == Access("10.8.0.9:7700", "ca.pem")
    assert Access(**json.loads(json.dumps(asdict(found)))) == found
    with pytest.raises(InputError, match="--tls-ca and --insecure need --router"):
        access("--insecure")


def test_plain_text_does_not_leave_the_machine_unasked(locust: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loadtest", "--router", "10.8.0.9:7700"]) == 2
    assert "--router 10.8.0.9:7700 is on another machine and traffic would not be encrypted" in capsys.readouterr().err
