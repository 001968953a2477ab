"""Registries: where hosts say that they are there."""

from __future__ import annotations

from stages.errors import InputError
from stages.registry.base import Registration, Registry
from stages.registry.settings import RegistrySettings

__all__ = ["Registration", "Registry", "RegistrySettings", "open_registry"]


def open_registry(settings: RegistrySettings) -> Registry:
    """The registry that `settings` name; nothing is dialled yet. Raises InputError when its client is not installed."""
    try:
        from stages.registry.etcd import EtcdRegistry
    except ImportError as error:
        raise InputError(
            f"--registry needs etcd3gw, which is not installed here ({error}): pip install 'onesweep[etcd]'"
        ) from None
    return EtcdRegistry(settings)
