"""What a run found, and what it counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SAMPLE_BYTES = 4096
"""Of an input that are kept."""


@dataclass
class Finding:
    """Something that must not happen, and the first input after which it did."""

    target: str
    what: str
    sample: bytes
    """Its beginning."""
    sample_bytes: int
    """Of the whole input."""
    count: int = 1

    def to_record(self) -> dict[str, object]:
        counts = {"count": self.count, "sample_bytes": self.sample_bytes}
        return {"target": self.target, "what": self.what, **counts, "sample_hex": self.sample.hex()}


@dataclass
class Tally:
    """What one target was sent, and said."""

    target: str
    findings: list[Finding] = field(default_factory=list)
    inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """How often each status, or outcome, came."""

    def answer(self, what: str, count: int = 1) -> None:
        self.answers[what] += count

    def finding(self, what: str, sample: bytes = b"") -> None:
        """The same again is counted, not listed."""
        for finding in self.findings:
            if finding.what == what:
                finding.count += 1
                return
        self.findings.append(Finding(self.target, what, sample[:SAMPLE_BYTES], len(sample)))

    def to_record(self) -> dict[str, object]:
        return {"target": self.target, "inputs": self.inputs, "answers": dict(self.answers.most_common())}
