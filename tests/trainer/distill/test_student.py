"""The drafter before it has learned anything: what it is made of, and what becomes of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from stages.model.architecture import Architecture
from tests.stages.model.tiny_llama import TINY, write_tiny
from trainer.blocks.data import Corpus
from trainer.distill.student import Student, fitting_layers, numbers_in, one_stage
from trainer.distill.teacher import OutputHead, Teacher, distance, mean_kl


@pytest.fixture(scope="module")
def known(tokens: Corpus) -> torch.Tensor:
    return tokens.valid_batch(8, 24)


@torch.no_grad()
def test_with_all_layers_it_is_its_teacher(teacher: Teacher, known: torch.Tensor) -> None:
    student, features = Student.of_layers(teacher, range(4)), teacher.read(known)
    torch.testing.assert_close(student.read(known), features)
    student.begin(known, features, 4)
    torch.testing.assert_close(student.read(known), features, rtol=1e-4, atol=1e-4)
    assert distance(student.read(known), student.head, features, teacher.head)["accepted"] == pytest.approx(8, abs=1e-3)


@torch.no_grad()
def test_the_lens_brings_some_layers_nearer_to_all(teacher: Teacher, known: torch.Tensor) -> None:
    student, features = Student.of_layers(teacher, (0, 1)), teacher.read(known)
    before = distance(student.read(known), student.head, features, teacher.head)
    student.begin(known, features, 8)
    after = distance(student.read(known), student.head, features, teacher.head)
    assert after["kl_bits"] < 0.9 * before["kl_bits"]
    z = torch.linalg.lstsq(student._normed(known).flatten(0, 1), features.flatten(0, 1)).solution
    error = (student.read(known) - features).square().mean()
    assert float(error) <= 1.01 * float((student._normed(known) @ z - features).square().mean())


@torch.no_grad()
def test_as_a_stage_it_says_the_same(teacher: Teacher, known: torch.Tensor) -> None:
    student = Student.of_layers(teacher, (0, 2))
    student.lens.weight.add_(0.1 * torch.randn_like(student.lens.weight))
    stage = student.stage_alone()
    assert (stage.is_first, stage.is_last, len(stage.layers)) == (True, True, 2)
    expected = teacher.head.logits(student.read(known).flatten(0, 1))
    torch.testing.assert_close(stage.next_byte(stage.read(known)).flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_drafter_that_exists_is_all_trained_and_the_teacher_stays(teacher: Teacher, known: torch.Tensor) -> None:
    begun = Student.of_layers(teacher, (0, 2)).stage_alone()
    stage = deepcopy(begun).requires_grad_(True)
    student, features = Student(teacher, stage, stage), teacher.read(known)
    before = student.read(known)
    torch.testing.assert_close(before, begun.norm(begun.read(known)))
    mean_kl(before, student.head, features, teacher.head).backward()
    assert {name.split(".")[0] for name, _ in student.trained.named_parameters()} == {
        "embedding",
        "layers",
        "norm",
        "head",
    }
    assert all(parameter.grad is not None for parameter in student.trained.parameters())
    with torch.no_grad():
        for parameter in student.trained.parameters():
            parameter.sub_(0.01 * parameter.grad)
    stage = student.stage_alone()
    with torch.no_grad():
        after = distance(stage.norm(stage.read(known)), OutputHead.of(stage), features, teacher.head)
        assert after["kl_bits"] < distance(before, OutputHead.of(begun), features, teacher.head)["kl_bits"]
        assert torch.equal(teacher.read(known), features)


def test_the_first_layers_are_as_many_as_the_largest_stage_has_room_for() -> None:
    wide = replace(TINY, layers=(4, 6, 4), vocabulary=100)
    chosen = fitting_layers(wide)
    largest = max(numbers_in(wide, index) for index in range(3))
    assert chosen == tuple(range(len(chosen)))
    assert numbers_in(one_stage(wide, chosen), 0) <= largest < numbers_in(one_stage(wide, range(len(chosen) + 1)), 0)
    assert fitting_layers(replace(TINY, layers=(1, 1, 1), vocabulary=5000)) == (0,), "one at least"
    assert len(fitting_layers(Architecture(parts=3, layers=2, width=16, heads=2))) == 1


@pytest.fixture(scope="module")
def tied_teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    directory = tmp_path_factory.mktemp("tied") / "ar"
    write_tiny(directory, replace(TINY, tied_head=True))
    return Teacher(directory, "cpu", bfloat16=False)


@torch.no_grad()
def test_under_a_tied_head_there_is_no_lens(tied_teacher: Teacher, known: torch.Tensor) -> None:
    student = Student.of_layers(tied_teacher, (0, 3))
    assert {name.split(".")[0] for name, _ in student.trained.named_parameters()} == {"layers"}
    before = student.read(known)
    student.begin(known, tied_teacher.read(known), 8)
    assert torch.equal(student.read(known), before)
    stage = student.stage_alone()
    assert stage.head is not None
    assert stage.embedding is not None
    assert stage.head.weight is stage.embedding.weight
    expected = tied_teacher.head.logits(before.flatten(0, 1))
    torch.testing.assert_close(stage.next_byte(stage.read(known)).flatten(0, 1), expected, rtol=1e-4, atol=1e-4)
