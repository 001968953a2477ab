"""Limits of a block host, from which most flags of `stage` and `host` derive. Help imports them: no torch."""

from dataclasses import dataclass

from stages.device import AUTO
from stages.errors import InputError
from stages.settings import setting
from stages.wire.channel import KEEP_WARM_S, check_name


def pause(text: str) -> float:
    """Seconds of `--keep-warm-ms`. Raises InputError."""
    if (milliseconds := int(text)) != 0 and not 10 <= milliseconds <= 60_000:
        raise InputError(f"--keep-warm-ms must be 0 (off) or 10 to 60000, not {milliseconds}")
    return milliseconds / 1000


def _memory(text: str) -> int:
    if (megabytes := int(text)) < 0:
        raise InputError(f"--prefix-mb must be 0 (off) or more, not {megabytes}")
    return megabytes


# argparse says "invalid int value: 'x'" by these names.
pause.__name__ = _memory.__name__ = "int"


@dataclass(frozen=True)
class HostSettings:
    """Limits of one stage server."""

    name: str
    # Pictures under way take some of it, too.
    session_mb: int = setting(256, "memory for KV caches", above=0)
    # For the beginnings of texts that ended, beside that of sessions.
    prefix_mb: int = setting(256, "memory for earlier prompts, 0 = off", type=_memory)
    lease_s: float = setting(60.0, "free an unused session after", above=0)
    # One more is refused.
    queue_limit: int = setting(64, "hops under way", name="--queue", above=0)
    # Messages of hops under way, until the next host has them; one more is refused. Decoded, what they carry takes up
    # to four times as much beside.
    queue_mb: int = setting(256, "memory for their messages", above=0)
    batch: int = setting(64, "hops that share a pass; 1 = none", above=0)
    backend: str = setting("torch", "what computes: torch, onnxruntime", metavar="B")
    # Of `device_for`; caches are there, too.
    device: str = setting(
        AUTO,
        "where hosts compute, caches included",
        shown="auto: a GPU that computes the model, else the CPU",
        metavar="cpu|cuda[:N]",
    )
    # Pause between messages that keep an idle link's congestion window open.
    keep_warm_s: float = setting(
        KEEP_WARM_S, "pace on idle links, 0 = off", name="--keep-warm-ms", shown="150", metavar="MS", type=pause
    )
    # How long to wait for the next host to take a hop.
    hop_timeout_s: float = setting(5.0, "wait for the next host", above=0)
    is_local: bool = False  # listens on a loopback address: requests may add delay to the links

    def __post_init__(self) -> None:
        check_name(self.name, "host name")
