"""The result of a request: its text or its pictures, and its cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from io import BytesIO
from typing import TYPE_CHECKING, Any

from serving.v1 import router_pb2

# The command line imports this module, and a text request needs neither of these.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

# Logprobs of consecutive tokens.
Logprobs = list[router_pb2.TokenLogprob]


class PromptLogprobs(Logprobs):
    """Logprobs of a prompt's own tokens; NaN for the first."""


# Decimals to keep, if not 3.
DIGITS = {"divergence_bits": 4, "distance_bound": 4}


@dataclass(frozen=True)
class HostShare:
    """One host's share in a request."""

    name: str
    blocks: list[int]
    compute_ms: float
    queue_ms: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Mode, seed and cost of any request, as the servers recorded them."""

    # The mode that ran.
    mode: str = ""
    # Of pictures that of the first; the next one has the next seed.
    seed: int = 0
    # Trips along the hosts.
    sweeps: int = 0
    # Messages from machine to machine, over all sweeps.
    hops: int = 0
    # Payload of each hop of a sweep, in its order; where sweeps differ, the largest.
    wire_bytes: list[int] = field(default_factory=list)
    # Payload of all hops, in bytes.
    wire_bytes_total: int = 0
    # At the router, from admission to the last byte.
    latency_ms: float = 0.0
    # Arithmetic on the hosts and the router.
    compute_ms: float = 0.0
    # Of each: `name`, `blocks`, `compute_ms` (its share of passes) and `queue_ms` (waiting).
    hosts: list[HostShare] = field(default_factory=list)
    # Moves to other hosts or routers, because one failed or was late.
    replays: int = 0
    # What the router's and the hosts' logs call this request.
    request: str = ""

    @property
    def host_seconds(self) -> float:
        """Seconds of compute on the hosts."""
        return sum(host.compute_ms for host in self.hosts) / 1000


@dataclass(frozen=True)
class Result(Cost):
    """A generated text."""

    # The output. Control characters are printed as U+FFFD without `--json`.
    text: str
    # Of UTF-8.
    prompt_bytes: int
    output_bytes: int
    # As many as bytes where the model reads bytes.
    prompt_tokens: int
    # That were written: a stop string may have cut the text before the last of them.
    output_tokens: int
    # Whether a stop string or the model itself ended the text, before it had the length asked for.
    stopped: bool
    # From admission to the first byte.
    first_byte_ms: float
    # Tokens that a drafter wrote, and how many of them were right.
    drafted: int
    accepted: int
    # Draft tokens that counted: the right ones, and the first wrong one of each sweep.
    reached: int
    # The exact bytes; `text` shows those that are no UTF-8 as U+FFFD.
    output: bytes = field(repr=False)
    # The model that scored; empty where none did.
    scorer: str = ""
    # How tokens were drawn: the request's settings, or where it named none the model's own.
    sampling: str = ""
    # Tokens a sweep, the most; 0 where the mode has none.
    chunk: int = 0
    # Continuations scored in a sweep, the most.
    candidates: int = 0
    # Of a sweep's candidates on their way.
    batches: int = 1
    # Of the candidates, as their weights leave them: the mean over sweeps.
    effective_samples: float = 0.0
    # KL(drafter || scorer) for a token, as the candidates showed it.
    divergence_bits: float = 0.0
    # Estimate: most total variation from the scorer's distribution; 1 = unknown.
    distance_bound: float = 0.0
    # Of the prompt, those that hosts had in memory.
    cached_tokens: int = 0
    # Why mode `auto` picked this mode; empty where the request named it.
    reason: str = ""

    @property
    def acceptance(self) -> float | None:
        """Share of the draft tokens reached that were accepted; None without drafts."""
        return self.accepted / self.reached if self.reached else None

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["output_hex"] = record.pop("output").hex()
        return record


@dataclass(frozen=True, eq=False)
class DrawnPictures(Cost):
    """Pictures. A preview has only pixels and block."""

    # (pictures, channels, height, width) uint8.
    pixels: NDArray[np.uint8]
    # The block after which a preview was taken.
    block: int | None = None
    # The class of each picture; "" for none.
    classes: list[str] = field(default_factory=list)
    levels: int = 0
    solver: str = ""
    guidance: float = 1.0

    def __len__(self) -> int:
        return len(self.pixels)

    def as_json(self) -> dict[str, Any]:
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pixels", "block", "hosts")}
        return {**record, "hosts": [asdict(host) for host in self.hosts]}

    def png(self, index: int = 0) -> bytes:
        """One picture as a PNG file."""
        buffer = BytesIO()
        image_of(self.pixels[index]).save(buffer, "PNG")
        return buffer.getvalue()

    def sheet(self, columns: int | None = None, scale: int = 1) -> Image.Image:
        """All pictures in rows of `columns`, each pixel `scale` pixels wide."""
        import numpy as np

        columns = min(columns or len(self), len(self))
        _, channels, height, width = self.pixels.shape
        rows, gap = -(-len(self) // columns), 1
        whole = np.zeros((channels, rows * (height + gap) - gap, columns * (width + gap) - gap), np.uint8)
        for i, picture in enumerate(self.pixels):
            top, left = i // columns * (height + gap), i % columns * (width + gap)
            whole[:, top : top + height, left : left + width] = picture
        image = image_of(whole)
        return image.resize((image.width * scale, image.height * scale), resample=0)


def image_of(pixels: NDArray[np.uint8]) -> Image.Image:
    """Convert (channels, height, width) to a Pillow image."""
    from PIL import Image

    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))


def booked(summary: router_pb2.Summary | router_pb2.DrawSummary, kind: type[Result | DrawnPictures]) -> dict[str, Any]:
    """The values of a summary for the fields of `kind`, which it has under the same names."""
    names = {f.name for f in fields(kind)} - {"text", "output", "pixels", "block", "hosts", "wire_bytes"}
    values = {name: getattr(summary, name) for name in names}
    values |= {name: round(value, DIGITS.get(name, 3)) for name, value in values.items() if isinstance(value, float)}
    shares = [HostShare(h.name, [*h.blocks], round(h.compute_ms, 3), round(h.queue_ms, 3)) for h in summary.hosts]
    return values | {"wire_bytes": list(summary.wire_bytes), "hosts": shares}


class HostsLost(str):
    """Why a router cannot serve: hosts do not answer, and no joining machine takes their place."""


def unready_words(status: router_pb2.StatusResponse) -> str:
    """Why a router cannot serve, from its hosts' reasons; empty if none gives one."""
    if lost := [host.reason for host in status.hosts if host.lost]:  # the others wait for the lost ones
        return HostsLost("; ".join(lost))
    found = [host.reason for host in status.hosts if host.reason]
    # hosts that wait for others repeat their reasons
    return "; ".join(each for each in found if not any(other in each for other in found if other != each))
