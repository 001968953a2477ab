"""What a host says of itself to those who look for hosts, and where it says it."""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from stages.errors import InputError
from stages.transport import check_name, parse_address

MAX_BLOCKS = 4096
MAX_ADDRESS = 255


@dataclass(frozen=True)
class Registration:
    """One host. Whoever makes one, or reads one from elsewhere, gets an InputError for what cannot be true."""

    name: str
    address: str
    """What others dial."""
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        if check_name(self.name, "host name") == "router":
            raise InputError("a host cannot be called 'router': give it another name")
        check_dialled(self.address)
        first = self.blocks[0] if self.blocks else -1
        if not 0 <= first < MAX_BLOCKS or self.blocks != tuple(range(first, first + len(self.blocks))):
            raise InputError(f"host {self.name}: blocks must be neighbours, in order, and below {MAX_BLOCKS}")


class Registry(ABC):
    """Where hosts say that they are there."""

    @abstractmethod
    async def check(self) -> None:
        """Raises ServiceError when the registry does not answer."""

    @abstractmethod
    async def register(self, registration: Registration) -> None:
        """Keep a host registered until this is cancelled, and take it away then; goes on while the registry is down."""

    @abstractmethod
    def follow(self) -> AsyncGenerator[tuple[Registration, ...], None]:
        """All hosts, in the order of their blocks: at once, and again whenever something changed.

        While the registry is down nothing has changed."""


def check_dialled(address: str, what: str = "address") -> str:
    """`address`, if another machine can dial it. Raises InputError."""
    if len(address) > MAX_ADDRESS:
        raise InputError(f"{what} must be at most {MAX_ADDRESS} characters, not {len(address)}")
    host, port = parse_address(address, what)
    if not port:
        raise InputError(f"{what} {address!r} must have the port that others dial, not 0")
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if unspecified:
        raise InputError(f"{what} {address!r} cannot be dialled: give the address that others reach (--advertise)")
    return address
