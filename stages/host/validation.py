"""Validation: turns a hop into typed work and decodes its payloads, before any session is touched.

Every field is checked here and nowhere else, and every payload is decoded once: decoding is checking it.
"""

from collections.abc import Sequence

from stages.errors import CodecError
from stages.host.plan import HostPlan, ModelKind, ModelSource
from stages.host.prefixes import VOUCHER_BYTES
from stages.host.scheduler import HopWork
from stages.host.work.pictures import parse_denoise, parse_draw
from stages.host.work.read import parse_read
from stages.host.work.resample import parse_resample
from stages.host.work.score import parse_score
from stages.host.work.sweep import parse_sweep
from stages.limits import MAX_ADDRESS
from stages.model.prefill import ATTEND_POSITIONS
from stages.v1 import stage_pb2
from stages.wire.channel import MAX_NAME
from stages.wire.messages import MAX_TIMINGS, AnyWork, check_label, check_timings
from stages.wire.status import deadline_exceeded, failed_precondition, invalid

MAX_NUMBER = 1 << 62  # of a sweep or step; the next ones have larger numbers
SPACE_BYTES, DIGEST_BYTES = 16, 32  # of a kept prefix
MAX_INSTANCE = 2 * MAX_NAME  # a host's name and the token of its process
TEXT = ("sweep", "read")
# The models that may do each kind of work.
MODELS: dict[str, tuple[ModelKind, ...]] = {
    "sweep": ("chain",),
    "read": ("ar", "scorer"),
    "draw": ("chain",),
    "denoise": ("steps",),
}


def parse_hop(hop: stage_pb2.Hop, plan: HostPlan, is_open: bool = False) -> HopWork:
    """The work of `hop` for a host with `plan`. Raises StatusError unless such a host can do it.

    :param is_open: its session is open, and has the same router and path."""
    kind_of_work = hop.WhichOneof("work")
    if kind_of_work is None:
        raise invalid("the message carries no work: neither sweep nor step; check that its sender runs this version")
    _check_envelope(hop, is_open)
    message: AnyWork = getattr(hop, kind_of_work)
    if plan.draws and kind_of_work in TEXT:
        raise failed_precondition("this checkpoint draws pictures: ask for pictures with `onesweep draw`")
    if not plan.draws and kind_of_work not in TEXT:
        raise failed_precondition("this checkpoint writes text: ask for text with `onesweep generate`")
    kind, source = _model(hop, plan, MODELS[kind_of_work])
    if message.number > MAX_NUMBER:
        raise invalid(f"a session's sweep has number {message.number}; the limit is {MAX_NUMBER}")
    noun = "block" if isinstance(message, stage_pb2.Sweep | stage_pb2.Draw) else "stage"
    if (part := getattr(message, noun)) != plan.blocks[0]:
        held = ",".join(map(str, plan.blocks))
        raise failed_precondition(f"{noun} {part} does not start here: this host holds {held}; check the topology")
    if hop.HasField("memory"):
        _check_memory(hop)
    try:
        match kind_of_work:
            case "sweep":
                work: HopWork = parse_sweep(hop, source)
            case "draw":
                work = parse_draw(hop, source)
            case "denoise":
                work = parse_denoise(hop, source)
            case _ if hop.read.score.remaining:
                work = parse_resample(hop, kind, source)
            case _ if hop.read.HasField("score"):
                work = parse_score(hop, kind, source)
            case _:
                work = parse_read(hop, kind, source, plan)
    except CodecError as error:  # of its payloads
        raise invalid(str(error)) from None
    if not hop.left_s > 0:  # true for NaN too
        raise deadline_exceeded("the deadline of this request has passed")
    return work


# The envelope


def _check_envelope(hop: stage_pb2.Hop, is_open: bool) -> None:
    if not is_open:
        check_label(hop.router, "router")
        check_label(hop.session, "session")
        if len(hop.path) > MAX_TIMINGS:
            raise invalid(f"the path has {len(hop.path)} hosts; the limit is {MAX_TIMINGS}")
        for address in hop.path:
            check_label(address, "an address on the path", MAX_ADDRESS)
    if hop.place >= max(len(hop.path), 1):
        raise invalid(f"place {hop.place} is not on a path of {len(hop.path)} hosts")
    check_timings(hop.timings)
    if hop.request:  # names end up in logs
        check_label(hop.request, "request")


def _check_memory(hop: stage_pb2.Hop) -> None:
    memory, read = hop.memory, hop.read
    if not hop.HasField("read"):
        raise invalid("only a hop that reads text can use memory: this one carries other work")
    if read.score.batch:
        raise invalid("a later batch of candidates opens no session: its message cannot use memory")
    if len(memory.space) != SPACE_BYTES:
        raise invalid(f"a space in memory must have {SPACE_BYTES} bytes, not {len(memory.space)}")
    hosts = max(len(hop.path), 1)
    if len(memory.hosts) > hosts or len(memory.vouchers) > hosts * VOUCHER_BYTES:
        raise invalid(f"memory names more hosts than the {hosts} of the path")
    for instance in memory.hosts:
        check_label(instance, "an instance of a host", MAX_INSTANCE)
    if not memory.prefix and read.start:
        raise invalid(f"a session must start at 0 or after a kept prefix, not at {read.start}")
    if memory.prefix and (len(memory.prefix) != DIGEST_BYTES or not read.start or read.start % ATTEND_POSITIONS):
        grid = f"a multiple of {ATTEND_POSITIONS}"
        raise invalid(f"a kept prefix must have a digest of {DIGEST_BYTES} bytes and end at {grid}")


def _model(hop: stage_pb2.Hop, plan: HostPlan, kinds: Sequence[ModelKind]) -> tuple[ModelKind, ModelSource]:
    """The model that a hop is for, by its digest: the first if two have the same digest."""
    for kind in kinds:
        source = plan.models.get(kind)
        if source is not None and source.digest == hop.digest:
            return kind, source
    held = {kind: plan.models[kind] for kind in kinds if kind in plan.models}
    if not held:
        lacking = " and ".join(f"{kind}/" for kind in kinds)
        raise failed_precondition(f"this host has no {kinds[0]} model; its checkpoint directory lacks {lacking}")
    shown = ", ".join(f"{source.digest[:12]} ({kind})" for kind, source in held.items())
    raise failed_precondition(
        f"the request is for the checkpoint {hop.digest[:12] or '(none)'}, but this host has {shown}: "
        "give every host the same checkpoint"
    )
