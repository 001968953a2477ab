"""The gate of an import: the model must read the probe text as such a model does, or is refused with a reason."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.errors import CheckpointError
from stages.importing.gguf_file import half_split, interleaved
from stages.importing.source import EMBEDDING, HEAD, NORM, Source, expected_shapes
from stages.model.architecture import LlamaArchitecture, RopeScaling
from stages.model.layers import soft_capped
from stages.model.llama import LlamaLayer, llama_rotary

# Readings of the same weights that differ in one thing: what a mis-mapped model most likely got wrong.
Tensors = dict[str, Tensor]  # of one layer, by their names within it
Change = Callable[[Tensors, LlamaArchitecture], Tensors]

THETAS = (1e4, 1e5, 5e5, 1e6)
EPSILONS = (1e-6, 1e-5)
MAX_THREADS = 4  # each may hold a layer of its own
SCALINGS = (None, RopeScaling(8.0, 1.0, 4.0, 8192), RopeScaling(32.0, 1.0, 4.0, 8192))


@dataclass(frozen=True)
class Variant:
    """One reading of a source."""

    what: str  # the difference from the source's own settings, worded to follow "with"
    architecture: LlamaArchitecture
    change: Change | None = None  # none: the weights as they are
    only: int | None = None  # the layer that the change is for; None for all

    def layer(self, tensors: Tensors, index: int, unchanged: Tensors) -> LlamaLayer:
        """A layer of this reading. tensors: the source's, of that layer; unchanged: the same, `joined`."""
        if self.change is not None and self.only in (None, index):
            unchanged = joined(self.change(tensors, self.architecture))
        with torch.device("meta"):
            layer = LlamaLayer(self.architecture, index)
        layer.load_state_dict(unchanged, assign=True)
        return layer.eval().requires_grad_(False)


def settings(source: Source) -> Iterator[Variant]:
    """The source's own reading, then those that change one thing in all layers that no shape betrays."""
    a = source.architecture
    yield Variant("", a)
    yield Variant("the rows of each query and key head de-interleaved (head layout)", a, partial(_heads, half_split))
    yield Variant("the rows of each query and key head interleaved (head layout)", a, partial(_heads, interleaved))
    for theta in THETAS:
        if theta != a.rope_theta:
            yield Variant(f"rotary theta {theta:g} instead of {a.rope_theta:g}", replace(a, rope_theta=theta))
    for scaling in SCALINGS:
        if scaling != a.rope_scaling:
            shown = f"Llama 3's by {scaling.factor:g}" if scaling else "none"
            yield Variant(f"another rotary scaling ({shown})", replace(a, rope_scaling=scaling))
    for epsilon in EPSILONS:
        if epsilon != a.norm_epsilon:
            changed = replace(a, norm_epsilon=epsilon)
            yield Variant(f"norm epsilon {epsilon:g} instead of {a.norm_epsilon:g}", changed)
    if not a.tied_head:
        yield Variant("the head tied to the embedding", replace(a, tied_head=True))
    elif HEAD in source.shapes():
        yield Variant(f"the head's own tensor {HEAD} instead of the tied embedding", replace(a, tied_head=False))
    yield from _kinds(a)


def omissions(source: Source) -> Iterator[Variant]:
    """Readings that leave one half of one layer out: where a tensor is damaged, that does less harm."""
    a = source.architecture
    for i in range(sum(a.layers)):
        for name in ("attention_out.weight", "mlp_out.weight"):
            half = "q, k, v, attention_out, attention_norm" if name.startswith("att") else "gate, up, mlp_out, mlp_norm"
            what = f"one half of layer {i} left out (its tensors {half})"
            yield Variant(what, a, partial(_mend, name, torch.zeros_like), only=i)


def _kinds(a: LlamaArchitecture) -> Iterator[Variant]:
    """Two kinds of tensors of one shape exchanged, or square ones transposed."""
    prefix = "layers.0."
    shapes = {name.removeprefix(prefix): s for name, s in expected_shapes(a).items() if name.startswith(prefix)}
    for one, other in (("gate", "up"), ("k", "v"), ("attention_norm", "mlp_norm")):
        names = f"{one}.weight", f"{other}.weight"
        if all(name in shapes for name in names):
            yield Variant(
                f"the tensors layers.*.{names[0]} and layers.*.{names[1]} exchanged", a, partial(_exchange, *names)
            )
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[0] == shape[1] and not name.startswith("experts."):
            yield Variant(
                f"the tensors layers.*.{name} transposed", a, partial(_mend, name, lambda x: x.t().contiguous())
            )


# The first tensor of each that is stored as one -> its name, and all of them.
JOINED = {"q": ("qkv", ("q", "k", "v")), "gate": ("mlp_in", ("gate", "up"))}


def joined(tensors: Tensors) -> Tensors:
    """A layer's tensors as `LlamaLayer` has them: queries, keys and values in one, gate and up in one."""
    whole: Tensors = {}
    for name, tensor in tensors.items():
        *expert, kind, end = name.split(".")
        apart = "".join(f"{each}." for each in expert)
        place = f"mixture.{apart}" if expert or kind == "router" else ""
        if kind in JOINED:
            ours, theirs = JOINED[kind]
            whole[f"{place}{ours}.{end}"] = torch.cat([tensors[f"{apart}{each}.{end}"] for each in theirs])
        elif kind not in ("k", "v", "up"):
            whole[f"{place}{kind}.{end}"] = tensor
    return whole


def _heads(rearranged: Callable[[Tensor, int], Tensor], tensors: Tensors, a: LlamaArchitecture) -> Tensors:
    counts = {"q": a.heads, "k": a.kv_heads}
    kinds = ((name, name.partition(".")[0], x) for name, x in tensors.items())
    return {name: rearranged(x, counts[kind]) if kind in counts else x for name, kind, x in kinds}


def _exchange(one: str, other: str, tensors: Tensors, _: LlamaArchitecture) -> Tensors:
    if tensors[one].shape != tensors[other].shape:
        return tensors
    return {**tensors, one: tensors[other], other: tensors[one]}


def _mend(name: str, mended: Callable[[Tensor], Tensor], tensors: Tensors, _: LlamaArchitecture) -> Tensors:
    return {each: mended(x) if each.endswith(name) else x for each, x in tensors.items()}


# One way through a model's layers, for many readings of them at once. A layer is read, run for every reading, and let
# go: memory holds one layer, however large the model is.
@torch.inference_mode()
def losses(
    source: Source,
    tokens: Sequence[int],
    variants: Sequence[Variant],
    done: Callable[[int], object] = lambda count: None,
) -> list[float]:
    """Cross-entropy (nats a token) of the probe's tokens in each reading.

    :param done: called before each layer with the number of those that were run.
    """
    rotary = lru_cache(None)(lambda a, slides: llama_rotary(replace(a, positions=len(tokens)), slides))
    embedded = torch.cat([source.tensor(EMBEDDING, slice(token, token + 1)) for token in tokens])
    hidden = [embedded[None]] * len(variants)
    with one_thread_each() as threads:

        def through(i: int) -> list[Tensor]:
            tensors = layer_tensors(source, i, threads, source.architecture)
            whole = joined(tensors)

            @torch.inference_mode()
            def run(variant: Variant, x: Tensor) -> Tensor:
                a = variant.architecture
                return variant.layer(tensors, i, whole).clean(x, rotary(a, a.slides(i)))[0]

            return list(threads.map(run, variants, hidden))

        for i in range(sum(source.architecture.layers)):
            done(i)
            hidden = through(i)
    return _nats(source, torch.tensor(tokens), variants, hidden)


# Products of a short text are so small that threads within one mostly wait for each other, and beside other processes
# for long: SmolLM2's gate took 66 s in place of 6 on two busy cores. Readings need not wait for each other.
@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """Threads, as many as torch has, each of which computes by itself."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(count, MAX_THREADS)) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


def layer_tensors(source: Source, index: int, threads: ThreadPoolExecutor, cut: LlamaArchitecture) -> Tensors:
    """The tensors of one layer as those of `cut` hold them, by their names within it."""
    prefix = f"layers.{index}."
    names = [name for name in source.shapes() if name.startswith(prefix)]
    found = threads.map(partial(source.parts, cut=cut), names)
    return {name.removeprefix(prefix): tensor for each in found for name, tensor in each.items()}


def _nats(source: Source, known: Tensor, variants: Sequence[Variant], hidden: Sequence[Tensor]) -> list[float]:
    weight, found = source.tensor(NORM), [0.0] * len(variants)
    for tied in {variant.architecture.tied_head for variant in variants}:
        these = [i for i, variant in enumerate(variants) if variant.architecture.tied_head == tied]
        epsilons = ((i, variants[i].architecture.norm_epsilon) for i in these)
        x = torch.cat([F.rms_norm(hidden[i][0, :-1], weight.shape, weight, epsilon) for i, epsilon in epsilons])
        logits = torch.empty(len(x), source.architecture.vocabulary)
        for rows, piece in source.pieces(EMBEDDING if tied else HEAD):
            logits[:, rows] = x @ piece.t()
        if (cap := source.architecture.logit_softcap) is not None:
            logits = soft_capped(logits, cap)
        for i, each in zip(these, logits.split(len(known) - 1), strict=True):
            found[i] = float(F.cross_entropy(each, known[1:]))
    return found


# From this share of ln(V) on, weights say no more of plain English than random ones: trained models are far below.
NEAR_UNTRAINED = 0.75
CLEAR_NATS = 0.25  # by so much a change must lower the loss to be held for the cause


def check_loss(
    source: Source,
    tokens: Sequence[int],
    is_untrained: bool = False,
    done: Callable[[int], object] = lambda count: None,
) -> float:
    """The model's cross-entropy on the probe (nats a token).

    What no shape betrays is tried otherwise, one thing at a time, in the same pass. Raises CheckpointError when
    the loss is near what untrained weights give, or when one change lowers it clearly: then the weights are loaded,
    but mis-mapped. :param is_untrained: the weights are known to be random, and say nothing.
    :param done: as of `losses`.
    """
    variants = list(settings(source))
    if is_untrained:
        (nats,) = losses(source, tokens, variants[:1], done)
        if not math.isfinite(nats):
            raise CheckpointError("these weights give no finite loss on the probe text: they are damaged")
        return nats
    limit = math.log(source.architecture.vocabulary)
    found = losses(source, tokens, variants, done)
    own = found[0] if math.isfinite(found[0]) else math.inf
    is_trained = own < NEAR_UNTRAINED * limit
    best, cause = _best(found, variants)
    mended = min(own - CLEAR_NATS, NEAR_UNTRAINED * limit)
    if is_trained and best > mended:
        return own
    if best > mended:
        others = list(omissions(source))
        best, cause = _best(losses(source, tokens, others, done), others)
    untrained = f"ln({source.architecture.vocabulary}) = {limit:.2f} is what untrained weights give"
    said = f"weights loaded but mis-mapped: {own:.2f} nats a token on the probe text, where {untrained}"
    if best <= mended:
        raise CheckpointError(f"{said}; with {cause} it is {best:.2f}: most likely that is the cause")
    raise CheckpointError(
        f"{said}, and no single change of head layout, rotary embedding, norm epsilon, tied head or one tensor mends "
        "it; random weights are imported with --untrained"
    )


def _best(nats: Sequence[float], variants: Sequence[Variant]) -> tuple[float, str]:
    finite = ((loss, variant.what) for loss, variant in zip(nats, variants, strict=True) if math.isfinite(loss))
    return min(finite, default=(math.inf, ""))
