"""Drafting and scoring of many continuations at once, with the shipped byte weights."""

import torch
import torch.nn.functional as F
from pathlib import Path

from onesweep.stages.checkpoint.checkpoint import load_ar, load_block

torch.set_num_threads(1)
W = Path(__file__).parents[1] / "weights"


class Model:
    def __init__(self, name):
        if name == "block0":
            b = load_block(W / "chain", 0)
            self.embedding, self.layers, self.rotary = b.embedding, list(b.layers), b.rotary
            self.norm, self.head = b.clean_norm, b.clean_head
        else:
            m = load_ar(W / name)
            self.embedding, self.rotary = m.stages[0].embedding, m.stages[0].rotary
            self.layers = [layer for s in m.stages for layer in s.layers]
            self.norm, self.head = m.stages[-1].norm, m.stages[-1].head

    def prefix(self, text):
        """text (1, n) -> caches [(k, v)], hidden of the last position."""
        x, out = self.embedding(text), []
        for layer in self.layers:
            x, k, v = layer.clean(x, self.rotary[:, : text.shape[1]])
            out.append((k, v))
        return out, x[:, -1]

    def _mlp(self, layer, x, mixed):
        x = x + layer.attention_out(mixed)
        return x + layer.mlp_out(F.gelu(layer.mlp_in(layer.mlp_norm(x))))

    def draft(self, prompts, length, temperature, g):
        """prompts (rows, n), rows continued alike if equal. Returns texts (rows, length), ln q (rows, length)."""
        rows, n = prompts.shape
        same = bool((prompts == prompts[:1]).all())
        caches, h = self.prefix(prompts[:1] if same else prompts)
        heads, hd = caches[0][0].shape[1], caches[0][0].shape[3]
        # keys and values of a shared prompt are read once for all rows
        own = 0 if same else n
        mem = []
        for k, v in caches:
            K, V = torch.empty(rows, heads, own + length, hd), torch.empty(rows, heads, own + length, hd)
            if not same:
                K[:, :, :n], V[:, :, :n] = k, v
            mem.append((K, V, k[0], v[0]))
        h = h.expand(rows, -1)
        texts = torch.empty(rows, length, dtype=torch.long)
        nats = torch.empty(rows, length)
        for i in range(length):
            logp = (self.head(self.norm(h)) / temperature).log_softmax(-1)
            c = logp.double().exp().cumsum(-1)
            u = torch.rand(rows, 1, generator=g, dtype=torch.float64) * c[:, -1:]
            s = (c < u).sum(-1).clamp(max=255)
            texts[:, i], nats[:, i] = s, logp.gather(1, s[:, None])[:, 0]
            if i + 1 == length:
                break
            x = self.embedding(s)[:, None]
            rot = self.rotary[:, n + i : n + i + 1]
            at = own + i
            for layer, (K, V, pk, pv) in zip(self.layers, mem):
                q, k, v = layer.by_head(layer.qkv(layer.attention_norm(x)), rot)
                K[:, :, at : at + 1], V[:, :, at : at + 1] = k, v
                q = q * hd**-0.5
                a = torch.matmul(q, K[:, :, : at + 1].transpose(2, 3))
                if same:
                    first = torch.matmul(q[:, :, 0].transpose(0, 1), pk.transpose(1, 2)).transpose(0, 1)[:, :, None]
                    a = torch.cat([first, a], 3).softmax(-1)
                    m = torch.matmul(a[..., n:], V[:, :, : at + 1])
                    m = m + torch.matmul(a[:, :, 0, :n].transpose(0, 1), pv).transpose(0, 1)[:, :, None]
                else:
                    m = torch.matmul(a.softmax(-1), V[:, :, : at + 1])
                x = self._mlp(layer, x, m.reshape(rows, 1, -1))
            h = x[:, 0]
        return texts, nats

    def score(self, prompts, texts, temperature, piece=32):
        """ln p (rows, length) and entropy in nats at each place (rows, length), at temperature; prompts (1 or rows, n)."""
        n, (rows, length) = prompts.shape[1], texts.shape
        shared = prompts.shape[0] == 1
        if shared:
            caches, last = self.prefix(prompts)
        nats, ent = torch.empty(rows, length), torch.empty(rows, length)
        for at in range(0, rows, piece):
            t = texts[at : at + piece]
            b = len(t)
            if shared:
                x = self.embedding(t[:, :-1])
                rot = self.rotary[:, n : n + length - 1]
                m = torch.ones(length - 1, n + length - 1, dtype=torch.bool).tril(n)
                for layer, (pk, pv) in zip(self.layers, caches):
                    q, k, v = layer.by_head(layer.qkv(layer.attention_norm(x)), rot)
                    k = torch.cat([pk.expand(b, -1, -1, -1), k], 2)
                    v = torch.cat([pv.expand(b, -1, -1, -1), v], 2)
                    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
                    x = self._mlp(layer, x, mixed.transpose(1, 2).reshape(b, length - 1, -1))
                h = torch.cat([last[:, None].expand(b, -1, -1), x], 1)
            else:
                whole = torch.cat([prompts[at : at + piece], t], 1)[:, :-1]
                x = self.embedding(whole)
                for layer in self.layers:
                    x, _, _ = layer.clean(x, self.rotary[:, : whole.shape[1]])
                h = x[:, n - 1 :]
            lp = (self.head(self.norm(h)) / temperature).log_softmax(-1)
            nats[at : at + b] = lp.gather(2, t[..., None])[..., 0]
            ent[at : at + b] = -(lp.exp() * lp).sum(-1)
        return nats, ent
