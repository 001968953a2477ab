"""A pipeline trained stage by stage, of whose steps every N-th is end to end.

    python anchor.py DATA OUT STEPS SEED[,SEED] ARM[,ARM]

Arms: `small` (one stage alone), `end` (end to end), `own` (each stage by its own head's loss on detached features),
`lookahead` (through int8 copies of later stages, every 10 steps; `lookahead@4`: every 4). With `:N` every N-th step is
end to end: the last head's gradient goes back through all stages. `own:N:w0.1` has own losses at a tenth in between.
"""

import json
import sys
import time
from pathlib import Path

import torch

from stages.model.architecture import Architecture
from stages.model.pipeline import ArModel
from trainer.blocks.config import LookaheadConfig, TrainingConfig
from trainer.blocks.data import Corpus, load_corpus
from trainer.blocks.losses import next_byte_loss
from trainer.blocks.run import OptimizerSet, StepLoss, train_step
from trainer.blocks.task import ArTask, ScorerTask, StagesInOneProcess

torch.set_num_threads(1)


class Anchored(ScorerTask):
    between, every, weight, refresh = "own", 0, 1.0, 10

    def loss(self, step: int) -> StepLoss:
        anchored = self.every and step % self.every == 0
        if self.between == "lookahead" and not anchored:
            if step // self.refresh != getattr(self, "seen", -1):
                self.module.refresh()
                self.seen = step // self.refresh
            text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
            return StepLoss(self.module.losses(text)[0], {})
        text = self.corpus.batch(self.config.seed, step, self.config.sequences, self.length + 1)
        x, total = text[:, :-1], torch.zeros(())
        for stage, head in zip(self.module.stages, [*self.module.heads, None], strict=True):
            hidden = stage.read(x)
            if head is None:
                return StepLoss(total + next_byte_loss(stage.next_byte(hidden), text), {})
            seen = hidden.detach()
            if self.between == "own" and not anchored:
                # The head learns in full, the stage with this weight.
                seen = hidden.clone()
                seen.register_hook(lambda gradient: gradient * self.weight)
            total = total + next_byte_loss(head(seen), text)
            x = hidden if anchored else hidden.detach()
        raise AssertionError


def task_of(arm: str, config: TrainingConfig, corpus: Corpus) -> ArTask | Anchored:
    kind, every, weight = (arm.split(":") + ["0", "w1"][arm.count(":") :])[:3]
    if kind == "small":
        return ArTask(kind, ArModel(config.architecture), corpus, config)
    task = Anchored(arm, StagesInOneProcess(config.architecture, config.lookahead), corpus, config)
    task.between, _, refresh = kind.partition("@")
    task.every, task.weight, task.refresh = int(every) if kind != "end" else 1, float(weight[1:]), int(refresh or 10)
    return task


def main(data: str, out: Path, steps: int, seeds: list[int], arms: list[str]) -> None:
    corpus = load_corpus(Path(data))
    for seed, arm in ((seed, arm) for seed in seeds for arm in arms):
        config = TrainingConfig(
            architecture=Architecture(
                parts=1 if arm == "small" else 3, layers=1, width=64, heads=4, context_length=128
            ),
            steps=steps,
            sequences=8,
            warmup_steps=50,
            bfloat16=False,
            valid_windows=64,
            seed=seed,
            lookahead=LookaheadConfig(copies="int8"),
        )
        torch.manual_seed(seed)
        task, begin = task_of(arm, config, corpus), time.process_time()
        optimizers = OptimizerSet(task.module, config)
        for step in range(steps):
            train_step(task, optimizers, config, step)
        task.module.eval()
        with torch.inference_mode():
            nats = task.evaluate()["valid_next_byte_nats"]
        row = {"arm": arm, "seed": seed, "steps": steps, "nats": nats, "cpu_s": round(time.process_time() - begin)}
        print(json.dumps(row), flush=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), [*map(int, sys.argv[4].split(","))], sys.argv[5].split(","))
