"""What a liar says can be told from what a host says."""

import pytest
import torch

from loadtest.faults.faulty_host import SPOILS, spoil
from serving.modes.resample import read_scores
from stages.model.codec import CODECS, CodecError
from stages.v1 import stage_pb2
from stages.wire.messages import put_work, work_of
from stages.wire.status import StatusError


def sweep_hop(codec: str) -> stage_pb2.Hop:
    sweep = stage_pb2.Sweep(number=2, slots=8, codec=codec, estimate=CODECS[codec].encode(torch.ones(8, 4)))
    return stage_pb2.Hop(sweep=sweep)


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize("lie", [lie for lie in SPOILS if lie != "number"])
def test_spoiled_states_cannot_be_decoded(codec: str, lie: str) -> None:
    hop = sweep_hop(codec)
    spoil(hop, lie)
    with pytest.raises(CodecError):
        CODECS[codec].decode(hop.sweep.estimate, 8, 4, 100.0)


@pytest.mark.parametrize("lie", SPOILS)
def test_spoiled_results_are_no_results(lie: str) -> None:
    scores = stage_pb2.Event(number=2, scores=stage_pb2.Scores(nats=b"\0" * 8 * 2))
    spoil(scores, lie)
    if lie == "number":
        assert scores.number == 9
    else:
        with pytest.raises(StatusError):
            read_scores(scores.scores.nats, 2)
    text = stage_pb2.Event(number=2, text=b"a")
    spoil(text, lie)
    assert (text.number, len(text.text)) != (2, 1)


@pytest.mark.parametrize("lie", SPOILS)
def test_spoiled_pictures_are_none(lie: str) -> None:
    event = stage_pb2.Event(number=2, pictures=stage_pb2.Pictures(pixels=bytes(64)))
    spoil(event, lie)
    assert (event.number, len(event.pictures.pixels)) != (2, 64)
    draw = stage_pb2.Draw(number=2, block=1, codec="int8", estimate=CODECS["int8"].encode(torch.ones(16, 4)))
    denoise = stage_pb2.Denoise(number=2, level=1, codec="fp32", estimate=CODECS["fp32"].encode(torch.ones(16, 4)))
    for work in (draw, denoise):
        hop = stage_pb2.Hop()
        put_work(hop, work)
        spoil(hop, lie)
        if lie == "number":
            assert work_of(hop).number == 9
        else:
            with pytest.raises(CodecError):
                CODECS[work.codec].decode(getattr(hop, hop.WhichOneof("work") or "").estimate, 16, 4, 100.0)
