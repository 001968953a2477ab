"""One release as the router serves it: the hosts' weights, its own model, the modes over both, and its smoke test."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from serving.drawing.modes import DrawingMode, LocalDrawing, check_drawing, drawing_modes, retry_drawing
from serving.modes.ar import ArMode, SpeculativeMode
from serving.modes.auto import AutoMode, Guide
from serving.modes.base import Generation, Mode
from serving.modes.chunked import ChunkedMode, SweepMode
from serving.modes.frontier import Frontier, LatencyModel, read_frontier
from serving.modes.local import CopyMode, LocalMode, read_local_model
from serving.modes.pretrained_tokenizer import read_tokenizers
from serving.modes.resample import ResampleMode, score
from serving.modes.tokenizer import NO_TOKENIZERS, ChatPrompt, Tokenizers
from serving.router.accounting import Account
from serving.router.audit import AuditFailed, retry_after_audit
from serving.router.host_link import Weights
from serving.router.ring import Ring, RingView
from serving.router.session import Session
from serving.router.validation import PromptPools, check_fit, tokenized
from serving.v1 import router_pb2
from stages.checkpoint.bundle import FRONTIER_NAME, bundle_draws, find_bundle, holds_copy
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.clock import monotonic
from stages.errors import InputError
from stages.host.plan import ModelKind, plan_host
from stages.model.scoring import max_scored
from stages.model.vocabulary import Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import StatusError, failed_precondition, unavailable

if TYPE_CHECKING:
    from serving.router.own_models import LocalModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterParts:
    """The router's own parts of a release."""

    # The drafter, and the model of mode `local`; of `local:copy`, if it is the hosts' model in fewer bits.
    local: "LocalModel | None"
    guide: Guide
    directory: Path | None  # the bundle
    weights: Weights = ()  # of the hosts' models in the bundle; empty if it has none
    tokenizers: Tokenizers = NO_TOKENIZERS
    drawing: LocalDrawing = field(default_factory=lambda: LocalDrawing(None))
    is_copy: bool = False

    @classmethod
    def read(cls, directory: Path | None, frontier: Path | None = None) -> Self:
        """Read them; blocks. Raises OnesweepError for a damaged model, or a bad frontier that the user named.

        :param frontier: the options of `auto`; None = the bundle's, if it has one: a bad one stops `auto` only.
        """
        if directory is None:
            return cls(None, Guide() if frontier is None else Guide(read_frontier(frontier)), None)
        weights = plan_host(directory, (0,)).weights if find_bundle(directory).for_hosts else ()
        if bundle_draws(directory):
            return cls(None, Guide(), directory, weights, drawing=LocalDrawing(directory))
        local, guide, path = read_local_model(directory), Guide(), directory / FRONTIER_NAME
        digest = local.digest if local else ""
        if frontier is not None:
            guide = Guide(read_frontier(frontier), local_digest=digest)
        elif path.exists():
            try:
                guide = Guide(read_frontier(path), local_digest=digest)
            except InputError as error:
                log.warning("%s", error)
                guide = Guide(problem=str(error))
        return cls(local, guide, directory, weights, read_tokenizers(directory), is_copy=holds_copy(directory))


@dataclass(eq=False)
class ActiveRelease:
    """The release that a request uses from its start to its end."""

    view: RingView
    modes: dict[str, Mode]
    drawing: dict[str, DrawingMode]
    conditions: LatencyModel
    directory: Path | None
    name: str  # empty if the hosts brought the weights, until one of them reports its name for them
    requests: int = 0  # running

    @classmethod
    def over(cls, ring: Ring, own: RouterParts, name: str = "") -> Self:
        """:param name: empty = prefer these weights, but serve others if the hosts hold those."""
        view = RingView(ring, own.weights, pinned=bool(name))
        conditions = LatencyModel(view.rtts_ms)
        drawing = drawing_modes(view, own.drawing)
        return cls(view, all_modes(view, own, conditions), drawing, conditions, own.directory, name)

    @property
    def release(self) -> str:
        return self.name or self.view.release

    @property
    def frontier(self) -> Frontier | None:
        """The options of `auto`; None while these weights have none."""
        auto = self.modes[AutoMode.name]
        return auto.guide.frontier if isinstance(auto, AutoMode) and not auto.problem else None

    @property
    def served_modes(self) -> list[str]:
        return [name for name, mode in self.modes.items() if not mode.problem]

    @property
    def drawing_modes(self) -> list[str]:
        return [name for name, mode in self.drawing.items() if mode.info is not None]

    @property
    def pictures(self) -> stage_pb2.PictureInfo | None:
        """The pictures that the weights can draw; None for weights that generate text."""
        return next((mode.info for mode in self.drawing.values() if mode.info is not None), None)


def all_modes(ring: RingView, own: RouterParts, conditions: LatencyModel) -> dict[str, Mode]:
    """Every mode over a ring and the router's own models; `auto` chooses by its guide and `conditions`."""
    local, tokenizers = own.local, own.tokenizers
    fixed: list[Mode] = [
        SweepMode(ring, tokenizers),
        ChunkedMode(ring, tokenizers),
        ResampleMode(ring, local, tokenizers),
        ArMode(ring, tokenizers),
        SpeculativeMode(ring, tokenizers),
        LocalMode(None if own.is_copy else local, tokenizers),
        CopyMode(local if own.is_copy else None, tokenizers),
    ]
    modes = {mode.name: mode for mode in fixed}
    return modes | {AutoMode.name: AutoMode(ring, modes, own.guide, conditions)}


PROMPT = b"The old man said that"
TEST_TOKENS = 8
TEST_TIMEOUT_S = 60.0
# Nats that a backend may round beyond the manifest's own tolerance. Parts of different models miss by far more.
LOSS_TOLERANCE = 0.05
BUSY_TRIES, BUSY_PAUSE_S = 10, 0.5
PIPELINES: tuple[ModelKind, ...] = ("ar", "scorer")

T = TypeVar("T")


async def smoke_test(served: ActiveRelease, directory: Path, say: Callable[[str], object]) -> None:
    """Try every mode of a release. Raises StatusError that says what is wrong with it."""
    paths = find_bundle(directory).models
    for kind in PIPELINES:
        if kind in paths:
            manifest = read_manifest(paths[kind])
            nats = await _when_free(partial(_nats, served.view, kind, manifest))
            expected = expected_nats(manifest)
            tolerance = manifest.probe_tolerance + LOSS_TOLERANCE
            if expected is None or not abs(nats - expected) <= tolerance:  # true for NaN too
                raise failed_precondition(
                    f"{kind}/: its probe text takes {nats:.4f} nats a token through the hosts, but its manifest says "
                    f"{expected}: the parts do not form the right model"
                )
            say(f"{kind}: {nats:.4f} nats a token on its probe text, through the hosts")
    jobs = [(name, partial(_write, served.modes[name])) for name in served.served_modes]
    jobs += [(name, partial(_draw, served.drawing[name])) for name in served.drawing_modes]
    for name, job in jobs:
        try:
            await _when_free(job)
        except StatusError as refusal:
            raise StatusError(refusal.code, f"mode {name} fails with this release: {refusal.message}") from None
    say(f"modes that work: {', '.join(name for name, _ in jobs)}")


async def _when_free(job: Callable[[], Awaitable[T]]) -> T:
    """Run `job`, again while hosts are busy with requests or one of them is found to lie; returns its result."""
    for left in reversed(range(BUSY_TRIES)):
        try:
            return await job()
        except AuditFailed as error:  # the faulty host is quarantined by now
            if not left:
                raise unavailable(f"{error} in the smoke test: check the hosts") from None
        except StatusError as refusal:
            if refusal.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or not left:
                raise
            await asyncio.sleep(BUSY_PAUSE_S)
    raise AssertionError


def expected_nats(manifest: Manifest) -> float | None:
    """Loss per token on the probe text, as a manifest recorded it for its last part."""
    last = manifest.parts[-1]
    measure = "next_byte_nats" if manifest.tokenizer == "bytes" else "next_token_nats"
    return last.probe.get(measure) if last else None


async def _write(mode: Mode) -> None:
    generation = Generation(prompt=PROMPT, seed=1, codec=mode.default_codec, max_tokens=TEST_TOKENS, due_at=_deadline())
    account = Account()
    generation = await tokenized(generation, ChatPrompt(), mode, account, PromptPools())
    check_fit(generation, mode)
    async for _ in retry_after_audit(mode, generation, account):
        pass
    if account.output_tokens != TEST_TOKENS and not generation.ends:
        raise failed_precondition(f"it wrote {account.output_tokens} of {TEST_TOKENS} test tokens")


async def _draw(mode: DrawingMode) -> None:
    order = check_drawing(router_pb2.DrawRequest(classes=["0"]), mode, {mode.name: mode}, _deadline())
    await retry_drawing(order, Account(), lambda preview: None)


async def _nats(view: RingView, kind: ModelKind, manifest: Manifest) -> float:
    vocabulary, most = Vocabulary(manifest.text_architecture.vocabulary), max_scored(manifest.text_architecture.width)
    known = manifest.probe
    total = 0.0
    with Session(view, kind, len(known), _deadline(), Account()) as session:
        for at in range(1, len(known), most):
            piece = known[at : at + most]
            step = stage_pb2.Read(
                codec="fp32",
                score=stage_pb2.Score(temperature=1.0, candidates=[vocabulary.encode(piece)]),
            )
            _, nats = await score(session, step, vocabulary.encode(known[:at]))
            total -= float(nats.sum())
    return total / (len(known) - 1)


def _deadline() -> float:
    return monotonic() + TEST_TIMEOUT_S
