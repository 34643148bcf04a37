"""Clients of a coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mx.wire.client import CoordinatorClient


@asynccontextmanager
async def client_of(address: str, **options: Any) -> AsyncIterator[CoordinatorClient]:
    """Yield a client with these options."""
    client = CoordinatorClient(address, **options)
    try:
        yield client
    finally:
        await client.close()
