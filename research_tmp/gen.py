"""gen.py FROM TO PARTS TEMPS: pools of drafts with their scores, one .npz a prompt and part, for prompts FROM..TO of the order."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from models import Model

from onesweep.loadtest.quality.prompts import cut_prompts, held_out_documents

HERE = Path(__file__).parent
DATA = Path("/work/shared/data/text")
N, L, HALF = 200, 256, 128
ORDER = np.random.default_rng(0).permutation(N)


def prompts():
    return cut_prompts(held_out_documents(DATA), N, 64, L, 0)


def halves(x):
    x = x.double()
    return torch.stack([x[:, :HALF].sum(1), x[:, HALF:].sum(1)], 1).numpy()


def saved(path, make):
    if not path.exists():
        begin = time.time()
        arrays = make()
        np.savez(path.with_suffix(".tmp.npz"), seconds=time.time() - begin, **arrays)
        path.with_suffix(".tmp.npz").rename(path)
    return np.load(path)


@torch.inference_mode()
def main():
    models = {name: Model(name) for name in ("local", "scorer", "ar", "block0")}
    local, scorer, ar = models["local"], models["scorer"], models["ar"]
    asked, (lo, hi), parts = prompts().asked, map(int, sys.argv[1:3]), sys.argv[3].split(",")
    (HERE / "cache").mkdir(exist_ok=True)
    for i in ORDER[lo:hi].tolist():
        raw = torch.tensor([list(asked[i].prompt)])

        def gen(tag):
            return torch.Generator().manual_seed(i * 1000003 + tag)

        def pool(count, t_draft, t, tag, drafter=local, prompt=raw, length=L):
            texts, q = drafter.draft(prompt.expand(count, -1), length, t_draft, gen(tag))
            with torch.autocast("cpu", torch.bfloat16):  # moves a log weight by 0.3 nats; their spread is 17
                p, ent = scorer.score(prompt, texts, t)
            cut = halves if length == L else (lambda x: x.double().sum(1, keepdim=True).numpy())
            return {"texts": texts.numpy().astype(np.uint8), "q": cut(q), "p": cut(p), "ent": cut(ent)}

        def name(part, t):
            return HERE / "cache" / f"{i:03d}-{part}-{t:g}.npz"

        def tensor(x):
            return torch.tensor(x.astype(np.int64))

        for t in map(float, sys.argv[4].split(",")):
            k = round(100 * t)  # a stream of random numbers for each temperature
            if "base" in parts:
                def base():
                    a = pool(64, t, t, k)
                    pa, _ = ar.score(raw, tensor(a["texts"][:32]), t)
                    return a | {"p_ar": halves(pa)}

                saved(name("base", t), base)
            if "more" in parts:
                saved(name("more", t), lambda: pool(64, t, t, 10000 + k))
            for label, kept, which in (("a64", 1, 0), ("a32", 1, 0), ("b64", 4, 0), ("c64", 1, None)):
                if label not in parts:
                    continue

                def two():
                    b, tag, m = np.load(name("base", t)), 20000 + 1000 * ord(label[0]) + k, int(label[1:])
                    log_weight = b["p"] - b["q"]
                    share = torch.tensor(log_weight.sum(1) if which is None else log_weight[:, which])[:m].softmax(0)
                    u = (torch.rand(1, generator=gen(tag)).double() + torch.arange(kept)) / kept
                    chosen = torch.searchsorted(share.cumsum(0), u).clamp(max=m - 1).tolist()
                    made = []
                    for n, c in enumerate(chosen):
                        prompt = torch.cat([raw, tensor(b["texts"][c : c + 1, :HALF])], 1)
                        made.append(pool(m // kept, t, t, tag + 100000 * (n + 1), prompt=prompt, length=HALF))
                    return {key: np.stack([x[key] for x in made]) for key in made[0]} | {"chosen": np.array(chosen)}

                saved(name(label, t), two)
            if "drafts" in parts:
                for r in (0.9, 0.95, 1.05, 1.1):
                    saved(name(f"r{r:g}", t), lambda: pool(32, r * t, t, 30000 + k))

                def block():
                    a = pool(32, t, t, 40000 + k, drafter=models["block0"])
                    other, _ = local.score(raw, tensor(a["texts"]), t)
                    mine, _ = models["block0"].score(raw, tensor(np.load(name("base", t))["texts"][:32]), t)
                    return a | {"q_local": halves(other), "base_q_block": halves(mine)}

                saved(name("block", t), block)
        print(i, time.strftime("%H:%M:%S"), flush=True)


if __name__ == "__main__":
    main()
