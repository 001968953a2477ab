"""The cost of a request: sweeps, hops, bytes and milliseconds."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from serving.cli.deployment import Deployment
from serving.client.client import Client
from serving.router.accounting import Account
from serving.router.topology import HostEntry
from stages.model.codec import codec_named
from stages.model.resampling import ImportanceWeights
from stages.v1 import stage_pb2
from tests.conftest import Run

HOSTS = ("host-1", "host-2", "host-3")
PROMPT = "In the beginning "


def passage(host: str, compute_ms: float, received_bytes: int, queue_ms: float = 0.5) -> stage_pb2.HopTiming:
    return stage_pb2.HopTiming(host=host, queue_ms=queue_ms, compute_ms=compute_ms, received_bytes=received_bytes)


# Through the servers


@pytest.mark.parametrize("mode", ["sweep", "chunked", "ar"])
def test_compute_time_is_the_sum_over_hosts(client: Client, mode: str) -> None:
    result = client.generate(PROMPT, mode=mode, max_bytes=40, seed=1)
    assert [(host.name, host.blocks) for host in result.hosts] == [(name, [i]) for i, name in enumerate(HOSTS)]
    assert all(host.compute_ms > 0 and host.queue_ms >= 0 for host in result.hosts)
    assert result.compute_ms == pytest.approx(sum(host.compute_ms for host in result.hosts), abs=0.01)
    assert result.compute_ms <= result.latency_ms
    assert result.host_seconds == pytest.approx(result.compute_ms / 1000, abs=1e-4)
    assert 0 < result.first_byte_ms <= result.latency_ms


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_wire_bytes_are_those_of_the_messages(client: Client, codec: str) -> None:
    """Each hop but the last holds the estimate, the prompt and little else; only the estimate grows with the codec."""
    result = client.generate(PROMPT, mode="sweep", max_bytes=128, seed=1, codec=codec)
    first, *between, last = result.wire_bytes
    estimate = codec_named(codec).size(128, 32)
    assert len(PROMPT) < first < len(PROMPT) + 256
    for hop, passages in zip(between, (1, 2), strict=True):
        assert estimate + first < hop <= estimate + first + 64 * passages
    assert 128 < last < 128 + 64 * len(HOSTS) + 64
    assert codec == "fp32" or max(result.wire_bytes) < 14_000, "one TCP flight"
    assert (result.sweeps, result.hops, result.wire_bytes_total) == (1, len(HOSTS) + 1, sum(result.wire_bytes))
    assert (result.prompt_bytes, result.output_bytes, len(result.output)) == (len(PROMPT), 128, 128)


def test_json_output_has_every_metric(deployment: Deployment, onesweep: Run) -> None:
    router = deployment.topology.router
    code, out, _ = onesweep("generate", PROMPT, "--router", router, "--max-bytes", 30, "--seed", 7, "--json")
    record = json.loads(out)
    assert code == 0
    figures = "prompt_bytes output_bytes sweeps hops wire_bytes latency_ms compute_ms hosts"
    chosen = "scorer chunk candidates effective_samples divergence_bits distance_bound batches reason"
    assert set(record) >= {"text", "mode", "seed", *figures.split(), *chosen.split()}
    assert [set(host) for host in record["hosts"]] == [{"name", "blocks", "compute_ms", "queue_ms"}] * 3
    assert bytes.fromhex(record["output_hex"]).decode(errors="replace") == record["text"]
    assert (record["mode"], record["seed"], record["output_bytes"]) == ("resample", 7, 30)


# The sums


def test_sweeps_add_up_and_wire_bytes_show_the_largest_hop() -> None:
    a, b = HostEntry("a", "a:1", (0,), "a:1"), HostEntry("b", "b:1", (1,), "b:1")
    account = Account(hosts={"a": SimpleNamespace(entry=a), "b": SimpleNamespace(entry=b)})
    first = stage_pb2.Event(text=b"ab", timings=[passage("a", 2.0, 100), passage("b", 3.0, 200)])
    account.add_sweep(first)
    assert account.wire_bytes == [100, 200, len(first.SerializeToString())]
    account.add_sweep(stage_pb2.Event(text=b"c", timings=[passage("a", 4.0, 150), passage("b", 5.0, 50)]))
    assert (account.sweeps, account.hops, account.wire_bytes[:2]) == (2, 6, [150, 200])
    assert account.compute_ms == {a: 6.0, b: 8.0}
    assert account.wire_bytes_total > 500


def test_drafts_and_candidates_add_up() -> None:
    account = Account()
    account.add_draft(5, 2)
    account.add_draft(0, 0)
    account.add_draft(3, 3)
    summary = account.summary("ar-speculative", 1)
    assert (summary.drafted, summary.reached, summary.accepted) == (8, 6, 5)
    account = Account()
    for count, length, bits in ((4, 8, 0.5), (2, 16, 0.25), (8, 2, 0.0)):
        account.add_candidates(ImportanceWeights(np.full(count, 1 / count), bits), length, 1.5)
    summary = account.summary("resample", 1)
    assert (summary.chunk, summary.candidates, summary.compute_ms) == (16, 8, 4.5)
    assert summary.effective_samples == pytest.approx((4 + 2 + 8) / 3)
    assert summary.divergence_bits == pytest.approx((0.5 * 32 + 0.25 * 32) / 80), "for a byte"


def test_hosts_are_named_as_in_the_topology() -> None:
    """Also where two call themselves the same: one took over from the other."""
    account = Account(trips=[])
    for name, compute_ms in (("berlin", 2.0), ("paris", 3.0), ("berlin", 4.0)):
        account.hosts = {"stage-0": SimpleNamespace(entry=HostEntry(name, f"{name}:7701", (0,), f"{name}:7701"))}
        account.add_sweep(stage_pb2.Event(timings=[passage("stage-0", compute_ms, 10)]))
    summary = account.summary("sweep", 1)
    shares = [(host.name, list(host.blocks), host.compute_ms) for host in summary.hosts]
    assert shares == [("berlin", [0], 6.0), ("paris", [0], 3.0)]
    assert summary.compute_ms == 9.0
    assert [trip.hosts[0].name for trip in account.trips] == ["berlin", "paris", "berlin"]


def test_a_replayed_text_keeps_only_its_costs() -> None:
    account = Account()
    account.mode = "ar"
    account.add_sweep(stage_pb2.Event(text=b"ab", timings=[passage("a", 2.0, 100)]))
    account.add_text(b"ab")
    account.begin_again()
    assert (account.output_tokens, account.sweeps, account.replays) == (0, 1, 1)
    assert account.summary("auto", 1).mode == "ar"
