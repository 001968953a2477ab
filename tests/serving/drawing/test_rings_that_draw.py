"""Rings that draw, through trouble and change: hosts that die with a picture in hand, new weights, large answers."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.client.client import Client
from tests.conftest import until
from tests.serving.conftest import describe
from tests.serving.releases import all_ready
from tests.serving.router.test_replicas import doubled
from tests.stages.pictures.tiny import TINY, tiny_experts, tiny_picture_bundle

pytestmark = pytest.mark.slow

SEED = 7
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture_bundle(tmp_path_factory.mktemp("rings"), ("chain", "steps"))


def test_a_host_that_dies_in_the_middle_costs_no_picture(bundle: Path) -> None:
    """The delay of a link keeps the work on its way while the host that sends it is killed."""
    with (
        temporary_deployment(doubled(bundle), bundle, router_options=["--hop-timeout-s", "5"]) as running,
        Client(running.topology.router) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        addresses = {host.name: host.address for host in running.topology.hosts}

        def busy(names: str) -> str | None:
            counts = {name: describe(addresses[name]).counters.sessions for name in names.split()}
            return next((name for name, count in counts.items() if count), None)

        def idle(names: str) -> bool:
            return busy(names) is None

        for mode, names, link_ms in (("chain", "a-1 a-2", 400), ("steps", "b-1 b-2", 100)):
            until(partial(all_ready, client), 30)
            settings: dict[str, Any] = {"mode": mode, "seed": SEED, "levels": 3}
            wanted = client.draw("one", **settings).pixels
            until(partial(idle, names), 30)
            asked = thread.submit(client.draw, "one", **settings, link_ms=link_ms, timeout_s=60)
            guilty = until(partial(busy, names), 30)
            running.kill(guilty)
            drawn = asked.result()
            assert np.array_equal(drawn.pixels, wanted), mode
            assert drawn.replays >= 1, f"{mode}: {guilty} died, {drawn.hosts} drew"
            running.revive(guilty)


def test_new_weights_are_tried_and_taken_back(bundle: Path, tmp_path: Path, onesweep: Run) -> None:
    other = tiny_picture_bundle(tmp_path / "other", ("chain",), seed=5)
    with temporary_deployment(doubled(bundle), bundle) as running, Client(running.topology.router) as client:
        where = ("--router", running.topology.router)
        until(partial(all_ready, client), 30)
        before = client.draw("one", seed=SEED).pixels
        code, said, err = onesweep("deploy", other, *where)
        assert code == 0, err
        assert "modes that work: chain\n" in said
        assert "it does not serve steps, which the release before does" in said
        assert not np.array_equal(client.draw("one", seed=SEED).pixels, before)
        assert onesweep("deploy", "--rollback", *where)[0] == 0
        assert np.array_equal(client.draw("one", seed=SEED).pixels, before)


def test_the_command_starts_hosts_of_its_own_and_an_answer_may_be_large(tmp_path: Path, onesweep: Run) -> None:
    """As many pictures as a hop may have: nearly the 4 MiB of a message to a client."""
    large = replace(TINY, height=128, width=128, channels=3, patch=16)
    bundle = tiny_picture_bundle(tmp_path / "large", ("chain",), large)
    out, count = tmp_path / "sheet.png", 83
    few = ("--pictures", count, "--guidance", 1, "--levels", 3, "--link-ms", 50)
    code, said, err = onesweep("draw", "two", "--checkpoint", bundle, *few, "--previews", "--out", out)
    assert code == 0, err
    assert said == f"{out}: {count} pictures\n"
    with Image.open(out) as sheet:
        assert sheet.size == (129 * count - 1, 129 * 3 - 1)
    experts = tiny_experts(tmp_path / "bundle" / "experts").parent
    code, said, err = onesweep(
        "draw", "two", "--checkpoint", experts, "--mode", "experts:1", "--out", tmp_path / "e.png"
    )
    assert (code, said) == (0, f"{tmp_path / 'e.png'}: 1 picture\n"), err
    code, _, err = onesweep("run", bundle)
    assert code != 0
    assert "draws pictures: `onesweep draw CLASS --checkpoint" in err
    shutil.rmtree(bundle / "chain")
    code, _, err = onesweep("draw", "two", "--checkpoint", bundle, "--out", tmp_path / "none.png")
    assert code != 0
    assert "is no bundle of pictures: give a directory with chain/, steps/ or experts/" in err
