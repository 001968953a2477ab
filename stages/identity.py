"""Who somebody is: the name `onesweep://ROLE/NAME` in a certificate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SCHEME = "onesweep://"
HOST, ROUTER, CLIENT = "host", "router", "client"
ROLES = (HOST, ROUTER, CLIENT)


@dataclass(frozen=True)
class Identity:
    """A role, and the name of who has it."""

    role: str
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"

    @classmethod
    def of(cls, names: Iterable[str]) -> Identity | None:
        """The identity among a certificate's names; None where there is none, or more than one."""
        ours = [name.removeprefix(SCHEME) for name in names if name.startswith(SCHEME)]
        if len(ours) != 1:
            return None
        role, _, name = ours[0].partition("/")
        return cls(role, name) if role in ROLES and name and "/" not in name else None
