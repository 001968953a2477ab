"""A layer of the causal stream as two graphs, of what is done before attention and after it, for layers of any family.

Attention itself is torch's (attention.py): it alone depends on what else a request has read, so rows of several
requests go through these graphs together.
"""

from __future__ import annotations

import torch

from stages.backends.graph import FUSED, Graph, Precision
from stages.block import Block
from stages.families import PipelineStage
from stages.layers import Layer
from stages.llama.stage import LlamaLayer

AnyLayer = Layer | LlamaLayer


def precision(int8: bool) -> Precision:
    """Of graphs that several requests go through."""
    return "groups" if int8 else "float32"


def before_graph(part: Block | PipelineStage, layer: AnyLayer, int8: bool = False) -> Graph:
    """x (1, rows, width), cos and sin of each row (rows, head_dim / 2) -> queries, keys and values (1, rows, all heads'
    numbers), queries and keys rotated, queries divided by the root of head_dim."""
    graph, a = Graph(precision(int8)), part.architecture
    x = graph.input("x", 1, "rows", a.width)
    tables = [graph.input(name, "rows", a.head_dim // 2) for name in ("cos", "sin")]
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    scale = torch.ones(queries + 2 * keys)
    scale[:queries] = a.head_dim**-0.5
    bias = None if layer.qkv.bias is None else layer.qkv.bias * scale
    qkv = graph.product(graph.norm(x, layer.attention_norm), layer.qkv.weight * scale[:, None], bias)
    rotated, values = graph.split(qkv, queries + keys, keys)
    first = graph.constant(torch.tensor([0]))  # the tables are of these rows
    rotated = graph.op("RotaryEmbedding", rotated, first, *tables, domain=FUSED)
    graph.output(graph.op("Concat", rotated, values, axis=-1), "qkv")
    return graph


def after_graph(part: Block | PipelineStage, layer: AnyLayer, int8: bool = False) -> Graph:
    """x (1, rows, width), what attention made of it (1, rows, heads x head_dim) -> x after the layer."""
    graph, a = Graph(precision(int8)), part.architecture
    x = graph.input("x", 1, "rows", a.width)
    mixed = graph.input("mixed", 1, "rows", a.heads * a.head_dim)
    x = graph.op("Add", x, graph.linear(mixed, layer.attention_out))
    hidden = graph.linear(graph.norm(x, layer.mlp_norm), layer.mlp_in)
    if isinstance(layer, LlamaLayer):
        gate, up = graph.split(hidden, *[layer.architecture.mlp_width] * 2)
        hidden = graph.op("Mul", graph.op("QuickGelu", gate, domain=FUSED, alpha=1.0), up)  # silu
    else:
        hidden = graph.op("Gelu", hidden)
    graph.output(graph.op("Add", x, graph.linear(hidden, layer.mlp_out)), "features")
    return graph


def head_graph(stage: PipelineStage, int8: bool = False) -> Graph:
    """The last stage's head: x (1, rows, width) -> logits (1, rows, vocabulary)."""
    assert stage.norm is not None, "only the last stage has a head"
    assert stage.head is not None
    graph = Graph(precision(int8))
    x = graph.input("x", 1, "rows", stage.architecture.width)
    graph.output(graph.linear(graph.norm(x, stage.norm), stage.head), "logits")
    return graph
