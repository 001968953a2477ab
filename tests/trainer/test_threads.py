from __future__ import annotations

import os

import pytest
import torch

from stages.errors import InputError
from trainer.threads import set_threads


def test_the_number_is_set() -> None:
    assert set_threads(2) == 2 == torch.get_num_threads()
    assert set_threads(None) == len(os.sched_getaffinity(0)) == torch.get_num_threads()


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_bad_number_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"--threads must be from 1 to 1024, not {count}"):
        set_threads(count)
