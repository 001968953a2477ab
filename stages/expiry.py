"""When this process's own certificate ends: what is renewed by hand, or by a timer, is forgotten one day."""

from __future__ import annotations

from stages.errors import InputError
from stages.security import Stamp, Tls


class Expiry:
    """Looked up again when the files change."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._stamp: Stamp | None = None
        self._unix_s: float | None = None

    def unix_s(self) -> float | None:
        """None without a certificate; of files that are being replaced, or are wrong now, the last that was right."""
        if self._tls is not None and (stamp := self._tls.stamp()) != self._stamp:
            try:
                certificate = self._tls.read().certificate
            except InputError:
                return self._unix_s
            self._stamp = stamp
            self._unix_s = certificate.until.timestamp() if certificate else None
        return self._unix_s

    def rows(self) -> dict[tuple[str, ...], float]:
        """As a figure without labels."""
        unix_s = self.unix_s()
        return {} if unix_s is None else {(): unix_s}
