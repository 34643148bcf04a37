"""Lends tensors to this host's cache, under a name of the host's own, and asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mx import config, runtime
from mx.api.common import transports
from mx.api.holding import lend
from mx.api.pulling import pull
from mx.api.serving import offer as serve_here
from mx.api.serving import source_options, start_source
from mx.api.target import Pull
from mx.core.layout_rules import oldest
from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey
from mx.errors import MxError
from mx.wire.cache import CacheClient, CachedModelAddress, WantedModel
from mx.wire.private import socket_in_use

#: Those that carry lent memory within a host.
_TRANSPORTS = ("shm", "tcp")


def offer(
    tensors: Mapping[str, Any], made_from: ModelKey, key: ProcessingKey, settings: config.Settings
) -> CachedModelAddress | None:
    """Lend tensors to this host's cache until it has copied them, for other processes to attach to.

    No coordinator knows them: they are of this host and user alone. The tensors must not change
    meanwhile.

    Args:
        tensors: The tensors by name.
        made_from: The model that they were made from.
        key: What was done to it.
        settings: The settings of the process.

    Returns:
        Where the cache holds them; None if there is no cache, or if it does not hold them.

    Raises:
        MxError: Tensors can't be lent, or the cache does not answer.
    """
    socket = socket_in_use(settings.cache_socket)
    if not socket:
        return None
    model = ModelKey(made_from.name, made_from.revision, str(key))
    loop = runtime.acquire()
    try:
        # No coordinator names a layout: the release before plans this one, too.
        held = lend(tensors, model, layout_version=oldest())
        try:
            # On loopback, whatever the settings say: the cache is on this host.
            local = config.given(settings, listen="127.0.0.1:0", advertise="", data_ports="")
            here = {name: each for name, each in transports().items() if name in _TRANSPORTS}
            server = loop.run(start_source(source_options(local, live=True), here))
            try:
                loop.run(serve_here(server, held, None))
                # By its pin: no other process can answer there in this one's place.
                wanted = WantedModel(
                    f"{model.name}@{held.manifest.ref.pin.hex()}",
                    model.revision,
                    model.variant,
                    offered_at=server.endpoint,
                )
                return loop.run(_ask(socket, wanted, settings.connect_timeout_s))
            finally:
                loop.run(server.close())
        finally:
            held.release()
    finally:
        runtime.release(loop)


def ask_offered(
    made_from: ModelKey, key: ProcessingKey, settings: config.Settings
) -> CachedModelAddress | None:
    """Return where this host's cache holds what a process lent to it; None if it does not.

    Args:
        made_from: The model that it was made from.
        key: What was done to it.
        settings: The settings of the process.
    """
    try:
        socket = socket_in_use(settings.cache_socket)
        if not socket:
            return None
        loop = runtime.acquire()
        try:
            wanted = WantedModel(made_from.name, made_from.revision, str(key), only_if_held=True)
            return loop.run(_ask(socket, wanted, settings.connect_timeout_s))
        finally:
            runtime.release(loop)
    except MxError:  # the load goes on without
        return None


def pull_offered(held: CachedModelAddress, settings: config.Settings) -> Pull:
    """Begin to pull, from this host's cache, what a process lent to it; by its pin, so that no
    other process can answer in the cache's place.

    Args:
        held: Where the cache holds it.
        settings: The settings of the process.
    """
    return pull(
        f"{held.model.name}@{held.ref.pin.hex()}",
        revision=held.model.revision,
        variant=held.model.variant,
        peer=held.endpoint,
        settings=settings,
    )


async def _ask(socket: str, wanted: WantedModel, timeout_s: float) -> CachedModelAddress | None:
    async with CacheClient(socket, timeout_s=timeout_s) as client:
        answer = await client.hold(wanted)
    return None if isinstance(answer, str) else answer
