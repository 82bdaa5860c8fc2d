"""Whether the Hugging Face hub answers, asked before its libraries wait for it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 5.0
"""Seconds for one connection."""


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Where the hub can't be reached, let its libraries look into their cache only, in this block.

    They would try for half a minute, and print a line about each attempt. Yields whether the hub
    is there.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        yield False
    elif reachable(constants.ENDPOINT):
        yield True
    else:
        # `datasets` has a copy of the switch, once it is imported.
        switches = [module for module in (constants, sys.modules.get("datasets.config")) if module]
        before = [module.HF_HUB_OFFLINE for module in switches]
        for module in switches:
            module.__dict__["HF_HUB_OFFLINE"] = True
        try:
            yield False
        finally:
            for module, value in zip(switches, before, strict=True):
                module.__dict__["HF_HUB_OFFLINE"] = value


def reachable(url: str) -> bool:
    """Whether something listens there; behind a proxy that is the proxy's to find out."""
    if getproxies():
        return True
    parts = urlsplit(url)
    address = (parts.hostname or url, parts.port or (80 if parts.scheme == "http" else 443))
    try:
        with socket.create_connection(address, _PATIENCE):
            return True
    except OSError:
        return False
