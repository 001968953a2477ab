"""Versions that workers are offered, whole or as differences."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.small import tensors, update
from trainer.blocks.config import CodecName, RoundSettings
from trainer.blocks.state import digest
from trainer.rounds.cache import WeightCache
from trainer.rounds.client import FileGoneError, RoundsClient
from trainer.rounds.codecs import CODECS, norm, receive, shapes, subtract
from trainer.rounds.file_server import WeightServer
from trainer.rounds.ledger import Ledger
from trainer.rounds.store import Store
from trainer.v1 import rounds_pb2


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(RoundSettings(replicas=1), {"p": tensors(0)}, Store(), "run")


def close(ledger: Ledger, number: int) -> None:
    """Make the next version."""
    assert ledger.accept(update(number), 0.0).kind == "accepted"
    ledger.close("p", 0.0)


def holding(offered: rounds_pb2.Weights) -> rounds_pb2.Held:
    return rounds_pb2.Held(part=offered.part, version=offered.version)


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_a_worker_that_has_a_version_gets_differences(ledger: Ledger, codec: CodecName) -> None:
    ledger.settings = replace(ledger.settings, down_codec=codec)
    offers = WeightServer(ledger)
    offered = offers.weights("p", None)
    assert (offered.version, offered.whole) == (0, True)
    first, held, like = holding(offered), ledger.weights("p"), shapes(ledger.weights("p"))
    for number in range(5):
        close(ledger, number)
        offered = offers.weights("p", holding(offered))
        assert (offered.version, offered.whole, len(offered.files)) == (number + 1, False, 1)
        assert offered.files[0].size == CODECS[codec].size(like)
        held = receive(held, offers.read(offered.files[0].name), codec)
        assert digest(held) == offered.digest
        assert list(offers.weights("p", holding(offered)).files) == []
        assert offers.weights("p", None).whole
    assert offers.weights("p", first).whole, "so old a version is no longer followed"
    assert norm(subtract(ledger._parts["p"].version.weights, held)) < 0.15


class OfferedFiles(RoundsClient):
    """Fetches from offers in this process; `damaged` are the names of files that come with other bytes."""

    def __init__(self, offers: WeightServer) -> None:
        super().__init__("127.0.0.1:1")
        self.offers, self.damaged = offers, set[str]()

    def fetch(self, file: rounds_pb2.File, worker: str, lease: str, path: Path) -> bytes:
        data = self.offers.read(file.name)
        return bytes(len(data)) if file.name in self.damaged else data


def test_a_worker_fetches_whole_weights_after_a_damaged_difference(ledger: Ledger, tmp_path: Path) -> None:
    offers = WeightServer(ledger)
    client = OfferedFiles(offers)
    cache = WeightCache(client, "w", "", tmp_path, {"p": shapes(ledger.weights("p"))})

    def offered() -> rounds_pb2.Weights:
        return offers.weights("p", next(iter(cache.summary()), None))

    cache.fetch(offered(), "int8")
    close(ledger, 0)
    difference = offered()
    assert not difference.whole
    client.damaged = {file.name for file in difference.files}
    with pytest.raises(FileGoneError, match="version 1 of p: its digest does not match the announced one"):
        cache.fetch(difference, "int8")
    assert cache.summary() == []
    whole = offered()
    assert whole.whole
    assert digest(cache.fetch(whole, "int8")) == whole.digest
    assert [held.version for held in cache.summary()] == [1]
