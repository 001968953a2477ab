"""Chunked prefill: a long prompt is sent in several hops, so that all hosts along the chain work on it at once.

Prompts are cut where a host would cut its reads, so the text is the same as with one hop, to the last bit.
"""

import hashlib
from collections.abc import Sequence

from stages.device import Tensor
from stages.model.vocabulary import Vocabulary

# Clean positions read at once: a long prompt is read in pieces, so that it does not hold up others. Only a sequence's
# own positions decide the cuts, never the rest of its batch.
READ_POSITIONS = 128
# Positions of a prompt that attend at once: groups end on this grid. Rounding depends on them, and on nothing else that
# is read with them, so hosts keep a prompt in such pieces for the next prompt that begins alike.
ATTEND_POSITIONS = 32
# The router cuts, not the hosts: a chunk is a hop like any other, checked, queued, acknowledged, refused and resent by
# the same code. Each costs every host about a millisecond, so there are few.
MAX_PREFILL_CHUNKS = 16  # most hops of a step
# New tokens that a hop may always bring, however short the context: drafts and chosen candidates stay together.
MIN_ROOM = 1024


def max_new_tokens(positions: int) -> int:
    """New tokens that a hop may bring to a model with a context of `positions`; `prefill_chunks` needs no more."""
    return max(-(-positions // MAX_PREFILL_CHUNKS) + 2 * READ_POSITIONS, MIN_ROOM)


def read_lengths(count: int, reads: Sequence[int] = (), tree: int = 0) -> list[int]:
    """Lengths of the reads into which a host splits `count` new tokens.

    :param reads: in a replay, lengths of the reads that first brought these tokens.
    :param tree: this many of the last tokens are a tree of draft tokens, which is one read.
    """
    apart = tree if count > READ_POSITIONS else 0
    together = [*reads, count - apart - sum(reads)]
    lengths = [min(READ_POSITIONS, read - at) for read in together for at in range(0, read, READ_POSITIONS)]
    return [*lengths, apart] if apart else lengths


def prefill_chunks(lengths: Sequence[int], known: int, least: int) -> list[list[int]]:
    """Neighbouring lengths of reads, grouped for one hop each.

    Every chunk but the last has at least `least` tokens, and the last has at least one of the first `known` tokens, as
    draft tokens follow a known one.
    """
    chunks, at = [list[int]()], 0
    for length in lengths:
        chunks[-1].append(length)
        at += length
        if at < known and sum(chunks[-1]) >= least:
            chunks.append([])
    return chunks


def split_reads(source: Tensor, reads: Sequence[int] = ()) -> list[Tensor]:
    """`source` (positions, ...) cut into pieces to read one after another; none for no positions.

    :param reads: lengths of the reads that first brought its first positions; the rest came together. Rounding depends
        on which positions are read together.
    """
    return list(source.split(read_lengths(len(source), reads)))


# A prefix is the beginning of a text whose keys and values hosts keep for a later text that begins alike. It ends on
# the grid of ATTEND_POSITIONS. Later positions attended in smaller groups, or one by one, and differ in the last bits
# from those of a longer text.
def prefix_root(space: bytes, weights: str, codec: str) -> bytes:
    """Digest from which all prefix digests of one client derive, for the same weights and codec of hidden states."""
    return hashlib.sha256(b"\0".join([space.hex().encode(), weights.encode(), codec.encode()])).digest()


def prefix_digests(root: bytes, text: bytes, vocabulary: Vocabulary) -> list[bytes]:
    """Digests of the prefixes of `text`, the shortest first: a SHA-256 chain over its pieces of ATTEND_POSITIONS.

    :param root: from `prefix_root`, or the digest of the tokens before `text`.
    """
    digests, size = list[bytes](), ATTEND_POSITIONS * vocabulary.token_bytes
    for at in range(0, len(text) - size + 1, size):
        root = hashlib.sha256(root + text[at : at + size]).digest()
        digests.append(root)
    return digests
