"""Texts of `ar` and of `scorer` alone, and more temperatures of `local`: two a prompt, all prompts at once."""

import numpy as np
import torch
from gen import HERE, L, N, prompts
from models import Model

with torch.inference_mode():
    asked = prompts().asked
    for name, temps in (("ar", (0.8, 1.0)), ("local", (0.8, 0.9, 1.0, 1.06))):
        model = Model(name)
        for t in temps:
            out = np.zeros((N, 2, L), np.uint8)
            for at in range(0, N, 50):
                rows = [i for i in range(at, at + 50) if len(asked[i].prompt) == 64]
                p = torch.tensor([list(asked[i].prompt) for i in rows for _ in range(2)])
                texts, _ = model.draft(p, L, t, torch.Generator().manual_seed(int(t * 1000) + at))
                out[rows] = texts.view(-1, 2, L).numpy()
                for i in set(range(at, at + 50)) - set(rows):
                    p = torch.tensor([list(asked[i].prompt)] * 2)
                    out[i] = model.draft(p, L, t, torch.Generator().manual_seed(int(t * 1000) + i))[0].numpy()
            np.save(HERE / "cache" / f"ref-{name}-{t:g}.npy", out)
            print(name, t, flush=True)
