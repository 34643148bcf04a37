"""Maps a source's memory instead of reading it, where a path allows that."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mx.core.connections import Connections, PathEntry
from mx.core.reasons import reason_of
from mx.core.types import Manifest
from mx.errors import ConfigError, DigestError, LocalError, MxError, NotAllowedError
from mx.fetching.connector import Connector
from mx.fetching.delivery import Delivery
from mx.fetching.reads import Connection
from mx.fetching.report import LeftSource
from mx.runtime import in_thread, uncut
from mx.transport import View


@dataclass
class Attacher:
    """Tries the paths that attach, one after the other; on the loop. `causes` gets why some failed,
    `left` those sources whose memory was mapped and is wrong."""

    connector: Connector
    connections: Connections
    manifest: Manifest
    delivery: Delivery
    causes: list[MxError]
    left: list[LeftSource] = field(default_factory=list)

    async def run(
        self,
    ) -> tuple[tuple[Connection, View] | None, tuple[Connection, PathEntry] | None]:
        """Return a connection and the source's mapped memory, or None; and else, if there is one,
        an open connection to memory that can't be mapped but may be copied."""
        for entry in self.connections.attachable():
            connection, view = await self._attach(entry)
            if connection is not None and view is not None:
                lie = await self._check(connection, view)
                if lie is None:
                    return (connection, view), None
                del view
                self.connections.opened(entry)
                self.connections.lost(entry, lie, time.monotonic(), lease_runs=True)
                await self.connector.give_back(connection)
                continue
            if connection is not None:
                return None, (connection, entry)
        return None, None

    async def _attach(self, entry: PathEntry) -> tuple[Connection | None, View | None]:
        """Return a connection if one could be opened, and the source's memory if it could be
        mapped. The causes say why not."""
        self.connections.begin(entry)
        connection: Connection | None = None
        layout = self.manifest.layout
        try:
            connection = await self.connector.open(entry.path, layout)
            first_nbytes = sum(each.arena_offset + each.nbytes for each in layout.layers[:1])
            nbytes = layout.arena_nbytes
            return connection, await self.connector.attach(connection, nbytes, first_nbytes)
        except NotAllowedError as error:
            failure: MxError = error
        except (ConfigError, LocalError) as error:
            if connection is not None or isinstance(error, ConfigError):
                raise  # it would be no better elsewhere
            failure = error
        except MxError as error:
            failure, connection = error, None
        self.causes.append(failure)
        if connection is None:
            self.connections.failed(entry, failure, time.monotonic())
        return connection, None

    async def _check(self, connection: Connection, view: View) -> DigestError | None:
        """With `strong`, hash all of a source's mapped memory before anything of it is delivered.
        Returns the error if it is wrong."""
        try:
            await uncut(in_thread(self.delivery.check_attached, view))
        except DigestError as error:
            peer = connection.peer
            lie = DigestError(f"{peer}: {error.message}", peer=peer, hint=error.hint)
            self.causes.append(lie)
            self.left.append(LeftSource(peer, reason_of(lie)))
            return lie
        return None
