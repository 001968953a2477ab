"""One liar of three workers in each stage of a pipeline, under scores.

    python attacks.py DATA OUT STEPS SEED[,SEED] MODE[,MODE] ARM[,ARM]

Modes: `copies` (as `train simulate` does it) and `features`: there whoever is expelled from one part is out of the
whole pipeline, for nobody is fed any more. Arms: `none` (no liar, no scores), `honest` (no liar), `two` (two workers, no
liar), `wide` (two whose steps read half as much again), a number (`lie`), `random` (the liar trains on the text's bytes
in random order), `against1`, `against3`: number by number the mean of the honest less so many deviations in the
direction of its sign.
"""

import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

import trainer.rounds.simulation as simulation
from stages.model.architecture import Architecture
from trainer.blocks.config import RoundSettings, TrainingConfig
from trainer.blocks.data import load_corpus
from trainer.rounds.simulation import SimulatedWorkers, Simulation, VirtualWorker
from trainer.rounds.spec import RunSpec

torch.set_num_threads(1)


class Attacked(Simulation):
    against, scramble = 0.0, False

    def __init__(self, spec, corpus, fleet):
        self.honest = defaultdict(list)
        self.liar = f"-{spec.config.rounds.replicas - 1}"
        self.out = set()
        super().__init__(spec, corpus, fleet)

    def expelled(self, fragment):
        found = super().expelled(fragment)
        if not self.settings.by_features:
            return found
        every = set().union(*(self.ledger.expelled(names) for names in self.fragments.parts.values()))
        part = self.spec.parts[self.spec.parts.index(self.fragments.part_of[fragment])]
        return {f"{part}-{name.rpartition('-')[2]}" for name in every}

    def arrive(self, update, now):
        if self.against:
            key = update.fragment, update.round
            if update.worker.endswith(self.liar):
                assert len(self.honest[key]) == self.settings.replicas - 1, key
                each = {n: torch.stack([d[n] for d in self.honest[key]]) for n in update.delta}
                update = replace(
                    update,
                    delta={
                        n: (mean := e.mean(0)) - self.against * e.std(0, correction=0) * mean.sign()
                        for n, e in each.items()
                    },
                )
            else:
                self.honest[key].append(update.delta)
        super().arrive(update, now)

    def check(self, part, now):
        super().check(part, now)
        if self.settings.by_features:
            gone = set().union(*(self.ledger.expelled(names) for names in self.fragments.parts.values()))
            if gone != self.out:
                self.out = gone
                for fragment in self.ledger.fragments():
                    self.expect(fragment)
                for fragment in self.ledger.fragments():
                    super().check(fragment, now)


class Scrambling(VirtualWorker):
    def __init__(self, spec, index, replica, corpus, engine):
        if getattr(engine, "scramble", False) and replica == spec.config.rounds.replicas - 1:
            order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(1000 + spec.config.seed))
            corpus = replace(corpus, train=corpus.train[order])
        super().__init__(spec, index, replica, corpus, engine)


simulation.VirtualWorker = Scrambling


def main(data, out, steps, seeds, modes, arms):
    corpus = load_corpus(Path(data))
    done = {tuple(json.loads(line)["key"]) for line in out.read_text().splitlines()} if out.exists() else set()
    for mode in modes:
        for arm in arms:
            for seed in seeds:
                if (mode, arm, seed, steps) in done:
                    continue
                rounds = RoundSettings(
                    model="scorer",
                    replicas=2 if arm in ("two", "wide") else 3,
                    steps_per_round=10,
                    deadline_s=0,
                    context_by="copies" if mode == "copies" else "auto",
                    robust="none" if arm == "none" else "scored",
                )
                config = TrainingConfig(
                    architecture=Architecture(parts=3, layers=1, width=64, heads=4, context_length=128),
                    steps=steps,
                    sequences=6 if arm == "wide" else 4,
                    warmup_steps=steps // 10,
                    bfloat16=False,
                    valid_windows=64,
                    seed=seed,
                    rounds=rounds,
                )
                lie = 1.0 if arm[0].isalpha() else float(arm)
                spec = RunSpec.of(config, corpus)
                begin = time.process_time()
                Attacked.against = float(arm[7:]) if arm.startswith("against") else 0.0
                Attacked.scramble = arm == "random"
                engine = Attacked(spec, corpus, SimulatedWorkers(lie=lie, seed=seed))
                traffic = engine.run()
                nats = spec.evaluate(engine.published(), corpus)["next_byte"]
                gone = sorted(set().union(*(engine.ledger.expelled(n) for n in engine.fragments.parts.values())))
                row = {
                    "key": [mode, arm, seed, steps],
                    "nats": round(nats, 5),
                    "updates": dict(traffic.updates),
                    "expelled": gone,
                    "rounds": [engine.ledger.round(f) for f in engine.ledger.fragments()],
                    "cpu_s": round(time.process_time() - begin),
                }
                print(json.dumps(row), flush=True)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    a = sys.argv
    main(a[1], Path(a[2]), int(a[3]), [int(s) for s in a[4].split(",")], a[5].split(","), a[6].split(","))
