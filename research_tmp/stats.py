"""Share of the gap at matched entropy, by three judges: SmolLM2, weights/ar (T = 1) and the 6-gram model."""
import hashlib, sys, json
from pathlib import Path
import numpy as np, torch
from gen import HERE, N, L, HALF, ORDER, DATA, prompts
from models import Model

T = {0.8: 0.88, 1.0: 1.05}  # temperature of `ar`, and of the arms that are compared with it
C = HERE / "cache"

def done(part, t, count=N):
    ids = [i for i in ORDER.tolist()[:count] if (C / f"{i:03d}-{part}-{t:g}.npz").exists()]
    return ids

def load(i, part, t):
    return np.load(C / f"{i:03d}-{part}-{t:g}.npz")

def draw(logw, rng):
    w = np.exp(logw - logw.max()); w /= w.sum()
    return int(rng.choice(len(w), p=w)), 1 / (w**2).sum()

def chosen(arm, i, t, rng, group=0):
    """(text bytes, effective) of an arm for prompt i."""
    b = load(i, "base", t)
    q, p, x = b["q"], b["p"], b["texts"]
    if arm[0] == "m" and arm[1:].isdigit():  # m16.. the first M by weight; 128 with `more`
        m = int(arm[1:])
        if group:
            q, p, x = (v[group * m :] for v in (q, p, x))
        if m > 64:
            more = load(i, "more", t)
            q, p, x = (np.concatenate([b[k], more[k]]) for k in ("q", "p", "texts"))
        c, e = draw((p - q).sum(1)[:m], rng)
        return x[c], e
    if arm.startswith("likely"):  # best by the scorer's likelihood
        m = int(arm[6:])
        at = slice(group * m, group * m + m)
        return x[at][p.sum(1)[at].argmax()], 1
    if arm.startswith("own"):  # control: best by the drafter's own
        m = int(arm[3:])
        at = slice(group * m, group * m + m)
        return x[at][q.sum(1)[at].argmax()], 1
    if arm.startswith("ar"):  # weights/ar as the scorer
        m = int(arm[2:])
        c, e = draw((b["p_ar"] - q[: len(b["p_ar"])]).sum(1)[:m], rng)
        return x[c], e
    if arm.startswith("half"):  # weights to the power 1/2
        c, e = draw(0.5 * (p - q).sum(1)[: int(arm[4:])], rng)
        return x[c], e
    if arm[0] in "abc" and arm[1:].isdigit():
        z = load(i, arm, t)
        logw = z["p"][..., 0] - z["q"][..., 0]
        first = z["chosen"]
        texts = np.concatenate([np.repeat(x[first][:, None, :HALF], z["texts"].shape[1], 1), z["texts"]], 2)
        flat, w = texts.reshape(-1, L), logw.reshape(-1)
        if arm[0] == "c":  # the old second half is one of them
            old = int(first[0])
            flat, w = np.concatenate([flat, x[old : old + 1]]), np.append(w, (p - q)[old, 1])
        c, e = draw(w, rng)
        return flat[c], e
    if arm[0] == "r":
        z = load(i, arm, t)
        c, e = draw((z["p"] - z["q"]).sum(1), rng)
        return z["texts"][c], e
    if arm == "block32":
        z = load(i, "block", t)
        c, e = draw((z["p"] - z["q"]).sum(1), rng)
        return z["texts"][c], e
    if arm in ("mix32", "mix64"):  # half local, half block 0, balance heuristic
        z, n = load(i, "block", t), int(arm[3:]) // 2
        qa = np.logaddexp(q.sum(1)[:n], z["base_q_block"].sum(1)[:n]) - np.log(2)
        qb = np.logaddexp(z["q_local"].sum(1)[:n], z["q"].sum(1)[:n]) - np.log(2)
        w = np.concatenate([p.sum(1)[:n] - qa, z["p"].sum(1)[:n] - qb])
        c, e = draw(w, rng)
        return np.concatenate([x[:n], z["texts"][:n]])[c], e
    raise KeyError(arm)

class Judges:
    def __init__(self, asked):
        self.asked, self.path = asked, HERE / "judged.json"
        self.known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.ar = self.smol = None
    def key(self, kind, i, text): return f"{kind}{i}-" + hashlib.md5(text.tobytes()).hexdigest()
    def bits(self, kind, ids, texts):
        missing = [(i, x) for i, x in zip(ids, texts) if self.key(kind, i, x) not in self.known]
        if missing:
            values = (self._ar if kind == "ar" else self._smol)(missing)
            for (i, x), v in zip(missing, values): self.known[self.key(kind, i, x)] = float(v)
            self.path.write_text(json.dumps(self.known))
        return np.array([self.known[self.key(kind, i, x)] for i, x in zip(ids, texts)])
    @torch.inference_mode()
    def _ar(self, pairs):
        self.ar = self.ar or Model("ar")
        out = []
        for i, x in pairs:
            nats, _ = self.ar.score(torch.tensor([list(self.asked[i].prompt)]), torch.tensor(x.astype(np.int64))[None], 1.0)
            out.append(float(nats.sum()) / -np.log(2))
        return out
    def _smol(self, pairs):
        from onesweep.loadtest.quality.judge import open_judge
        torch.set_num_threads(1)
        self.smol = self.smol or open_judge("smollm2-135m", None)
        return self.smol.judge([self.asked[i].prompt for i, _ in pairs], [x.tobytes() for _, x in pairs], lambda n: None).bits


def surprisals(texts):
    from onesweep.loadtest.quality.measures import surprisals as f
    a, b = f([x.tobytes() for x in texts])
    return np.array(a), np.array(b)

GROUPS = {"m16": 4, "m32": 2, "own16": 4, "own32": 2, "likely16": 4, "likely32": 2} if len(sys.argv) > 1 and sys.argv[1] == "ar" else {"m16": 2, "own16": 2, "likely16": 2, "m32": 2}

def table(arms, t_ref, kind, ids, judges, groups=None, refs=2, seed=0):
    """Rows (arm, n, entropy gap, bits at ar's entropy, share, low, high, effective)."""
    t = T[t_ref]
    def figures(samples):
        b, h = [], []
        for texts in samples:
            b.append(judges.bits(kind, ids, texts) / L)
            s, g = surprisals(texts)
            h.append(s / g)
        return np.mean(b, 0), np.mean(h, 0)
    def ref(name, temp):
        a = np.load(C / f"ref-{name}-{temp:g}.npy")
        return figures([[a[i, k] for i in ids] for k in range(refs)])
    draws = np.concatenate([np.arange(len(ids))[None], np.random.default_rng(seed).integers(0, len(ids), (2000, len(ids)))])
    d = lambda pair: tuple(v[draws].mean(1) for v in pair)
    ar = d(ref("ar", t_ref))
    cold, warm = ((0.8, 0.9) if t_ref == 0.8 else (1.0, 1.06))
    lo, hi = d(ref("local", cold)), d(ref("local", warm))
    slope = (hi[0] - lo[0]) / (hi[1] - lo[1])
    local = lo[0] + slope * (ar[1] - lo[1])
    slope0 = slope[0]
    print(f"T={t_ref} judge={kind} n={len(ids)}: ar {ar[0][0]:.3f} at {ar[1][0]:.3f}; local {local[0]:.3f} there (own {lo[0][0]:.3f} at {lo[1][0]:.3f}); slope {slope0:.3f}; gap {local[0]-ar[0][0]:.3f} {np.percentile(local[1:]-ar[0][1:],[2.5,97.5]).round(3)}")
    rows = []
    for arm in arms:
        samples, eff = [], []
        for g in range((groups or GROUPS).get(arm, 1)):
            got = [chosen(arm, i, t, np.random.default_rng([i, g, 7]), g) if g else chosen(arm, i, t, np.random.default_rng([i, g, 7])) for i in ids]
            samples.append([x for x, _ in got]); eff += [e for _, e in got]
        a = d(figures(samples))
        at = a[0] + slope0 * (ar[1] - a[1])
        share = (local - at) / (local - ar[0])
        low, high = np.percentile(share[1:], [2.5, 97.5])
        rows.append((arm, len(ids), a[1][0] - ar[1][0], a[0][0], at[0], share[0], low, high, np.mean(eff)))
        print(f"  {arm:10} dH {rows[-1][2]:+.3f} bits {a[0][0]:.3f} at {at[0]:.3f} share {share[0]:.2f} [{low:.2f}, {high:.2f}] eff {np.mean(eff):.2f}", flush=True)
    return rows

if __name__ == "__main__":
    kind, t_ref, parts, arms = sys.argv[1], float(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(",")
    most = int(sys.argv[5]) if len(sys.argv) > 5 else N
    ids = [i for i in ORDER.tolist() if all((C / f"{i:03d}-{p}-{T[t_ref]:g}.npz").exists() for p in parts)][:most]
    table(arms, t_ref, kind, ids, Judges(prompts().asked))
