"""Mistakes in a request: one sentence with advice, and the right code."""

import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from serving.cli.deployment import Deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client, RouterError
from serving.router.request import SETTINGS
from serving.router.topology import local_topology
from serving.v1 import router_pb2, router_pb2_grpc
from stages.checkpoint.manifest import read_manifest
from stages.model.codec import CODECS, HIDDEN
from stages.model.samplers import SAMPLERS
from stages.wire.channel import open_blocking_channel
from tests.conftest import PATIENCE_S, Run, refused, until
from tests.serving.conftest import shown


def sentence(err: str) -> str:
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("onesweep: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([os.fsdecode(b"caf\xe9")], "the prompt is not UTF-8"),
        ([""], "prompt is empty: give at least one byte"),
        (["x" * 500, "--max-bytes", 13], r"prompt \(500 bytes\) and output \(13\).*context length is 512: shorten"),
        (["x" * (1 << 20) + "x"], "at most 1048576 can be sent: shorten it"),
        (["x", "--set", "chunk=8"], r"mode auto chooses chunk itself: leave it out, or name a mode \(chunked"),
        (["x", "--set", "top_p=0"], "top_p must be above 0, not 0"),
        (["x", "--mode", "ar", "--set", "top_k=257"], "top_k must be 0 to 256, not 257: the model has 256 bytes"),
        (
            ["x", "--mode", "sweep", "--set", "top_p=0.5"],
            "mode sweep does not take top_p: leave it out, or use mode ar, ar-speculative, local, local:copy, auto",
        ),
        (["x", "--seed", 1 << 64], "seed must be a whole number from 0"),
        (
            ["x", "--mode", "sweep", "--set", "sampler=sde"],
            "mode sweep has no sampler 'sde'; choose from",
        ),
        (["x", "--mode", "ar", "--set", "codec=int4"], r"mode ar has no codec 'int4' \(did you mean int8"),
        (
            ["x", "--mode", "resample", "--set", "scorer=scorer"],
            "scorer 'scorer' cannot be served: the hosts have no scorer/ in their checkpoint; choose from ar",
        ),
        (["x", "--mode", "resample", "--temperature", 0], "give one above 0, or use mode ar"),
        (["x", "--timeout-s", -1], "timeout_s must be above 0"),
    ],
)
def test_a_wrong_value_is_named(deployment: Deployment, onesweep: Run, arguments: list[object], says: str) -> None:
    code, out, err = onesweep("generate", "--router", deployment.topology.router, *arguments)
    assert (code, out) == (2, "")
    assert re.search(says, sentence(err)), err


def test_codecs_and_samplers_of_requests_are_those_of_hosts() -> None:
    known = {f.name: f.metadata["known"] for f in SETTINGS if f.metadata.get("known")}
    assert (known["codec"]["sweep"], known["codec"]["ar"]) == (tuple(CODECS), tuple(HIDDEN))
    assert known["sampler"]["sweep"] == tuple(SAMPLERS)


# Without our client


@pytest.fixture(scope="module")
def stub(deployment: Deployment) -> Iterator[Any]:
    with open_blocking_channel(deployment.topology.router) as channel:
        ways, brings = router_pb2_grpc.RouterServiceStub(channel), shown(deployment.topology.router)
        calls = {name: partial(getattr(ways, name), metadata=brings) for name in ("Generate", "Draw", "Status")}
        yield SimpleNamespace(**calls)


GOOD: dict[str, Any] = {"prompt": b"x", "mode": "sweep", "max_bytes": 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": b""}, "prompt is empty"),
        ({"prompt": b"caf\xe9"}, r"not UTF-8 \(byte 3\)"),
        ({"mode": ""}, "unknown mode ''; served here: sweep, chunked, resample, ar"),
        ({"max_bytes": 0}, "max_bytes or max_tokens must be at least 1"),
        ({"chunk": 0, "mode": "chunked"}, "chunk must be a whole number from 1"),
        ({"steps": 0}, "steps must be a whole number from 1 to 64"),
        ({"temperature": float("-inf")}, "temperature must be from 0 to 100"),
        ({"codec": ""}, "mode sweep has no codec ''; choose from fp32, int8, int4"),
        ({"priority": "high"}, "mode sweep has no priority 'high'; choose from interactive, batch"),
        ({"steps": 4, "mode": "ar"}, "mode ar does not take steps: leave it out, or use mode sweep, chunked"),
        ({"codec": "int8", "mode": "local"}, "mode local does not take codec: leave it out, or use mode sweep,"),
        ({"mode": "resample", "candidates": 0}, "candidates must be a whole number from 1 to 1024, not 0"),
        ({"mode": "resample", "scorer": ""}, "mode resample has no scorer ''; choose from scorer, ar"),
    ],
)
def test_a_wrong_field_is_refused(stub: Any, changes: dict[str, Any], says: str) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, says):
        list(stub.Generate(router_pb2.GenerateRequest(**{**GOOD, **changes}), timeout=PATIENCE_S))
    assert [*stub.Generate(router_pb2.GenerateRequest(**GOOD))][-1].summary.output_bytes == 4, "without a deadline"


def test_another_protocol_is_refused_with_the_older_side_named(stub: Any) -> None:
    for request in (router_pb2.GenerateRequest(**GOOD), router_pb2.DrawRequest(), router_pb2.StatusRequest()):
        request.protocol = 9
        call = getattr(stub, type(request).__name__.removesuffix("Request"))
        with pytest.raises(grpc.RpcError, match="this router protocol 1: upgrade onesweep on this router"):
            list(call(request))


# Routers whose hosts cannot serve


def test_hosts_with_different_weights_are_reported(bundles: Path, servers: Any) -> None:
    topology = local_topology(2, 3, bundles / "own", free_port_block(3) + 1)
    first, second = topology.hosts
    servers.stage(bundles / "own", first.blocks, first.listen, second.address, name=first.name)
    servers.stage(bundles / "other", second.blocks, second.listen, first.address, name=second.name)
    servers.router(topology, None)
    with Client(topology.router) as client:
        until(lambda: "checkpoint" in _reasons(client))
        with refused(grpc.StatusCode.UNAVAILABLE, "give every host the same checkpoint") as caught:
            client.generate("x", mode="sweep", max_bytes=4)
        digests = [read_manifest(bundles / name / "chain").digest()[:12] for name in ("own", "other")]
        assert all(digest in str(caught.value) for digest in digests)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "no local model"):
            client.generate("x", mode="local", max_bytes=4)


def test_a_mode_without_its_weights_names_them(bundles: Path, tmp_path: Path, local_ring: Any) -> None:
    for lacking, says in (("local", "no drafter .*has local/"), ("ar", r"no scorer \(neither scorer/ nor ar/")):
        bare = tmp_path / f"no-{lacking}"
        shutil.copytree(bundles / "own", bare)
        shutil.rmtree(bare / lacking)
        with local_ring(bare, 1) as client:
            assert "resample" not in client.status().modes
            with refused(grpc.StatusCode.FAILED_PRECONDITION, f"mode resample cannot be served: .*{says}"):
                client.generate("x", mode="resample", max_bytes=4)


def _reasons(client: Client) -> str:
    try:
        return " ".join(host.reason for host in client.status().hosts)
    except RouterError:
        return ""
