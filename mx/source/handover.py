"""Serves the weights that an update replaces until their name means the update."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from mx.core.revisions import is_main, update_number
from mx.core.types import ModelKey
from mx.core.variant import membership
from mx.errors import MxError
from mx.log import event
from mx.runtime import uncut
from mx.source.model import SourceModel
from mx.source.server import SourceServer
from mx.tasks import end_tasks

log = logging.getLogger(__name__)

#: Seconds between two questions whether all ranks have registered.
_ASK_AGAIN_S = 0.5


class Handover:
    """The outdated models of one source; on the loop. `close` it before the server.

    A variant that is not a rank of several hands over at once. The ranks of a bundle do so
    together: NAME means their previous revision until all have registered the new one, so that each
    goes on serving it until then.
    """

    def __init__(self, server: SourceServer) -> None:
        self._server = server
        self._kept: list[SourceModel] = []
        self._waiting: asyncio.Task[None] | None = None

    async def hand_over(
        self, old: SourceModel, new: SourceModel, grace_s: float, hurry: Callable[[], bool]
    ) -> None:
        """Retire what `new` replaces: now, or later if other ranks have yet to register.

        Args:
            old: What was served until now.
            new: What is registered in its place.
            grace_s: How long readers of the old weights have to finish.
            hurry: Polled; if it returns True, the grace ends at once.
        """
        await self.close()
        outdated, self._kept = [*self._kept, old], []
        if not membership(new.key.variant).alone and is_main(new.key.revision):
            named = await self._named(new.key)
            if not _reaches(named, new.key):
                # What lies between was never named.
                kept = [held for held in outdated if held.key.revision == named]
                self._kept = kept if named else outdated[:1]
        await self._retire([h for h in outdated if h not in self._kept], grace_s, hurry)
        if self._kept:
            event(log, "source.waits_for_ranks", model=str(new.key), serves=str(self._kept[0].key))
            waiting = self._wait(new.key, grace_s, hurry)
            self._waiting = asyncio.create_task(waiting, name="mx-handover")

    async def close(self) -> None:
        """Wait for no other ranks any more. What is kept stays served."""
        waiting, self._waiting = self._waiting, None
        await end_tasks(waiting)

    async def _wait(self, key: ModelKey, grace_s: float, hurry: Callable[[], bool]) -> None:
        while not _reaches(await self._named(key), key):
            await asyncio.sleep(_ASK_AGAIN_S)
        kept, self._kept = self._kept, []
        await self._retire(kept, grace_s, hurry)

    async def _retire(
        self, outdated: Sequence[SourceModel], grace_s: float, hurry: Callable[[], bool]
    ) -> None:
        for held in [each for old in outdated for each in (old, *old.companions)]:
            await uncut(self._server.retirement.retire(held.source_id, grace_s, hurry))

    async def _named(self, key: ModelKey) -> str:
        """Return the revision that NAME means for the key's bundle; "" if that is not known."""
        try:
            return await self._server.named_revision(key)
        except MxError as error:
            log.debug("not known what %s means: %s", key.name, error)
            return ""


def _reaches(named: str, key: ModelKey) -> bool:
    return bool(named) and update_number(named) >= update_number(key.revision)
