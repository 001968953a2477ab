"""Attention of packed rows, one piece at a time, so that its shapes depend only on that piece."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.backends.base import CleanPiece
from stages.backends.rows import Rows, torch_threads
from stages.model.draft_tree import first_branch
from stages.model.layers import Layer, LayerCache, Numbers, seen_keys, soft_capped
from stages.model.llama import LlamaLayer
from stages.model.prefill import ATTEND_POSITIONS

ROUND = 16  # floats between addresses that kernels treat alike: a cache line
# Attention weights of branches held at once: heads x rows x keys they see. 64 MB, a few times over.
MAX_WEIGHTS = 1 << 24
# From this many positions x keys they see, attention gains from all threads: prompts of 1,800 gain a sixth.
MANY_SCORES = 1 << 13
MASKED_SCORE = -1e30  # added to the scores of masked keys: finite, as -inf breaks some kernels


@dataclass(frozen=True)
class AttentionShape:
    """A layer's attention, apart from the sizes of its tensors."""

    heads: int
    window: int | None = None  # positions that each one sees, including itself; None for all
    softcap: float | None = None  # of the scores

    def first_seen(self, position: int) -> int:
        """The first position that `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def weights(self, scores: Tensor) -> Tensor:
        """Scores of queries, (..., keys) -> weights."""
        return soft_capped(scores, self.softcap).softmax(-1)


def attention_shape(layer: Layer | LlamaLayer) -> AttentionShape:
    """The attention of a layer of any family."""
    if isinstance(layer, Layer):
        return AttentionShape(layer.heads)
    return AttentionShape(layer.architecture.heads, layer.window, layer.architecture.attention_softcap)


def rotate_rows(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of queries and keys in place. qkv: (rows, 3 width); cos, sin: from `LayerKind.factors`."""
    rows, width = qkv.shape
    both = qkv.view(rows, 3, heads, 2, width // (6 * heads))[:, :2]
    swapped = both.roll(1, 3)
    both.mul_(cos).addcmul_(swapped, sin)


class Heads:
    """Packed rows of queries, keys and values by head, and room for attention's results. Views that stay valid are made
    once. A group: the query heads that share a head of keys and values."""

    def __init__(self, qkv: Tensor, heads: int, kv_heads: int, mixed: Tensor | None = None) -> None:
        """qkv: (rows, numbers of all heads); mixed: (rows, heads x head_dim)."""
        rows, width = qkv.shape
        dim, group = width // (heads + 2 * kv_heads), heads // kv_heads
        queries, keys = heads * dim, kv_heads * dim
        self.qkv, self.mixed = qkv, qkv.new_zeros(rows, queries) if mixed is None else mixed
        self.q = qkv.as_strided((rows, kv_heads, group, dim), (width, group * dim, dim, 1))
        self.k = qkv.as_strided((rows, kv_heads, dim), (width, dim, 1), queries)
        self.v = qkv.as_strided((rows, kv_heads, dim), (width, dim, 1), queries + keys)
        self.results = self.mixed.view(rows, kv_heads, group, dim)
        self.numbers = (qkv.numpy() if qkv.is_cpu else qkv).reshape(rows, heads + 2 * kv_heads, dim)[:, heads:]
        self.attend = _attend_one if group == 1 or not (width % ROUND or queries % ROUND) else _attend_apart

    @cached_property
    def singles(self) -> list[tuple[Tensor, Numbers, Tensor]]:
        """Queries, keys and values, and room for results, of each row."""
        return list(zip(self.q.unbind(0), self.numbers, self.results.unbind(0), strict=True))


@dataclass(frozen=True)
class Visibility:
    """The keys that the positions of a piece see."""

    # For the first positions of the piece, which attend at once: ends of their groups, and masks (positions, keys);
    # None for a group that sees all keys before it.
    groups: list[tuple[int, Tensor | None]]
    depths: tuple[int, ...]  # of the other positions, below the first of them, if they are a tree


def visibility(piece: CleanPiece, window: int | None = None) -> Visibility:
    """The keys that the positions of a piece see. window: see `AttentionShape`."""
    past, at_once, groups = piece.caches[0].length, piece.source.shape[0] - piece.one_by_one, []
    depths = tuple(depth - at_once for depth in piece.depths[at_once:])
    at = 0
    while at < at_once:
        start = past + at
        count = min(ATTEND_POSITIONS - start % ATTEND_POSITIONS, at_once - at)
        is_plain = count == 1 or (not start and (window is None or count <= window))
        groups.append((at := at + count, None if is_plain else seen_keys(count, start, window, piece.source.device)))
    return Visibility(groups, depths)


def attend_clean(
    heads: Heads, rows: Rows, shape: AttentionShape, caches: Sequence[LayerCache], seen: Sequence[Visibility]
) -> Tensor:
    """Append each piece's keys and values to its cache, and attend over it.

    Returns (rows, heads x head_dim); seen: from `visibility`, for each piece, if any has several rows.
    """
    attend, q, numbers, mixed = heads.attend, heads.q, heads.numbers, heads.results
    if rows.single:  # one call instead of one for each piece
        for (query, row, result), cache in zip(heads.singles, caches, strict=False):
            attend(shape, query, row, cache, result)
        return heads.mixed
    for (begin, end), cache, visibility in zip(rows, caches, seen, strict=True):
        at = begin
        for stop, mask in visibility.groups:
            first, at = at, begin + stop
            if at - first > 1:
                is_long = (at - first) * (cache.length + at - first) >= MANY_SCORES
                with torch_threads(rows.threads) if is_long else nullcontext():
                    parts = q[first:at], heads.k[first:at], heads.v[first:at]
                    mixed[first:at] = _attend_many(shape, *parts, cache, mask)
            else:
                attend(shape, q[first], numbers[first], cache, mixed[first])
        if visibility.depths:
            _attend_tree(shape, q[at:end], numbers[at:end], cache, visibility.depths, mixed[at:end], attend)
            continue
        for i in range(at, end):
            attend(shape, q[i], numbers[i], cache, mixed[i])
    return heads.mixed


def attend_noisy(qkv: Tensor, rows: Rows, heads: int, caches: Sequence[LayerCache]) -> Tensor:
    """Attend with slots that see the clean positions in their piece's cache, and each other. qkv: (rows, 3 width)."""
    dim = qkv.shape[1] // (3 * heads)
    mixed = []
    for split, cache in zip(qkv.view(rows.total, 3, heads, dim).split(rows.sizes), caches, strict=False):
        q, k, v = split.permute(1, 2, 0, 3).unsqueeze(1)
        keys, values = cache.stored()
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        mixed.append(F.scaled_dot_product_attention(q, keys, values, scale=1.0)[0].transpose(0, 1).flatten(1))
    return rows.pack(mixed, fresh=False)


# Candidates are branches of one sequence. As rows of a batch they would each need a copy of its cache. Instead, one
# product covers all rows and the shared keys, and only a branch's own keys are computed branch by branch.
def attend_branches(
    heads: Heads, rows: Rows, shape: AttentionShape, caches: Sequence[LayerCache], branches: Sequence[int]
) -> Tensor:
    """Attend with the branches of pieces: each sees the positions in the piece's cache, and itself."""
    parts = (x.split(rows.sizes) for x in (heads.q, heads.k, heads.v))
    mixed = [_attend_forked(shape, *each) for each in zip(*parts, caches, branches, strict=False)]
    return rows.pack(mixed, fresh=False)


def _attend_forked(shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, branches: int) -> Tensor:
    """Attend with branches of equal length. q: (rows, kv_heads, group, head_dim) -> (rows, heads x head_dim)."""
    q = q.permute(1, 2, 0, 3).unflatten(2, (branches, -1)).contiguous()
    k, v = (each.transpose(0, 1).unflatten(1, (branches, -1)) for each in (k, v))
    kv_heads, group, _, new, _ = q.shape
    row = kv_heads * group * (cache.length + new)
    some = max(1, MAX_WEIGHTS // (row * new))
    few = max(1, MAX_WEIGHTS // (row * min(some, branches)))
    mixed = [
        torch.cat([_attend_some(shape, each, i * few, k_, v_, cache) for i, each in enumerate(q_.split(few, 3))], dim=3)
        for q_, k_, v_ in zip(q.split(some, 2), k.split(some, 1), v.split(some, 1), strict=True)
    ]
    return torch.cat(mixed, dim=2).flatten(2, 3).permute(2, 0, 1, 3).flatten(1)


def _attend_some(shape: AttentionShape, q: Tensor, start: int, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
    """Attend with positions of branches, from `start` on. q, and the result: (kv_heads, group, branches, positions,
    head_dim); k, v: (kv_heads, branches, all positions, head_dim)."""
    keys, values = (each[0] for each in cache.stored())
    past, rows = cache.length, q.flatten(1, 3)
    hidden = ~seen_keys(k.shape[2], past, shape.window, q.device)[start : start + q.shape[3]]
    old, own = rows @ keys.transpose(1, 2), q @ k.unsqueeze(1).transpose(3, 4)
    old, own = soft_capped(old, shape.softcap), soft_capped(own, shape.softcap)
    own.masked_fill_(hidden[:, past:], MASKED_SCORE)
    if shape.window is not None:
        old.unflatten(1, q.shape[1:4]).masked_fill_(hidden[:, :past], MASKED_SCORE)
    weights = torch.cat([old, own.flatten(1, 3)], dim=2).softmax(-1)
    mixed = weights[:, :, :past] @ values
    mixed += (weights[:, :, past:].unflatten(1, q.shape[1:4]) @ v.unsqueeze(1)).flatten(1, 3)
    return mixed.unflatten(1, q.shape[1:4])


class GrowingCache:
    """Keys and values of one layer: the text's, which are neither copied nor read once per continuation, and the
    continuations' own."""

    def __init__(self, shared: LayerCache, room: int, count: int) -> None:
        keys, values = (each[0] for each in shared.stored())
        self.keys, self.values = keys.transpose(1, 2), values
        kv_heads, self.past, dim = values.shape
        self._hold(torch.empty(2, kv_heads, count, room, dim))

    def _hold(self, own: Tensor) -> None:
        # views, kept so that steps need not remake them
        self.own, (keys, values) = own, own.flatten(1, 2)
        self.own_keys, self.own_values = keys.transpose(1, 2), values

    def select(self, branches: Tensor, length: int) -> None:
        """Keep only these continuations, which have `length` positions."""
        both, kv_heads, _, room, dim = self.own.shape
        chosen = torch.empty(both, kv_heads, len(branches), room, dim)
        chosen[..., :length, :] = self.own[..., :length, :].index_select(2, branches)
        self._hold(chosen)


class Growing:
    """Continuations of one text that grow together through one stage, all at the same position."""

    def __init__(self, shared: Sequence[LayerCache], room: int, count: int) -> None:
        """Begin `count` continuations of at most `room` positions after the text in `shared`, which is not changed."""
        self.caches, self.length = [GrowingCache(cache, room, count) for cache in shared], 0
        self.positions = torch.full((count,), shared[0].length)

    def grown(self) -> None:
        """Count one more position."""
        self.length += 1
        self.positions.add_(1)

    def select(self, branches: Tensor) -> None:
        """Keep these continuations, each any number of times. branches: indices."""
        for cache in self.caches:
            cache.select(branches, self.length)
        self.positions = self.positions.index_select(0, branches)


@dataclass(frozen=True)
class GrowingPiece:
    """One more position for each of a text's continuations."""

    # Tokens (continuations,) int64 if the part reads tokens, else hidden states (continuations, width).
    source: Tensor
    grown: Growing


def attend_growing(
    qkv: Tensor, rows: Rows, shape: AttentionShape, caches: Sequence[GrowingCache], lengths: Sequence[int]
) -> Tensor:
    """Attend with a new position of each continuation, which sees its text and itself.

    qkv: as in `Heads`, a row for each continuation; caches: of each text; lengths: positions that its continuations
    already have.
    """
    mixed = [_attend_grown(qkv, shape, *each) for each in zip(rows.bounds, caches, lengths, strict=False)]
    return rows.pack(mixed, fresh=False)


def _attend_grown(qkv: Tensor, shape: AttentionShape, begin: int, cache: GrowingCache, length: int) -> Tensor:
    """Attend with one text's rows, from `begin` on: (continuations, heads x head_dim)."""
    _, kv_heads, count, _, dim = cache.own.shape
    heads, width, group = shape.heads, qkv.shape[1], shape.heads // kv_heads
    first_seen = shape.first_seen(cache.past + length)
    first_old, first_own = min(first_seen, cache.past), max(0, first_seen - cache.past)
    past, own_count = cache.past - first_old, length + 1 - first_own
    rows = qkv.narrow(0, begin, count)
    first = rows.storage_offset()
    new = rows.as_strided((2, kv_heads, count, dim), (kv_heads * dim, dim, width, 1), first + heads * dim)
    cache.own.select(3, length).copy_(new)
    q = rows.as_strided((kv_heads, count, group, dim), (group * dim, width, dim, 1), first)
    q = q.clone(memory_format=torch.contiguous_format)  # rounding may depend on a row's address
    old = q.view(kv_heads, -1, dim).bmm(cache.keys.narrow(2, first_old, past))  # one product with the shared keys
    own = q.view(-1, group, dim).bmm(cache.own_keys.narrow(2, first_own, own_count))
    weights = shape.weights(torch.cat([old.view(len(own), group, past), own], dim=2))
    mixed = weights.narrow(2, past, own_count).bmm(cache.own_values.narrow(1, first_own, own_count))
    mixed = mixed.view(kv_heads, -1, dim)
    old_weights = weights.view(kv_heads, -1, past + own_count).narrow(2, 0, past)
    mixed.baddbmm_(old_weights, cache.values.narrow(1, first_old, past))
    return mixed.view(kv_heads, count, -1).transpose(0, 1).reshape(count, -1)


def _attend_one(shape: AttentionShape, query: Tensor, row: Numbers, cache: LayerCache, result: Tensor) -> None:
    """Attend with one new position: an AR step, where every microsecond counts. query, result: (kv_heads, group,
    head_dim); row: its keys, then its values, (2 kv_heads, head_dim).

    numpy copies a row of numbers in half of torch's time, if it can see their memory, and two small products beat
    fused attention.
    """
    position, (stored_keys, stored_values), (keys, values) = cache.length, cache.arrays, cache.by_head
    heads = len(values)
    stored_keys[:, position], stored_values[:, position] = row[:heads], row[heads:]
    cache.length = position + 1
    begin = shape.first_seen(position)
    count = position + 1 - begin
    weights = shape.weights(torch.bmm(query, keys.narrow(2, begin, count)))
    torch.bmm(weights, values.narrow(1, begin, count), out=result)


def _attend_apart(shape: AttentionShape, query: Tensor, row: Numbers, cache: LayerCache, result: Tensor) -> None:
    """`_attend_one` for rows that may begin at an unaligned address, which can change the order of additions."""
    aligned = result.new_empty(result.shape)
    _attend_one(shape, query.clone(), row, cache, aligned)
    result.copy_(aligned)


def _attend_tree(
    shape: AttentionShape,
    q: Tensor,
    numbers: Numbers,
    cache: LayerCache,
    depths: Sequence[int],
    mixed: Tensor,
    attend: Callable[[AttentionShape, Tensor, Numbers, LayerCache, Tensor], None],
) -> None:
    """Attend with the positions of a tree, depth first. For each position, the cache holds its ancestors as if nothing
    else had ever been there. q, mixed: (positions, kv_heads, group, head_dim); numbers: as in `_attend_one`."""
    past, kv_heads = cache.length, cache.keys.shape[1]
    for i, depth in enumerate(depths):
        cache.length = past + depth
        attend(shape, q[i], numbers[i], cache, mixed[i])
    kept = first_branch(depths)  # later branches have overwritten these
    cache.length = end = past + kept
    stored_keys, stored_values = cache.arrays
    stored_keys[:, past:end] = numbers[:kept, :kv_heads].swapaxes(0, 1)
    stored_values[:, past:end] = numbers[:kept, kv_heads:].swapaxes(0, 1)


def _attend_many(
    shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, mask: Tensor | None
) -> Tensor:
    """Attend with several new positions. q, and the result: (positions, kv_heads, group, head_dim)."""
    sizes = q.shape
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q.flatten(1, 2), k, v))
    if sizes[2] > 1:
        q = q.contiguous()  # with groups, a row's address matters: see `_attend_apart`
    keys, values = cache.append(k, v)
    if shape.softcap is not None:
        past = keys.shape[2] - sizes[0]
        mask = seen_keys(sizes[0], past, shape.window, q.device) if mask is None else mask
        return _attend_capped(shape.softcap, q[0].unflatten(0, sizes[1:3]), keys[0], values[0], mask)
    mixed = F.scaled_dot_product_attention(
        q, keys, values, mask, is_causal=mask is None, scale=1.0, enable_gqa=sizes[2] > 1
    )
    return mixed[0].transpose(0, 1).view(sizes)


def _attend_capped(cap: float, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention with a soft cap, which fused attention lacks. q: (kv_heads, group, positions, head_dim); keys, values:
    (kv_heads, all, head_dim); mask: (positions, all) -> (positions, kv_heads, group, head_dim)."""
    keys, values, hidden = keys[:, None].transpose(2, 3), values[:, None], ~mask
    some = max(1, MAX_WEIGHTS // (q.shape[0] * q.shape[1] * keys.shape[3]))
    mixed = []
    for part, unseen in zip(q.split(some, 2), hidden.split(some), strict=True):
        scores = soft_capped(part @ keys, cap).masked_fill_(unseen, MASKED_SCORE)
        mixed.append(scores.softmax(-1) @ values)
    return torch.cat(mixed, dim=2).permute(2, 0, 1, 3)
