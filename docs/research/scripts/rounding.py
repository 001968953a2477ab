"""Four bits in four ways: SmolLM2 in bases of its own, each rounded and read. python rounding.py FOLDER TEXT SEEDS

FOLDER: of `onesweep import SmolLM2 --blocks 1 --weights float32`.
"""

import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from stages.checkpoint.checkpoint import load_stage
from stages.model.architecture import GROUP
from stages.model.few_bits import QuantLinear, quantised

WINDOWS, LENGTH = 16, 256


def nearest(weight: Tensor) -> Tensor:
    """From each group's smallest to its largest weight, as before."""
    groups = weight.unflatten(1, (-1, GROUP))
    offsets = groups.amin(2, keepdim=True).half().float()
    scales = ((groups.amax(2, keepdim=True) - offsets) / 15).half().float()
    codes = ((groups - offsets) / scales.masked_fill(scales == 0, 1)).round().clamp(0, 15)
    return (codes * scales + offsets).flatten(1)


def llama_cpp(weight: Tensor) -> Tensor:
    """make_qkx2_quants(15, weights rms + |x|, -1, 0.1, 20) of ggml-quants.c, with scales and offsets in float16."""
    g = weight.unflatten(1, (-1, GROUP))
    w = g.square().mean(2, keepdim=True).sqrt() + g.abs()
    low, high = g.amin(2, keepdim=True), g.amax(2, keepdim=True)

    def error(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return (w * (codes * scale + offset - g).square()).sum(2, keepdim=True)

    offset, scale = low.half().float(), ((high - low) / 15).half().float()
    codes = ((g - offset) / scale.masked_fill(scale == 0, 1)).round().clamp(0, 15)
    best = error(codes, scale, offset)
    for step in range(21):
        tried = ((g - low) * ((14 + 0.1 * step) / (high - low).clamp_min(1e-30))).round().clamp(0, 15)
        sw, sl, sll = (x.sum(2, keepdim=True) for x in (w, w * tried, w * tried * tried))
        sx, sxl = (x.sum(2, keepdim=True) for x in (w * g, w * g * tried))
        det = sw * sll - sl * sl
        s, o = (sw * sxl - sx * sl) / det.clamp_min(1e-30), (sll * sx - sl * sxl) / det.clamp_min(1e-30)
        s, o = s.half().float(), o.half().float()
        less = (det > 0) & ((e := error(tried, s, o)) < best)
        best, scale, offset, codes = (torch.where(less, *pair) for pair in ((e, best), (s, scale), (o, offset), (tried, codes)))
    return (codes * scale + offset).flatten(1)


def ours(weight: Tensor) -> Tensor:
    linear = QuantLinear(weight.shape[1], weight.shape[0], bias=False)
    linear.load_state_dict(quantised(weight))
    return linear.dense(slice(None))


@torch.inference_mode()
def main(folder: Path, text: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    stage = load_stage(folder, 0)
    norms = [stage.norm, *(norm for layer in stage.layers for norm in (layer.attention_norm, layer.mlp_norm))]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text(encoding="utf-8")[:60_000]).ids
    tokens = torch.tensor(ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)
    head = stage.head.weight.clone()
    stage.head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False)  # no longer tied

    def log_p() -> Tensor:
        return torch.stack([stage.next_byte(stage.read(row[None], None))[0].log_softmax(-1) for row in tokens])

    def nats(found: Tensor) -> float:
        return float(-found[:, :-1].gather(2, tokens[:, 1:, None]).mean())

    # gains of norms go into what reads them, so that a change of basis changes nothing
    for layer in stage.layers:
        layer.qkv.weight.data = layer.qkv.weight * layer.attention_norm.weight
        layer.mlp_in.weight.data = layer.mlp_in.weight * layer.mlp_norm.weight
    stage.head.weight.data = head = head * stage.norm.weight
    for norm in norms:
        norm.weight.data = torch.ones_like(norm.weight)
    embedding = stage.embedding.weight.clone()
    reads = [each for layer in stage.layers for each in (layer.qkv, layer.mlp_in)]
    writes = [each for layer in stage.layers for each in (layer.attention_out, layer.mlp_out)]
    whole = {each: each.weight.clone() for each in [*reads, *writes]}
    print("| seed | | error | nats a token | KL | TV | s |\n|---|---|---|---|---|---|---|")
    for seed in seeds:
        basis = torch.linalg.qr(torch.randn(head.shape[1], head.shape[1], generator=torch.Generator().manual_seed(seed)))[0]
        stage.embedding.weight.data, stage.head.weight.data = embedding @ basis, head @ basis
        turned = {each: weight @ basis if each in reads else basis.t() @ weight for each, weight in whole.items()}
        exact = None
        for name, rounding in (("float32", torch.clone), ("nearest", nearest), ("llama.cpp's", llama_cpp), ("ours", ours)):
            begin = time.process_time()
            rounded = {each: rounding(weight) for each, weight in turned.items()}
            took_s = time.process_time() - begin
            for each, weight in rounded.items():
                each.weight.data = weight
            found = log_p()
            exact = found if exact is None else exact
            wrong = sum(float((rounded[each] - weight).square().sum()) for each, weight in turned.items())
            error = math.sqrt(wrong / sum(float(weight.square().sum()) for weight in turned.values()))
            kl = float((exact.exp() * (exact - found)).sum(-1).mean())
            tv = float((exact.exp() - found.exp()).abs().sum(-1).mean() / 2)
            print(f"| {seed} | {name} | {error:.4f} | {nats(found):.4f} | {kl:.4f} | {tv:.4f} | {took_s:.1f} |", flush=True)


main(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3].split(",")])
