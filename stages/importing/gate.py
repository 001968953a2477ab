"""The gate of an import: the model must predict the probe text well enough, or is refused with a reason."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stages.backends.rows import torch_threads
from stages.errors import CheckpointError
from stages.importing.gguf_file import LLAMA3_SCALINGS, half_split, interleaved
from stages.importing.source import EMBEDDING, HEAD, NORM, Source, expected_shapes
from stages.model.architecture import MAX_LAYERS, LlamaArchitecture
from stages.model.layers import soft_capped
from stages.model.llama import LlamaLayer, llama_rotary

# Readings are variants of the same weights that differ in one thing: the likeliest errors of a mis-mapped model. Rows
# in another order only reorder the numbers of a product, so all readings share the matrices as they are.
Tensors = dict[str, Tensor]  # of one layer, by name within the layer
# A module's changed output, from the layer's tensors, the module's input and its output.
Change = Callable[[Tensors, Tensor, Tensor], Tensor]

THETAS = (1e4, 1e5, 5e5, 1e6)
EPSILONS = (1e-6, 1e-5)
MAX_THREADS = 4
AT_ONCE = 4  # readings in one product: one by one, each takes 1.4 times as long, as a text is short
TABLE_ROWS = 512  # rows of the head in one product


@dataclass(frozen=True)
class Variant:
    """One reading of a source."""

    what: str  # the difference from the source's own settings, worded to follow "with"
    architecture: LlamaArchitecture
    changes: Mapping[str, Change] = field(default_factory=dict)  # by the module within a layer
    layers: range = range(MAX_LAYERS)  # layers that differ from the source's own reading


def settings(source: Source) -> Iterator[Variant]:
    """The source's own reading, then readings that change one thing in all layers that no shape reveals: a setting, the
    order of rows within heads, two kinds of tensors of one shape exchanged, or square ones transposed."""
    a, prefix = source.architecture, "layers.0."
    shapes = {name.removeprefix(prefix): s for name, s in expected_shapes(a).items() if name.startswith(prefix)}
    yield Variant("", a)
    others = [Variant(f"rotary theta {x:g} instead of {a.rope_theta:g}", replace(a, rope_theta=x)) for x in THETAS]
    for scaling in (None, *LLAMA3_SCALINGS):
        shown = f"Llama 3's by {scaling.factor:g}" if scaling else "none"
        others.append(Variant(f"another rotary scaling ({shown})", replace(a, rope_scaling=scaling)))
    norms = [name.removesuffix(".weight") for name in shapes if name.endswith(("norm.weight", "after.weight"))]
    for epsilon in EPSILONS:
        by_it = {name: partial(_normed, name, epsilon) for name in norms}
        what = f"norm epsilon {epsilon:g} instead of {a.norm_epsilon:g}"
        others.append(Variant(what, replace(a, norm_epsilon=epsilon), by_it))
    yield from (each for each in others if each.architecture != a)
    if not a.tied_head or HEAD in source.shapes():
        own_head = f"the head's own tensor {HEAD} instead of the tied embedding"
        what = own_head if a.tied_head else "the head tied to the embedding"
        yield Variant(what, replace(a, tied_head=not a.tied_head), layers=range(MAX_LAYERS, MAX_LAYERS))
    q, k, v = torch.arange(a.qkv_width).split([a.query_width, *[a.kv_heads * a.head_dim] * 2])
    gate, up = torch.arange(2 * a.mlp_width).chunk(2)
    for rearranged, shown in ((half_split, "de-interleaved"), (interleaved, "interleaved")):
        order = torch.cat([rearranged(q, a.heads), rearranged(k, a.kv_heads), v])
        what = f"the rows of each query and key head {shown} (head layout)"
        yield Variant(what, a, {"qkv": partial(_in_order, order)})
    exchanges: dict[tuple[str, str], dict[str, Change]] = {
        ("gate", "up"): {"mlp_in": partial(_in_order, torch.cat([up, gate]))},
        ("k", "v"): {"qkv": partial(_in_order, torch.cat([q, v, k]))},
        ("attention_norm", "mlp_norm"): {
            "attention_norm": partial(_normed, "mlp_norm", a.norm_epsilon),
            "mlp_norm": partial(_normed, "attention_norm", a.norm_epsilon),
        },
    }
    for (one, other), changes in exchanges.items():
        if f"{one}.weight" in shapes and f"{other}.weight" in shapes:
            yield Variant(f"the tensors layers.*.{one}.weight and layers.*.{other}.weight exchanged", a, changes)
    firsts = {"q": ("qkv", 0), "k": ("qkv", len(q)), "v": ("qkv", len(q) + len(k))}
    firsts |= {"gate": ("mlp_in", 0), "up": ("mlp_in", len(gate))}
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[0] == shape[1] and not name.startswith(("experts.", "router.")):
            module, first = firsts.get(kind := name.removesuffix(".weight"), (kind, 0))
            yield Variant(f"the tensors layers.*.{name} transposed", a, {module: partial(_transposed, module, first)})


def omissions(source: Source) -> Iterator[Variant]:
    """Readings that omit one half of one layer: if one of its tensors is damaged, the omission does less harm."""
    halves = {"attention_after": "q, k, v, attention_out, attention_norm", "mlp_after": "gate, up, mlp_out, mlp_norm"}
    a = source.architecture
    for i in range(a.total_layers):
        for module, half in halves.items():
            what = f"one half of layer {i} left out (its tensors {half})"
            yield Variant(what, a, {module: lambda *found: torch.zeros_like(found[2])}, range(i, i + 1))


def _in_order(order: Tensor, _tensors: Tensors, _: Tensor, left: Tensor) -> Tensor:
    return left[..., order]


def _normed(name: str, epsilon: float, tensors: Tensors, entered: Tensor, _: Tensor) -> Tensor:
    """Normalize with the weight of the norm `name`."""
    return F.rms_norm(entered, entered.shape[-1:], tensors[f"{name}.weight"], epsilon)


def _transposed(name: str, first: int, tensors: Tensors, entered: Tensor, left: Tensor) -> Tensor:
    """:param first: first row of the square matrix in the module `name`."""
    rows = slice(first, first + entered.shape[-1])
    bias = tensors.get(f"{name}.bias")
    left[..., rows] = F.linear(entered, tensors[f"{name}.weight"][rows].t(), None if bias is None else bias[rows])
    return left


# First of the tensors that are joined into one -> the joined name, and all its tensors.
JOINED = {"q": ("qkv", ("q", "k", "v")), "gate": ("mlp_in", ("gate", "up"))}


def layer_tensors(source: Source, index: int, threads: ThreadPoolExecutor, cut: LlamaArchitecture) -> Tensors:
    """The tensors of one layer as `LlamaLayer` holds them, by name within the layer: queries, keys and values joined,
    and gate and up joined. :param cut: gives the bits of the weights."""
    prefix, whole = f"layers.{index}.", Tensors()
    names = [name for name in source.shapes() if name.startswith(prefix)]
    found = threads.map(partial(source.parts, cut=cut), names)
    tensors = {name.removeprefix(prefix): tensor for each in found for name, tensor in each.items()}
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


# A single pass through a model's layers serves many readings at once. It reads a layer, runs it for every reading, and
# frees it: memory holds one layer, however large the model is. A reading runs from the first layer that differs.
@torch.inference_mode()
def losses(
    source: Source,
    tokens: Sequence[int],
    variants: Sequence[Variant],
    done: Callable[[int], object] = lambda count: None,
) -> list[float]:
    """Cross-entropy (nats per token) of the probe's tokens in each reading.

    :param variants: the first is the source's own reading.
    :param done: called before each layer with the number of layers already run.
    """
    a, numbers = source.architecture, range(len(variants))
    rotary = lru_cache(None)(lambda a, slides: llama_rotary(replace(a, positions=len(tokens)), slides))
    embedded = torch.cat([source.tensor(EMBEDDING, slice(token, token + 1)) for token in tokens])
    hidden = embedded.repeat(len(variants), 1, 1)
    with one_thread_each() as threads:

        def through(i: int) -> None:
            tensors = layer_tensors(source, i, threads, a)

            @torch.inference_mode()
            def run(group: list[int]) -> None:
                these = [variants[number] for number in group]
                tables = torch.stack([rotary(each.architecture, a.slides(i)) for each in these], dim=1)
                hidden[group] = _changed_layer(a, i, tensors, these).clean(hidden[group], tables[:, :, None])[0]

            read = [number for number in numbers if variants[number].layers.start <= i]
            count = math.ceil(len(read) / AT_ONCE)
            list(threads.map(run, [read[first::count] for first in range(count)]))
            hidden[[number for number in numbers if number not in read]] = hidden[0].clone()

        for i in range(a.total_layers):
            done(i)
            through(i)
        return _nats(source, torch.tensor(tokens), variants, hidden, threads)


def _changed_layer(a: LlamaArchitecture, index: int, tensors: Tensors, variants: Sequence[Variant]) -> LlamaLayer:
    """A layer in which each sequence of a batch is another reading. tensors: from `layer_tensors`."""
    with torch.device("meta"):
        layer = LlamaLayer(a, index)
    layer.load_state_dict(tensors, assign=True)

    def change(number: int, changed: Change, _: nn.Module, entered: tuple[Tensor, ...], left: Tensor) -> None:
        left[number] = changed(tensors, entered[0][number], left[number])

    for number, variant in enumerate(variants):
        for name, changed in variant.changes.items() if index in variant.layers else ():
            layer.get_submodule(name).register_forward_hook(partial(change, number, changed))
    return layer.eval().requires_grad_(False)


# Products of a short text are so small that threads within a product mostly wait for each other; readings do not.
@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool of as many threads as torch has, each of which computes on its own."""
    count = torch.get_num_threads()
    with torch_threads(1), ThreadPoolExecutor(min(count, MAX_THREADS)) as threads:
        yield threads


def _nats(
    source: Source, known: Tensor, variants: Sequence[Variant], hidden: Tensor, threads: ThreadPoolExecutor
) -> list[float]:
    """:param hidden: for each reading, (variants, tokens, width)."""
    norm, cap, found = source.tensor(NORM), source.architecture.logit_softcap, torch.empty(len(variants))
    tables = [EMBEDDING if variant.architecture.tied_head else HEAD for variant in variants]
    for table in set(tables):
        these = [i for i, each in enumerate(tables) if each == table]
        epsilons = ((i, variants[i].architecture.norm_epsilon) for i in these)
        x = torch.stack([F.rms_norm(hidden[i, :-1], norm.shape, norm, epsilon) for i, epsilon in epsilons])

        @torch.inference_mode()
        def part(begin: int, x: Tensor = x, table: str = table) -> Tensor:
            rows = source.tensor(table, slice(begin, begin + TABLE_ROWS))
            return soft_capped(x @ rows.t(), cap).logsumexp(2)

        parts = threads.map(part, range(0, source.architecture.vocabulary, TABLE_ROWS))
        rows = torch.cat([source.tensor(table, slice(token, token + 1)) for token in known[1:].tolist()])
        found[these] = (torch.stack(list(parts)).logsumexp(0) - soft_capped((x * rows).sum(2), cap)).mean(1)
    return found.tolist()


# Above this share of ln(V), weights predict plain English no better than random ones: trained models are far below.
NEAR_UNTRAINED = 0.75
CLEAR_NATS = 0.25  # a change must lower the loss by this much to count as the cause


def check_loss(source: Source, tokens: Sequence[int], is_untrained: bool, done: Callable[[int], object]) -> float:
    """The model's cross-entropy on the probe (nats a token).

    Properties that no shape reveals are varied one at a time, in the same pass. Raises CheckpointError if the loss is
    near that of untrained weights, or if a single change lowers it clearly: then the weights are loaded, but
    mis-mapped. :param is_untrained: the weights are known to be random, so their loss says nothing.
    :param done: see `losses`.
    """
    variants = list(settings(source))[: 1 if is_untrained else None]
    found, limit = losses(source, tokens, variants, done), math.log(source.architecture.vocabulary)
    own = found[0] if math.isfinite(found[0]) else math.inf
    if is_untrained and own == math.inf:
        raise CheckpointError("the loss of these weights on the probe text is not finite: they are damaged")
    best, cause = _best(found, variants)
    threshold = min(own - CLEAR_NATS, NEAR_UNTRAINED * limit)
    if is_untrained or (own < NEAR_UNTRAINED * limit and best > threshold):
        return own
    if best > threshold:
        others = [variants[0], *omissions(source)]
        best, cause = _best(losses(source, tokens, others, done), others)
    untrained = f"ln({source.architecture.vocabulary}) = {limit:.2f} is the loss of untrained weights"
    message = f"weights loaded but mis-mapped: {own:.2f} nats a token on the probe text, where {untrained}"
    if best <= threshold:
        raise CheckpointError(f"{message}; with {cause} it is {best:.2f}: that is the likely cause")
    raise CheckpointError(
        f"{message}, and no single change of head layout, rotary embedding, norm epsilon, tied head or one tensor "
        "fixes it; to import random weights, give --untrained"
    )


def _best(nats: Sequence[float], variants: Sequence[Variant]) -> tuple[float, str]:
    finite = ((loss, variant.what) for loss, variant in zip(nats, variants, strict=True) if math.isfinite(loss))
    return min(finite, default=(math.inf, ""))
