"""Lines of hosts that draw, whose router is the test, and the same pictures drawn without them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from serving.cli.ports import free_port_block
from stages.backends import Backend
from stages.model.codec import FEATURE_LIMIT, codec_named, hidden_codec
from stages.pictures.part import PictureKind, PicturePart
from stages.pictures.trajectory import DrawPlan, PicturePiece, Trajectory, block_sigmas, range_sigmas
from stages.v1 import stage_pb2
from stages.wire.messages import put_work
from tests.conftest import until
from tests.stages.pictures.tiny import TINY, tiny_partition, tiny_parts
from tests.stages.raw_client import ROUTER, Peer, peer

PLAN = DrawPlan(seed=11, classes=(0, 1, 2, 3, 1), levels=7, solver="2m", guidance=1.5)


def drawing_of(plan: DrawPlan, **changes: Any) -> stage_pb2.Drawing:
    fields = {"seed": plan.seed, "classes": plan.classes, "levels": plan.levels, "solver": plan.solver}
    return stage_pb2.Drawing(**{**fields, "guidance": plan.guidance, **changes})


class Line:
    """Hosts one after the other, from the first block to the last."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers, self.path = peers, [each.address for each in peers]
        (release,) = peers[0].describe().releases
        self.digests = {"chain": release.chain.digest, "steps": release.steps.digest}

    def hop(self, kind: PictureKind, session: str, plan: DrawPlan = PLAN, **fields: Any) -> stage_pb2.Hop:
        """The first hop of a Draw (chain) or a Denoise (steps)."""
        hop = stage_pb2.Hop(router=ROUTER, session=session, digest=self.digests[kind], left_s=60)
        hop.path.extend(self.path)
        work = stage_pb2.Draw if kind == "chain" else stage_pb2.Denoise
        put_work(hop, work(**{"drawing": drawing_of(plan), "codec": "int8", **fields}))
        return hop

    def result(self, session: str) -> stage_pb2.Event:
        return self.peers[-1].event_of(session)

    def drawn(self, kind: PictureKind, session: str, plan: DrawPlan = PLAN, **fields: Any) -> bytes:
        """Pixels of a request that is alone."""
        self.peers[0].push(self.hop(kind, session, plan, **fields))
        event = self.result(session)
        assert not event.fault.message
        self.release(session)
        return event.pictures.pixels

    def release(self, *sessions: str) -> None:
        for each in self.peers:
            each.release(*sessions)


@contextmanager
def open_line(servers: Any, bundle: Path, *blocks: tuple[int, ...], **host: Any) -> Iterator[Line]:
    """Hosts that hold these blocks."""
    port = free_port_block(len(blocks))
    addresses = [f"127.0.0.1:{port + i}" for i in range(len(blocks))]
    with ExitStack() as stack:
        peers = []
        for i, held in enumerate(blocks):
            after = None if len(blocks) == 1 else addresses[(i + 1) % len(blocks)]
            servers.stage(bundle, held, addresses[i], after, name=f"host-{i}", **host)
            peers.append(stack.enter_context(peer(addresses[i])))
        for each in peers:
            until(lambda each=each: each.describe().ready)
            each.subscribe()
        yield Line(peers)


def undivided(parts: Sequence[PicturePart], plan: DrawPlan, codec: str = "fp32") -> Tensor:
    """Pixels of a net that evaluates all of its parts at every level."""
    partition, (first, *others) = tiny_partition("steps"), [Backend().picture(part) for part in parts]
    sigmas = range_sigmas(*partition.range(0), plan.levels)
    trajectory = Trajectory(TINY, plan, partition.sigma_max, sigmas, is_last=True)
    while not trajectory.done:
        piece = trajectory.piece()
        (x,) = first.evaluate([piece])
        for runner in others:
            x = hidden_codec(codec).round_trip(x.flatten(0, 1), FEATURE_LIMIT).view_as(x)
            (x,) = runner.evaluate([PicturePiece(x, piece.sigma, piece.classes)])
        trajectory.supply(x)
    return trajectory.pixels()


def drawn_here(kind: PictureKind, plan: DrawPlan = PLAN, codec: str = "int8") -> list[Tensor]:
    """Pixels after each block of the tiny chain, or those of its undivided net, in this process and without hops."""
    if kind == "steps":
        return [undivided(tiny_parts(kind), plan, codec)]
    runners = [Backend().picture(part) for part in tiny_parts(kind)]
    partition, shape = tiny_partition(kind), (plan.pictures, TINY.tokens, TINY.patch_dim)
    estimate, shown = None, []
    for block, runner in enumerate(runners):
        is_last, sigmas = block == TINY.parts - 1, block_sigmas(partition, block, plan.levels)
        trajectory = Trajectory(TINY, plan, partition.sigma_max, sigmas, is_last=is_last, estimate=estimate)
        while not trajectory.done:
            trajectory.supply(runner.evaluate([trajectory.piece()])[0])
        shown.append(trajectory.pixels())
        estimate = codec_named(codec).round_trip(trajectory.estimate.flatten(0, 1), TINY.limit).view(shape)
    return shown
