"""A server's own certificate, for browsers: read from files, and again when they change, so that it can be renewed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from stages.errors import InputError
from stages.security import Stamp, check_secret, stamp_of

log = logging.getLogger(__name__)


class OwnCertificate:
    """A certificate and its key, looked up anew for every handshake."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises InputError."""
        self.certificate, self.key = certificate, key
        self._stamp = self._stamp_now()
        self.context = self._newest = _read(certificate, key)
        """What a server is given once; each handshake changes to the newest."""
        self.context.sni_callback = self._show

    def _stamp_now(self) -> Stamp:
        return stamp_of(self.certificate), stamp_of(self.key)

    def _show(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._newest = _read(self.certificate, self.key)
                log.info("new certificate %s", self.certificate)
            except InputError as error:  # half of it may be replaced yet: what changes next is looked at again
                log.warning("new certificate not taken: %s", error)
        connection.context = self._newest


def _read(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises InputError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # without a passphrase callback a locked key would ask on the terminal
        context.load_cert_chain(certificate, key, password=lambda: "")
        check_secret(key)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InputError(
            f"cannot use --tls-cert {certificate} with --tls-key {key} "
            f"({getattr(error, 'strerror', None) or error}): give PEM files of one certificate and its unlocked key"
        ) from None
    return context
