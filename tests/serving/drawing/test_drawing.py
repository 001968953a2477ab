"""Pictures from real hosts and a router: every mode, every bad request, a lost host, a faulty one, OpenAI's client."""

import base64
import io
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import openai
import pytest
from PIL import Image

from serving.cli.__main__ import main
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client, RequestRefused
from serving.client.result import DrawnPictures
from serving.gateway.errors import api_error_of
from serving.router.ring import Ring
from serving.router.topology import local_topology
from serving.v1 import router_pb2, router_pb2_grpc
from stages.checkpoint.checkpoint import load_picture_part
from stages.pictures.trajectory import DrawPlan
from stages.wire.channel import open_blocking_channel
from tests.conftest import PATIENCE_S, refused, until
from tests.serving.conftest import shown
from tests.serving.gateway.conftest import run
from tests.serving.releases import doubled
from tests.stages.pictures.lines import undivided
from tests.stages.pictures.tiny import TINY, tiny_picture_bundle

SEED = 7


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_picture_bundle(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def drawing(bundle: Path) -> Iterator[Deployment]:
    """Three hosts and a router. Not to be harmed."""
    with temporary_deployment(local_topology(3, 3, bundle, free_port_block(4) + 1), bundle) as running:
        yield running


@pytest.fixture(scope="module")
def artist(drawing: Deployment) -> Iterator[Client]:
    with Client(drawing.topology.router) as client:
        yield client


def test_a_chain_draws_in_one_trip(artist: Client) -> None:
    shown: list[DrawnPictures] = []
    drawn = artist.draw("one", seed=SEED, levels=6, preview=shown.append)
    assert (drawn.mode, drawn.sweeps, drawn.hops, drawn.levels) == ("chain", 1, 4, 6)
    assert drawn.pixels.shape == (1, 1, 8, 8)
    estimate = TINY.tokens * (TINY.patch_dim + 4)
    three = artist.draw("one", seed=SEED, levels=6, pictures=3).wire_bytes[1:3]
    for size, larger in zip(drawn.wire_bytes[1:3], three, strict=True):
        assert estimate < size
        assert abs(larger - size - 2 * estimate) < 40, "the rest of the message does not grow with the pictures"
    assert {preview.block for preview in shown} <= {0, 1}, "they take links of their own, and may come too late"
    assert np.array_equal(artist.draw("one", seed=SEED, levels=6).pixels, drawn.pixels)
    assert not np.array_equal(artist.draw("one", seed=SEED + 1, levels=6).pixels, drawn.pixels)


def test_previews_are_shown_as_they_arrive(bundle: Path, local_ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    previews, results, deliver, shown = list[Any](), list[Any](), Ring._deliver, list[DrawnPictures]()

    def previews_first(ring: Ring, event: Any) -> None:
        (previews if event.pictures.preview else results).append(event)
        for each in (*previews, *results) if results and len(previews) == 2 else ():
            deliver(ring, each)

    monkeypatch.setattr(Ring, "_deliver", previews_first)
    with local_ring(bundle, 3) as client:
        client.draw("one", seed=SEED, levels=6, preview=shown.append)
    assert sorted(preview.block or 0 for preview in shown) == [0, 1]


def test_undivided_nets_draw_the_pictures_of_one_process(artist: Client, bundle: Path) -> None:
    plan = DrawPlan(SEED, (2,), 5, "2m", 1.5)
    for mode in ("steps", "local"):
        parts = [load_picture_part(bundle / mode, i) for i in range(3 if mode == "steps" else 1)]
        drawn = artist.draw("2", mode=mode, seed=SEED, levels=5, guidance=1.5)
        assert np.array_equal(drawn.pixels, undivided(parts, plan).numpy()), mode
        assert drawn.sweeps == (6 if mode == "steps" else 0)
        assert drawn.hops == (6 * 3 + 1 if mode == "steps" else 0)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"classes": ["oen"]}, r"unknown class 'oen' \(did you mean one\?\); choose from zero, one, two"),
    ({"classes": ["3"]}, "unknown class '3'"),
    ({"classes": ["-1"]}, "unknown class '-1'"),
    ({"classes": ["9" * 5000]}, "unknown class '9"),
    ({"classes": []}, "0 pictures; a request can draw 1 to 1024"),
    ({"pictures": 10**9}, "1000000000 pixels|1000000000 pictures"),
    ({"levels": 0}, "levels must be 3 to 256 in mode chain, not 0"),
    ({"levels": 2}, "levels must be 3 to 256"),
    ({"levels": 257}, "levels must be 3 to 256"),
    ({"levels": 0, "mode": "local"}, "levels must be 1 to 256"),
    ({"guidance": math.nan}, "guidance must be 0 to 20, not nan"),
    ({"guidance": -1}, "guidance must be 0 to 20"),
    ({"guidance": 21}, "guidance must be 0 to 20"),
    ({"solver": "heun"}, "unknown solver 'heun'"),
    ({"codec": "jpeg"}, "mode chain has no codec 'jpeg'; choose from fp32, int8, int4"),
    ({"codec": "int4", "mode": "steps"}, "mode steps has no codec 'int4'; choose from fp32, int8"),
    ({"mode": "chian"}, r"unknown drawing mode 'chian' \(did you mean chain\?\); served here: chain, steps, local"),
    ({"previews": True, "mode": "steps"}, "mode steps has no previews"),
)


def test_a_wrong_request_is_refused_with_the_reason(drawing: Deployment, artist: Client) -> None:
    with open_blocking_channel(drawing.topology.router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for fields, message in BAD:
            request = router_pb2.DrawRequest(**{"classes": ["one"], **fields})
            with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
                list(stub.Draw(request, timeout=PATIENCE_S, metadata=shown(drawing.topology.router)))
    status = artist.status()
    assert list(status.pictures.classes) == list(TINY.classes)
    assert (list(status.drawing_modes), list(status.modes)) == (["chain", "steps", "local"], [])
    for mode in ({"mode": "sweep"}, {}):
        with pytest.raises(RequestRefused, match="this checkpoint only draws: use `onesweep draw`") as no_text:
            artist.generate("hello", **mode)
        assert api_error_of(no_text.value).param is None, "no field is wrong"
    until(lambda: not any(host.sessions for host in artist.status().hosts))


def test_a_text_checkpoint_refuses_to_draw(client: Client) -> None:
    with pytest.raises(RequestRefused, match="mode chain cannot be served: the hosts have no chain/ that draws"):
        client.draw("one")
    with pytest.raises(RequestRefused, match="mode local cannot be served"):
        client.draw("one", mode="local")


def test_the_command_writes_png_files(
    drawing: Deployment, artist: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    def draw(*arguments: str) -> tuple[int, str]:
        code = main(["draw", *arguments, "--router", drawing.topology.router])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    out = tmp_path / "one.png"
    with monkeypatch.context() as full:
        full.setattr("stages.checkpoint.files.sync", Mock(side_effect=OSError(28, "No space left on device")))
        assert "No space left on device" in draw("one", "--out", str(out))[1]
        full.setattr("stages.checkpoint.files.sync", lambda staged: out.write_text("another's"))
        assert "appeared while drawing" in draw("one", "--out", str(out))[1]
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("one.png", "another's")]
    out.unlink()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Path, "replace", lambda *paths: (signal.raise_signal(signal.SIGINT), os.replace(*paths)))
        draw("one", "--out", str(out))
    Image.open(out).verify()
    out.unlink()
    code, printed = draw("one", "--seed", "7", "--out", str(out))
    assert code == 0, printed
    assert "one.png: 1 picture\n[chain, seed 7, 12 levels: 1 trip, 4 hops" in printed
    with Image.open(out) as picture:
        assert np.array_equal(np.asarray(picture)[::4, ::4], artist.draw("one", seed=7).pixels[0, 0])
    for arguments, rows, columns in (
        (("--all", "--pictures", "2"), 3, 2),
        (("one", "two"), 1, 2),
        (("one", "two", "--compare"), 3, 2),
    ):
        path = tmp_path / f"{arguments[-1]}.png"
        code, printed = draw(*arguments, "--out", str(path))
        assert code == 0, printed
        if "--compare" in arguments:
            table = [line.split()[:2] for line in printed.splitlines()[1:]]
            assert table == [["mode", "trips"], ["chain", "1"], ["steps", "13"], ["local", "0"]]
        with Image.open(path) as picture:
            assert picture.size == (4 * (9 * columns - 1), 4 * (9 * rows - 1))
    for arguments, message in (
        (("one", "--out", str(out)), "already exists"),
        (("one", "--out", str(tmp_path / "none" / "x.png")), "cannot write"),
        (("one", "--out", str(tmp_path / "x.jpg")), "pictures are written as PNG"),
        (("--out", str(tmp_path / "x.png")), "name a class"),
        (("one", "--compare", "--previews", "--out", str(tmp_path / "x.png")), "leave out --mode and --previews"),
        (("one", "--seed", str(1 << 64), "--out", str(tmp_path / "x.png")), "seed must be"),
    ):
        code, printed = draw(*arguments)
        assert code in (1, 2)
        assert message in printed
    for command, message in (
        (["status"], "modes chain, steps, local;"),
        (["compare", "hello"], "compare its pictures with `onesweep draw --compare`"),
        (["chat", "hello"], "no model to chat with: this checkpoint only draws"),
    ):
        main([*command, "--router", drawing.topology.router])
        printed = capsys.readouterr()
        assert message in printed.out + printed.err


def test_the_openai_client_draws(drawing: Deployment, artist: Client, tmp_path: Path) -> None:
    with run(tmp_path, "--router", drawing.topology.router) as gateway:
        api = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        (model,) = api.models.list().data
        assert model.model_dump()["onesweep"] == {"draws": ["zero", "one", "two"], "size": "8x8"}
        own = {"solver": "euler", "levels": 5, "guidance": 1.5}
        answer = api.images.generate(
            model=model.id,
            prompt="two",
            n=2,
            size="8x8",
            response_format="b64_json",
            extra_body={"seed": 7, "onesweep": own},  # type: ignore[arg-type]
        )
        for image, wanted in zip(answer.data or [], artist.draw("two", pictures=2, seed=7, **own).pixels, strict=True):
            with Image.open(io.BytesIO(base64.b64decode(image.b64_json or ""))) as picture:
                assert np.array_equal(np.asarray(picture), wanted[0])
        for fields, message in (
            ({"size": "256x256"}, "size 256x256 cannot be drawn: this model draws 8x8"),
            ({"response_format": "url"}, "response_format must be 'b64_json', not"),
            ({"n": 11}, "n must be at most 10, not 11"),
            ({"prompt": "tow"}, r"did you mean two\?"),
            ({"model": "dall-e-3"}, "no model 'dall-e-3' draws"),
        ):
            with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message):
                api.images.generate(**{"prompt": "two", **fields})  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_picture_survives_the_loss_of_a_host(bundle: Path, artist: Client) -> None:
    wanted = {mode: artist.draw("one", mode=mode, seed=SEED).pixels for mode in ("chain", "steps")}
    with (
        temporary_deployment(doubled(bundle), bundle, router_options=["--set", "hop_timeout_s=5"]) as running,
        Client(running.topology.router) as client,
    ):
        until(lambda: all(host.ready for host in client.status().hosts))
        for name, harm in (("a-1", signal.SIGSTOP), ("b-1", signal.SIGKILL)):
            os.kill(running.processes[name], harm)
            for mode, pixels in wanted.items():
                assert np.array_equal(client.draw("one", mode=mode, seed=SEED).pixels, pixels), (mode, name)
        os.kill(running.processes["a-1"], signal.SIGCONT)
