"""The prefix cache of one host: cached chunks, lookups, and equal texts after a cached prefix."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from stages.host.host import Host
from stages.host.parts import Parts
from stages.host.prefixes import LISTED_BYTES, Beginning, PrefixStore, voucher
from stages.model.layers import LayerCache
from stages.model.prefill import ATTEND_POSITIONS, prefix_digests, prefix_root
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.messages import after_prefix, put_work, step_hops, work_of
from stages.wire.status import StatusError
from tests.conftest import refused
from tests.stages.hops import LONG_PROMPT, opening
from tests.stages.hosts import KEY, event_of, open_host, send

MINE, YOURS = b"m" * 16, b"y" * 16
FIRST = LONG_PROMPT[:300]  # nine whole chunks
SECOND = FIRST + LONG_PROMPT[:130]
PIECE_BYTES = 3 * 2 * ATTEND_POSITIONS * 32 * 4 + 8 * ATTEND_POSITIONS  # for three parts of one layer


def hops_of(
    parts: Parts, session: str, clean: bytes, space: bytes = MINE, kept: int = 0, **fields: Any
) -> list[stage_pb2.Hop]:
    """A step as a router sends it, which continues after `kept` chunks."""
    hop = opening(parts.plan.models["ar"].digest, session, clean=clean, **fields)
    if space:
        hop.memory.CopyFrom(stage_pb2.Memory(space=space, hosts=["own/1"], vouchers=voucher(KEY, session, space, [])))
    if kept:
        work = work_of(hop)
        root = prefix_root(space, hop.digest, work.codec)
        hop.memory.prefix = prefix_digests(root, clean, BYTES)[kept - 1]
        put_work(hop, after_prefix(work, kept * ATTEND_POSITIONS, BYTES))
    return step_hops(hop, BYTES, rows=64)


async def written(host: Host, hops: list[stage_pb2.Hop], results: int = 1) -> list[tuple[bytes, bytes]]:
    """Texts and scores that hops end in."""
    send(host, *hops)
    events = [await event_of(host) for _ in range(results)]
    return [(event.text, event.scores.nats) for event in events]


@pytest.mark.parametrize(
    ("fields", "results"),
    [
        ({"remaining": 3}, 3),
        ({"codec": "int8"}, 1),
        ({"clean": SECOND + b"guess", "draft": 5}, 1),
        ({"clean": SECOND + b"guess", "draft": 5, "depths": (0, 1, 1, 0, 1)}, 1),
        ({"candidates": [b"abcde", b"fghij"]}, 1),
        ({"clean": SECOND[:384]}, 1),
        ({"clean": SECOND[:330]}, 1),
        ({"clean": SECOND[:289]}, 1),
    ],
    ids=["text", "int8", "drafts", "a tree", "scores", "whole chunks", "a part of one", "one token more"],
)
async def test_a_text_after_a_cached_prefix_is_the_text_without_the_cache(
    whole: Parts, fields: dict[str, Any], results: int
) -> None:
    fields = {"clean": SECOND, **fields}
    async with open_host(whole) as host:
        await written(host, hops_of(whole, "turn 1", FIRST, **({"codec": "int8"} if "codec" in fields else {})))
        assert await host.end(["turn 1"]) == 1
        anew = await written(host, hops_of(whole, "anew", **fields), results)
        recalled = await written(host, hops_of(whole, "recalled", kept=9, **fields), results)
        assert recalled == anew
        assert anew[0] != (b"", b"")
        read, found = (host.sessions.sessions[name] for name in ("anew", "recalled"))
        assert np.array_equal(read.tokens[:288], found.tokens[:288])
        mine, other = read.layers, found.layers
        for one, again in zip(mine, other, strict=True):
            assert one.length == again.length
            assert one.keys[:, :, : one.length].equal(again.keys[:, :, : one.length])
            assert one.values[:, :, : one.length].equal(again.values[:, :, : one.length])
        assert (host.prefixes.hits, host.prefixes.positions) == (1, 288)


async def test_a_second_turn_caches_only_its_new_chunks(whole: Parts) -> None:
    async with open_host(whole) as host:
        await written(host, hops_of(whole, "1", FIRST))
        await host.end(["1"])
        assert host.counters_now().prefix_bytes == 9 * PIECE_BYTES
        await written(host, hops_of(whole, "2", SECOND, kept=9))
        await host.end(["2"])
        assert host.prefixes.bytes == 13 * PIECE_BYTES
        await written(host, hops_of(whole, "3", SECOND, kept=13))


@pytest.mark.parametrize("lacks", ["space", "codec", "digest", "length"])
async def test_a_prefix_of_another_namespace_codec_or_length_is_not_found(whole: Parts, lacks: str) -> None:
    async with open_host(whole) as host:
        await written(host, hops_of(whole, "1", FIRST))
        await host.end(["1"])
        (hop,) = hops_of(whole, "2", FIRST, kept=6)
        right = hop.memory.prefix
        if lacks == "space":
            hop.memory.space = YOURS  # even with the right digest
        elif lacks == "codec":
            hop.read.codec = "int8"
        elif lacks == "digest":
            (other,) = hops_of(whole, "2", FIRST, space=YOURS, kept=6)
            hop.memory.prefix = other.memory.prefix
            assert other.memory.prefix != right
        else:
            hop.read.start = 224
        with refused(grpc.StatusCode.NOT_FOUND, "tokens are no longer in this host's memory"):
            host.accept(hop, 1)
        assert not host.sessions.sessions


async def test_only_whole_chunks_of_a_prompt_are_cached(whole: Parts) -> None:
    async with open_host(whole) as host:
        # a replay reads again in other pieces
        again = {"reads": [100, 156], "candidates": [b"abcd"]}
        await written(host, hops_of(whole, "replay", LONG_PROMPT[:384], **again))
        await host.end(["replay"])
        assert host.prefixes.bytes == 3 * PIECE_BYTES
        # no draft tokens, and not what followed the prompt one by one
        await written(host, hops_of(whole, "drafts", LONG_PROMPT[:384], draft=140))
        await host.end(["drafts"])
        assert host.prefixes.bytes == 7 * PIECE_BYTES
        await written(host, hops_of(whole, "short", LONG_PROMPT[:100], remaining=60), 60)
        await written(host, hops_of(whole, "answer", LONG_PROMPT[:300], prompt=100))
        await host.end(["short", "answer"])
        assert host.prefixes.bytes == 7 * PIECE_BYTES
        # nor without a namespace, nor before the request has ended
        await written(host, hops_of(whole, "spaceless", LONG_PROMPT[:384], space=b""))
        await host.end(["spaceless"])
        await written(host, hops_of(whole, "lost", LONG_PROMPT[:384]))
        host.sessions.release("lost")
        assert host.prefixes.bytes == 7 * PIECE_BYTES


async def test_a_session_counts_until_its_prefix_is_copied(whole: Parts) -> None:
    async with open_host(whole) as host:
        await written(host, hops_of(whole, "1", SECOND))
        ending = asyncio.create_task(host.end(["1"]))
        await asyncio.sleep(0)
        assert host.sessions.bytes > 0
        assert host.sessions.sessions["1"].released
        assert host.prefixes.bytes == PIECE_BYTES
        assert await ending == 1
        assert (host.sessions.bytes, host.prefixes.bytes) == (0, 13 * PIECE_BYTES)


SWEEP = stage_pb2.Sweep(clean=b"a", slots=1, steps=1, codec="fp32")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda hop: setattr(hop.memory, "space", b"short"), "a space in memory must have 16 bytes, not 5"),
        (lambda hop: setattr(hop.memory, "prefix", b""), "a session must start at 0 or after a kept prefix, not"),
        (lambda hop: setattr(hop.memory, "prefix", b"short"), "a kept prefix must have a digest of 32 bytes and"),
        (lambda hop: setattr(hop.read, "start", 250), "end at a multiple of 32"),
        (lambda hop: hop.sweep.CopyFrom(SWEEP), "only a hop that reads text can use memory"),
    ],
)
async def test_an_invalid_prefix_field_is_refused(
    whole: Parts, change: Callable[[stage_pb2.Hop], object], sentence: str
) -> None:
    async with open_host(whole) as host:
        (hop,) = hops_of(whole, "1", FIRST, kept=6)
        change(hop)
        if hop.HasField("sweep"):
            hop.digest = whole.plan.models["chain"].digest
        with refused(grpc.StatusCode.INVALID_ARGUMENT, sentence):
            host.accept(hop, 1)


# The store


class Kept:
    """A store with room for a few pieces of one layer."""

    def __init__(self, pieces: int) -> None:
        self.size = 2 * ATTEND_POSITIONS * 4 * 4 + ATTEND_POSITIONS * 8
        self.store = PrefixStore(pieces * self.size)

    def text(self, *pieces: str, space: bytes = MINE, before: tuple[str, ...] = ()) -> Beginning:
        root = prefix_root(space, "weights", "fp32")
        text = b"".join(piece.encode() * ATTEND_POSITIONS for piece in pieces)
        return Beginning(root, before, prefix_digests(root, text, BYTES))

    def keep(self, *pieces: str, before: tuple[str, ...] = ()) -> Beginning:
        beginning = self.text(*pieces, before=before)
        shape = (1, 1, len(pieces) * ATTEND_POSITIONS, 4)
        caches = [LayerCache(torch.randn(shape), torch.randn(shape))]
        for at in range(len(pieces)):
            self.store.keep(beginning, at, caches, np.arange(len(pieces) * ATTEND_POSITIONS))
        return beginning

    def holds(self, *pieces: str, before: tuple[str, ...] = ()) -> bool:
        due = self.text(*pieces, before=before)
        found = Beginning(due.root, before)
        try:
            self.store.find(due.digests[-1], found, len(pieces) * ATTEND_POSITIONS)
        except StatusError:
            return False
        assert found.digests == due.digests
        tokens = np.concatenate([piece.tokens for piece in found.recalled])
        assert tokens.tolist() == [*range(len(pieces) * ATTEND_POSITIONS)]
        return True


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    kept = Kept(4)
    kept.keep("a", "b")
    kept.keep("x", "y")
    assert kept.holds("a", "b")
    kept.keep("a", "b", "c")
    assert not kept.holds("x", "y")
    assert kept.holds("x"), "its beginning is still there"
    assert kept.holds("a", "b", "c")
    assert kept.store.bytes == 4 * kept.size


def test_texts_share_their_common_prefix() -> None:
    kept = Kept(10)
    kept.keep("a", "b", "c")
    kept.keep("a", "b", "d")
    assert kept.store.bytes == 4 * kept.size
    assert all(kept.holds(*text) for text in ("abc", "abd", "ab", "a"))
    assert not kept.holds("b")


def test_a_text_is_cached_as_far_as_it_fits() -> None:
    kept = Kept(2)
    kept.keep("x")
    kept.keep("a", "b", "c")
    assert kept.holds("a", "b")
    assert not any(kept.holds(*text) for text in ("abc", "x"))
    assert Kept(0).keep("a").digests
    assert Kept(0).store.bytes == 0


def test_a_chunk_whose_prefix_was_evicted_is_not_cached() -> None:
    kept = Kept(3)
    beginning = kept.text("a", "b")
    caches = [LayerCache(*torch.zeros(2, 1, 1, 2 * ATTEND_POSITIONS, 4))]
    kept.store.keep(beginning, 1, caches, np.zeros(2 * ATTEND_POSITIONS))
    assert kept.store.bytes == 0


def test_a_prefix_that_came_by_another_path_is_not_found() -> None:
    kept = Kept(9)
    kept.keep("a", "b", before=("x/1",))
    assert kept.holds("a", "b", before=("x/1",))
    assert not any(kept.holds("a", before=before) for before in ((), ("x/2",), ("x/1", "y/1"), ("x", "1")))


def test_a_prefix_that_passed_a_faulty_host_is_dropped_for_good() -> None:
    kept = Kept(9)
    for before in ((), ("x/1",), ("y/1", "x/1"), ("y/1",)):
        kept.keep("a", before=before)
    version = kept.store.version
    kept.store.forget(["x/1", "z/1"])
    assert [kept.holds("a", before=b) for b in ((), ("x/1",), ("y/1", "x/1"), ("y/1",))] == [True, False, False, True]
    assert (kept.store.bytes, kept.store.version) == (2 * kept.size, version + 2)
    kept.keep("b", before=("x/1",))
    assert not kept.holds("b", before=("x/1",))


@pytest.mark.parametrize("forged", ["session", "space", "key", "place", "none"])
async def test_a_prefix_without_a_valid_voucher_is_neither_cached_nor_found(whole: Parts, forged: str) -> None:
    async with open_host(whole) as host:
        await written(host, hops_of(whole, "1", FIRST))
        await host.end(["1"])
        kept = host.prefixes.bytes
        for session, pieces in (("2", 0), ("3", 6)):
            hops = hops_of(whole, session, SECOND, kept=pieces)
            memory = hops[0].memory
            if forged == "session":  # chunks of another session
                memory.vouchers = voucher(KEY, "1", MINE, [])
            elif forged == "space":
                memory.space = YOURS
            elif forged == "key":
                memory.vouchers = voucher(bytes(32), session, MINE, [])
            elif forged == "place":
                hops[0].path[:] = ["a:1", "b:1"]
                hops[0].place = 1
                memory.hosts[:] = ["liar/1", "own/1"]
                memory.vouchers = 2 * voucher(KEY, session, MINE, [])
            else:
                memory.vouchers = b""
            if pieces:
                with refused(grpc.StatusCode.NOT_FOUND, "no longer in this host's memory"):
                    host.accept(hops[0], 0)
            else:
                host.accept(hops[0], 0)
                assert host.sessions.sessions[session].beginning is None
        assert host.prefixes.bytes == kept


def test_the_prefix_list_is_sent_only_when_it_changed() -> None:
    kept = Kept(2)
    empty = kept.store.listing(0)
    assert empty.digests == b""
    text = kept.keep("a", "b")
    listed = kept.store.listing(empty.version)
    assert listed.version != empty.version
    assert listed.digests == b"".join(digest[:LISTED_BYTES] for digest in text.digests)
    assert kept.store.listing(listed.version) == stage_pb2.PrefixList(version=listed.version)
    kept.keep("c")
    assert kept.store.listing(listed.version).digests != listed.digests
    assert PrefixStore(0).version != PrefixStore(0).version, "a restarted host has other ones"


def test_a_digest_depends_on_namespace_weights_codec_and_every_token() -> None:
    text, tokens = bytes(range(64)), Vocabulary(300)
    root = prefix_root(MINE, "w", "fp32")
    others = {prefix_root(YOURS, "w", "fp32"), prefix_root(MINE, "v", "fp32"), prefix_root(MINE, "w", "int8"), root}
    assert len(others) == 4
    first, second = prefix_digests(root, text, BYTES)
    assert prefix_digests(first, text[32:], BYTES) == [second]
    assert prefix_digests(root, text[:-1], BYTES) == [first]
    assert prefix_digests(root, text[:-1] + b"x", BYTES)[1] != second
    assert len(prefix_digests(root, text, tokens)) == 1, "two bytes a token"


def test_a_second_read_replaces_the_digests_of_the_first() -> None:
    beginning, text = Beginning(prefix_root(MINE, "w", "fp32")), bytes(range(200))
    beginning.read(0, [64, 8], text[:72], BYTES)
    whole = list(beginning.digests)
    assert len(whole) == 2
    beginning.read(72, [1], b"a", BYTES)
    assert beginning.digests == whole
    beginning.read(32, [128, 20], text[32:180], BYTES)
    assert beginning.digests[:2] == whole
    assert len(beginning.digests) == 5
    beginning.read(40, [128], text[40:168], BYTES)
    assert beginning.digests == whole[:1]
