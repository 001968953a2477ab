"""Access of benches to a router: the same as that of clients."""

import argparse
import json
from dataclasses import asdict

import pytest

from loadtest.benches import add_loadtest
from loadtest.workload.caller import Access
from stages.errors import InputError


def access(*words: str) -> Access | None:
    parser = argparse.ArgumentParser()
    add_loadtest(parser)
    return Access.of(parser.parse_args(words))


def test_options_of_access_survive_json() -> None:
    assert access() is None
    found = access("--router", "10.8.0.9:7700", "--tls-ca", "ca.pem")
    assert found == Access("10.8.0.9:7700", "ca.pem")
    assert Access(**json.loads(json.dumps(asdict(found)))) == found
    with pytest.raises(InputError, match="--tls-ca and --insecure need --router"):
        access("--insecure")
