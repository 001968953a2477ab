"""A whole sweep, block by block, against Euler steps written out."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stages.backends import Backend
from stages.errors import CodecError
from stages.host.work.sweep import BlockWork, SweepPlan
from stages.model.block import Block
from stages.model.codec import Fp32, Int8, StateCodec
from stages.model.partition import NoisePartition
from stages.model.pipeline import new_caches
from stages.model.prefill import READ_POSITIONS
from stages.model.randomness import Purpose, normals, sample_tokens
from stages.model.samplers import step_sigmas
from stages.model.vocabulary import BYTES
from tests.e2e.one_process import run_unbatched
from tests.stages.conftest import make_chain

PROMPT = b"A prompt of some bytes."
PLAN = SweepPlan(seed=5, start=len(PROMPT), slots=16, steps=3, temperature=0.8)
FP32 = Fp32()
STOCHASTIC = replace(PLAN, sampler="stochastic")


class Sequence:
    """One block with the caches of one request."""

    def __init__(self, block: Block, partition: NoisePartition, capacity: int = 96) -> None:
        self.block, self.partition, self.runner = block, partition, Backend().block(block)
        self.caches = new_caches(block.architecture.layers, block.architecture, capacity)

    @property
    def length(self) -> int:
        return self.caches[0].length

    def work(self, plan: SweepPlan, codec: StateCodec, clean: bytes, before: bytes | None) -> BlockWork:
        a, index = self.block.architecture, self.block.index
        return BlockWork(a, index, self.partition, self.caches, plan, codec, BYTES.decode(clean), before)

    def run(self, plan: SweepPlan, codec: StateCodec, clean: bytes, before: bytes | None) -> bytes:
        return run_unbatched(self.work(plan, codec, clean, before), self.runner)


def open_sequences(chain: list[Block], partition: NoisePartition) -> list[Sequence]:
    return [Sequence(block, partition) for block in chain]


def sweep(sequences: list[Sequence], plan: SweepPlan = PLAN, clean: bytes = PROMPT) -> tuple[bytes, list[bytes]]:
    """The chunk's text, and the payloads between the blocks."""
    boundaries: list[bytes] = []
    for sequence in sequences:
        boundaries.append(sequence.run(plan, FP32, clean, boundaries[-1] if boundaries else None))
    return boundaries.pop(), boundaries


def reference(chain: list[Block], partition: NoisePartition, plan: SweepPlan, clean: bytes) -> tuple[bytes, Tensor]:
    """Text and final state z by plain Euler steps on z, without caches, codecs or the state formula."""
    z0 = partition.sigma_max * normals(plan.seed, Purpose.INITIAL_NOISE, plan.start, plan.slots, 8)[None]
    z, source = z0, torch.tensor([list(clean)])
    for block in chain:
        _, memory = block.read(source)
        sigmas = step_sigmas(*partition.range(block.index), plan.steps)
        for sigma, following in [*pairwise(sigmas), (sigmas[-1], sigmas[-1])]:
            if sigma == following and block is not chain[-1]:
                break
            a = sigma / partition.sigma_max
            estimate = (z - a * z0) / (1 - a) if a < 1 else torch.zeros_like(z)
            logits = block.denoise(z, estimate, torch.full((1, 1), sigma), memory, plan.start)
            z = z + (following - sigma) * (z - block.point(logits)) / sigma
    return sample_tokens(logits[0], plan.temperature, plan.seed, plan.start), z[0]


def test_a_sweep_is_euler_steps_through_all_blocks(partition: NoisePartition) -> None:
    chain = make_chain()
    text, _ = sweep(open_sequences(chain, partition))
    expected, z = reference(chain, partition, PLAN, PROMPT)
    assert text == expected
    *others, last = open_sequences(chain, partition)
    work = last.work(PLAN, Fp32(), PROMPT, sweep(others)[0])
    run_unbatched(work, last.runner)
    estimate = work._estimate
    a = partition.sigma_min / partition.sigma_max
    initial = partition.sigma_max * normals(PLAN.seed, Purpose.INITIAL_NOISE, PLAN.start, PLAN.slots, 8)
    assert torch.allclose(a * initial + (1 - a) * estimate, z, atol=1e-3)


def test_a_stochastic_sweep_adds_new_noise_to_each_denoised_point(partition: NoisePartition) -> None:
    chain = make_chain()
    text, _ = sweep(open_sequences(chain, partition), STOCHASTIC)
    source, point, evaluation = torch.tensor([list(PROMPT)]), torch.zeros(1, PLAN.slots, 8), 0
    for block in chain:
        _, memory = block.read(source)
        sigmas = step_sigmas(*partition.range(block.index), PLAN.steps)
        for sigma in sigmas if block is chain[-1] else sigmas[:-1]:
            noise = normals(PLAN.seed, Purpose.INITIAL_NOISE, PLAN.start, PLAN.slots, 8, step=evaluation)
            logits = block.denoise(point + sigma * noise, point, torch.full((1, 1), sigma), memory, PLAN.start)
            point, evaluation = block.point(logits / PLAN.temperature), evaluation + 1
    assert text == sample_tokens(logits[0], PLAN.temperature, PLAN.seed, PLAN.start)


def test_a_new_sequence_gives_the_text_of_a_continued_one(partition: NoisePartition) -> None:
    """A replica reads everything so far at once."""
    chain = make_chain()
    sequences = open_sequences(chain, partition)
    first, _ = sweep(sequences)
    plan = replace(PLAN, start=PLAN.start + PLAN.slots)
    second, _ = sweep(sequences, plan, clean=first)
    assert [sequence.length for sequence in sequences] == [plan.start] * 3
    again, _ = sweep(open_sequences(chain, partition), plan, clean=PROMPT + first)
    assert again == second


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"\xff" * len(b)])
def test_a_damaged_payload_between_blocks_is_refused(partition: NoisePartition, damage) -> None:
    sequences = open_sequences(make_chain(), partition)
    before = sequences[0].run(PLAN, Int8(), PROMPT, None)
    with pytest.raises(CodecError):
        sequences[1].run(PLAN, Int8(), PROMPT, damage(before))


def test_a_prompt_read_in_pieces_gives_the_same_text(partition: NoisePartition) -> None:
    """Against the reference, which reads all of it at once."""
    prompt = bytes((7 * i) % 251 for i in range(2 * READ_POSITIONS + 5))
    plan = replace(PLAN, start=len(prompt))
    chain = make_chain(context_length=320)
    sequences = [Sequence(block, partition, 320) for block in chain]
    text, _ = sweep(sequences, plan, clean=prompt)
    assert text == reference(chain, partition, plan, prompt)[0]
    assert [sequence.length for sequence in sequences] == [len(prompt)] * 3
