"""Attention of packed rows, one piece at a time: its shapes depend on that piece alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stages.backends.rows import Rows
from stages.layers import LayerCache


def rotary_rows(rotary: Tensor) -> Tensor:
    """Factors for `rotate_rows` from a rotary table (2, positions, head_dim / 2).

    (positions, 2, 2, 1, 2, head_dim / 2): cos and signed sin; for queries, divided by the root of head_dim as
    attention wants them, and for keys; for every head; for both halves of a head.
    """
    cos, sin = rotary
    factors = torch.stack([torch.stack([cos, cos], dim=1), torch.stack([-sin, sin], dim=1)], dim=1)
    scale = (2 * cos.shape[1]) ** -0.5
    return torch.stack([factors * scale, factors], dim=2)[:, :, :, None]


def rotate_rows(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of queries and keys in place. qkv: (rows, 3 width); cos, sin: from `rotary_rows`."""
    rows, width = qkv.shape
    both = qkv.view(rows, 3, heads, 2, width // (6 * heads))[:, :2]
    swapped = both.roll(1, 3)
    both.mul_(cos).addcmul_(swapped, sin)


def causal_masks(lengths: Sequence[int], new: Sequence[int]) -> list[Tensor | None]:
    """For each piece of `new` positions after `length`: which keys they see; None where no mask is needed."""
    return [
        torch.ones(count, past + count, dtype=torch.bool).tril(past) if past and count > 1 else None
        for past, count in zip(lengths, new, strict=True)
    ]


def attend_clean(
    qkv: Tensor, rows: Rows, heads: int, caches: Sequence[LayerCache], masks: Sequence[Tensor | None], few: int
) -> Tensor:
    """Append each piece's keys and values to its cache, and attend over it. qkv: (rows, 3 width) -> (rows, width).

    :param few: a piece of up to so many positions after others is computed position by position, as if they came one
        at a time: to the last bit the same.
    """
    dim = qkv.shape[1] // (3 * heads)
    mixed = torch.zeros(rows.total, heads, dim)
    split = qkv.view(rows.total, 3, heads, dim)
    numbers = split.numpy()
    if rows.single:  # one call instead of one for each piece
        queries, results = split[:, 0].unsqueeze(2).unbind(0), mixed.unsqueeze(2).unbind(0)
        for i, cache in enumerate(caches):
            _attend_one(queries[i], numbers[i], cache, results[i])
        return mixed.view(rows.total, -1)
    for (begin, end), cache, mask in zip(rows, caches, masks, strict=True):
        if end - begin == 1 or (end - begin <= few and cache.length):
            for i in range(begin, end):
                _attend_one(split[i, 0].unsqueeze(1), numbers[i], cache, mixed[i].unsqueeze(1))
        else:
            mixed[begin:end] = _attend_many(split[begin:end], cache, mask)
    return mixed.view(rows.total, -1)


def attend_noisy(qkv: Tensor, rows: Rows, heads: int, caches: Sequence[LayerCache]) -> Tensor:
    """Each piece's slots see the clean positions in its cache, and each other. qkv: (rows, 3 width)."""
    dim = qkv.shape[1] // (3 * heads)
    mixed = []
    for split, cache in zip(qkv.view(rows.total, 3, heads, dim).split(rows.sizes), caches, strict=False):
        q, k, v = split.permute(1, 2, 0, 3).unsqueeze(1)
        keys, values = cache.stored()
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        mixed.append(F.scaled_dot_product_attention(q, keys, values, scale=1.0)[0].transpose(0, 1).flatten(1))
    return rows.pack(mixed, fresh=False)


def _attend_one(query: Tensor, row: NDArray[np.float32], cache: LayerCache, result: Tensor) -> None:
    """One new position: an AR step, where every microsecond counts. query, result: (heads, 1, head_dim).

    numpy copies a row of numbers in half the time that torch takes, and two small products beat fused attention.
    """
    position, keys, values = cache.length, cache.keys, cache.values
    keys.numpy()[0, :, position] = row[1]
    values.numpy()[0, :, position] = row[2]
    cache.length = end = position + 1
    _, heads, _, dim = keys.shape
    _, apart, stride, _ = keys.stride()
    weights = torch.bmm(query, keys.as_strided((heads, dim, end), (apart, 1, stride))).softmax(-1)
    torch.bmm(weights, values.as_strided((heads, end, dim), (apart, stride, 1)), out=result)


def _attend_many(split: Tensor, cache: LayerCache, mask: Tensor | None) -> Tensor:
    """Several new positions. split: (positions, 3, heads, head_dim) -> (positions, heads, head_dim)."""
    q, k, v = split.permute(1, 2, 0, 3).unsqueeze(1)
    keys, values = cache.append(k, v)
    mixed = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None, scale=1.0)
    return mixed[0].transpose(0, 1)
