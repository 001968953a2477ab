"""Rounds of a scored pipeline, with every merge's losses written down.

    python merges.py DATA OUTDIR STEPS SEED[,SEED] MODE[,MODE] ARM[,ARM] [WORKERS]

OUTDIR/results.jsonl has one line a run; OUTDIR/MODE-ARM-SEED-STEPS-WORKERS.jsonl one line a merge: the losses of the 8 batches
with no share, each share alone at its weight in the merge, and of every subset's step (not only those that the rule asks for).
Arms as in attacks.py: none, honest, two, a number (lie), random, againstN; place: one place.
"""

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import attacks
import trainer.rounds.ledger as ledger
from attacks import Attacked
from stages.model.architecture import Architecture
from trainer.blocks.config import RoundSettings, TrainingConfig
from trainer.blocks.data import load_corpus
from trainer.rounds.codecs import add
from trainer.rounds.comparison import run_variants, variants
from trainer.rounds.simulation import SimulatedWorkers
from trainer.rounds.spec import RunSpec

torch.set_num_threads(1)
real_admit = ledger.admit
RECORD = None


def admit(theta, shares, step, loss, trust):
    scores = real_admit(theta, shares, step, loss, trust)
    if RECORD:
        before, total = loss(theta), sum(s.weight for s in shares.values())
        alone = {v: loss(add(theta, s.delta, -s.weight / total)) for v, s in shares.items()}
        subsets = {
            "+".join(some): loss(step([shares[v] for v in some]))
            for n in range(1, len(shares) + 1)
            for some in itertools.combinations(sorted(shares), n)
        }
        row = {
            "before": before,
            "alone": alone,
            "subsets": subsets,
            "trust": {v: trust(v) for v in shares},
            "kept": [v for v in shares if scores[v].kept],
            "harmful": [v for v in shares if scores[v].harmful],
        }
        with RECORD.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return scores


ledger.admit = admit


def main(data, out, steps, seeds, modes, arms, workers=3, record=True):
    global RECORD
    corpus = load_corpus(Path(data))
    results = out / "results.jsonl"
    done = {tuple(json.loads(line)["key"]) for line in results.read_text().splitlines()} if results.exists() else set()
    for mode, arm, seed in itertools.product(modes, arms, seeds):
        key = (mode, arm, seed, steps, workers)
        if key in done:
            continue
        rounds = RoundSettings(
            model="scorer",
            replicas=2 if arm == "two" else workers,
            steps_per_round=10,
            deadline_s=0,
            context_by="copies" if mode == "copies" else "auto",
            robust="none" if arm in ("none", "place") else "scored",
        )
        config = TrainingConfig(
            architecture=Architecture(parts=3, layers=1, width=64, heads=4, context_length=128),
            steps=steps,
            sequences=4,
            warmup_steps=steps // 10 if steps < 1000 else 30,
            bfloat16=False,
            valid_windows=64,
            seed=seed,
            rounds=rounds,
        )
        begin = time.process_time()
        RECORD = arm == "honest" and steps < 1000 and out / f"{mode}-{arm}-{seed}-{steps}-{workers}.jsonl"
        RECORD and RECORD.unlink(missing_ok=True)
        if arm == "place":
            (result,) = run_variants(variants(config, (), True)[:1], [seed], corpus)
            row = {"key": key, "nats": result.losses["next_byte"]}
        else:
            lie = 1.0 if arm[0].isalpha() else float(arm)
            spec = RunSpec.of(config, corpus)
            Attacked.against = float(arm[7:]) if arm.startswith("against") else 0.0
            Attacked.scramble = arm == "random"
            engine = Attacked(spec, corpus, SimulatedWorkers(lie=lie, seed=seed))
            traffic = engine.run()
            nats = spec.evaluate(engine.published(), corpus)["next_byte"]
            gone = sorted(set().union(*(engine.ledger.expelled(n) for n in engine.fragments.parts.values())))
            row = {"key": key, "nats": nats, "updates": dict(traffic.updates), "expelled": gone}
        row["cpu_s"] = round(time.process_time() - begin)
        print(json.dumps(row), flush=True)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    a = sys.argv
    main(
        a[1],
        Path(a[2]),
        int(a[3]),
        [int(s) for s in a[4].split(",")],
        a[5].split(","),
        a[6].split(","),
        *map(int, a[7:8]),
    )
