"""The AR model: cutting it into stages, caching and batching change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stages.model.pipeline import ArModel, cache_bytes, new_caches

MakeAr = Callable[..., ArModel]
TOLERANCE = 1e-4  # float32, sums in another order


def text(batch: int = 1, length: int = 48) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0))


def test_stages_in_sequence_are_the_model(make_ar: MakeAr) -> None:
    model, known = make_ar(parts=3), text(2)
    x = known
    for stage in model.stages:
        x = stage.read(x)
    assert torch.equal(model.stages[-1].next_byte(x), model(known))


@pytest.mark.parametrize(("parts", "layers"), [(1, 4), (2, 2), (4, 1)])
def test_the_cut_does_not_change_the_model(make_ar: MakeAr, parts: int, layers: int) -> None:
    """Layers of any cut, put one after another, are the same weights in the same order."""
    whole, cut = make_ar(parts=1, layers=4), make_ar(parts=parts, layers=layers)
    flat = [layer for stage in whole.stages for layer in stage.layers]
    pieces = [layer for stage in cut.stages for layer in stage.layers]
    for piece, layer in zip(pieces, flat, strict=True):
        piece.load_state_dict(layer.state_dict())
    cut.stages[0].embedding.load_state_dict(whole.stages[0].embedding.state_dict())
    cut.stages[-1].norm.load_state_dict(whole.stages[-1].norm.state_dict())
    cut.stages[-1].head.load_state_dict(whole.stages[-1].head.state_dict())
    assert torch.equal(cut(text()), whole(text()))


@pytest.mark.parametrize("sizes", [[48], [1] * 48, [7, 1, 30, 10]])
def test_cached_is_the_same_as_uncached(make_ar: MakeAr, sizes: list[int]) -> None:
    model, known = make_ar(), text(2)
    a = model.architecture
    caches = [new_caches(a.layers, a, 48, batch=2) for _ in range(a.parts)]
    pieces = [model(piece, caches) for piece in known.split(sizes, dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), model(known), atol=TOLERANCE)


def test_cached_and_uncached_write_the_same_text(make_ar: MakeAr) -> None:
    model, prompt = make_ar(), text(length=8)
    a = model.architecture
    known = prompt
    for _ in range(40):
        known = torch.cat([known, model(known)[:, -1:].argmax(dim=-1)], dim=1)
    caches = [new_caches(a.layers, a, 48) for _ in range(a.parts)]
    new, written = prompt, [prompt]
    for _ in range(40):
        new = model(new, caches)[:, -1:].argmax(dim=-1)
        written.append(new)
    assert torch.equal(torch.cat(written, dim=1), known)


def test_a_batch_is_its_sequences(make_ar: MakeAr) -> None:
    model, known = make_ar(), text(3)
    together = model(known)
    for i in range(3):
        assert torch.allclose(together[i], model(known[i : i + 1])[0], atol=TOLERANCE)


def test_logits_do_not_depend_on_later_bytes(make_ar: MakeAr) -> None:
    model, known = make_ar(), text()
    changed = known.clone()
    changed[:, 20] ^= 1
    assert torch.equal(model(known)[:, :20], model(changed)[:, :20])
    assert not torch.allclose(model(known)[:, 20:], model(changed)[:, 20:], atol=0.01)


def test_only_the_ends_embed_and_predict(make_ar: MakeAr) -> None:
    first, middle, last = make_ar(parts=3).stages
    assert (first.embedding is None, middle.embedding is None, last.embedding is None) == (False, True, True)
    assert (first.head is None, middle.head is None, last.head is None) == (True, True, False)
    with pytest.raises(AssertionError, match="only the last stage"):
        middle.next_byte(torch.zeros(1, 1, 32))


def test_a_caches_size_is_known_before_it_is_made(make_ar: MakeAr) -> None:
    a = make_ar().architecture
    caches = new_caches(3, a, 77)
    assert cache_bytes(3, a, 77) == sum(c.keys.nbytes + c.values.nbytes for c in caches)
