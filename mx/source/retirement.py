"""Takes sources away from their readers: what was replaced, is wrong, or can't be read any more.

Memory is freed once no reader can trust what it reads of it, or is attached to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from mx.core.leases import MARGIN_S
from mx.core.types import ModelKey
from mx.cuda.errors import GONE_CODES, CudaError
from mx.errors import LocalError, MxError
from mx.log import event
from mx.memory.live import LentMemory, Memory
from mx.runtime import in_thread, uncut
from mx.source.doubts import looked_at
from mx.source.exposures import withdraw
from mx.source.grants import Grants
from mx.source.model import SourceModel
from mx.source.served import ExposedModel
from mx.source.service import PeerServicer
from mx.transport import Exposure

log = logging.getLogger(__name__)

#: How long readers that copy from frozen memory have to let it go.
_LET_GO_S = 1.0


class Retirement:
    """The end of one process's sources; on the loop."""

    def __init__(
        self,
        servicer: PeerServicer,
        grants: Grants,
        unlist: Callable[[SourceModel], Awaitable[None]],
        stall_timeout_s: float,
    ) -> None:
        """
        Args:
            servicer: What serves them.
            grants: The grants of their readers.
            unlist: Deregisters a model, if it is listed.
            stall_timeout_s: How long a reader may stand still.
        """
        self._servicer = servicer
        self._grants = grants
        self._unlist = unlist
        self._stall_timeout_s = stall_timeout_s
        #: Why a source that lends nothing serves no reader any more; "" while it does.
        self.withdrawn = ""
        #: Live memory goes as well: nothing is lent again.
        self.closing = False
        #: Exposures of frozen memory, withdrawn, to which readers are still attached.
        self._attached: list[Exposure] = []

    async def retire(
        self,
        source_id: str,
        grace_s: float,
        hurry: Callable[[], bool] = lambda: False,
        *,
        changed: bool = False,
    ) -> bool:
        """Stop serving a source, and release its memory once no reader can trust it any more.

        No new grants are given. Readers may finish within `grace_s`; the rest are cut off.

        Args:
            source_id: The source.
            grace_s: How long its readers have to finish.
            hurry: Polled; if it returns True, the grace ends at once.
            changed: Nothing replaces it: this process has written to its memory. Readers are told
                at once.

        Returns:
            False if readers were cut off.
        """
        served = self._servicer.models.get(source_id)
        if served is None:
            return True
        self._servicer.supersede(source_id, served.held.generation + 1, grace_s)
        if changed:
            served.changed = True
            self._servicer.cut(source_id)
        event(log, "source.retiring", model=str(served.held.key), source=source_id, grace_s=grace_s)
        await self._unlist(served.held)
        leases = self._grants.leases
        await until(lambda: not leases.of_source(source_id) or hurry(), grace_s)
        finished = not leases.of_source(source_id)
        self._servicer.cut(source_id)
        # No lease is renewed any more, so all have ended by then.
        longest_s = leases.lease_s + MARGIN_S
        await until(lambda: not self._grants.has_unexpired(source_id), longest_s)
        if self._servicer.remove(source_id) is not None:
            await self.free(served)
        return finished

    def written(self, memory: Memory | LentMemory) -> None:
        """Record that this process has written to memory that it serves: who asks for it from now
        on is told so, also before it is retired."""
        for served in self._servicer.models.values():
            served.changed |= served.held.arena is memory

    async def retire_memory(
        self,
        memory: Memory | LentMemory,
        grace_s: float,
        hurry: Callable[[], bool] = lambda: False,
        *,
        changed: bool = False,
    ) -> None:
        """Retire every source of this memory: readers may have it under an earlier id, too."""
        models = self._servicer.models.items()
        ids = [source_id for source_id, served in models if served.held.arena is memory]
        retiring = (self.retire(source_id, grace_s, hurry, changed=changed) for source_id in ids)
        await asyncio.gather(*retiring)

    async def is_right(self, served: ExposedModel, chunk: int) -> bool:
        """Hash a chunk again that a reader found wrong, and withdraw its source if it is wrong in
        this process's memory. Returns True if it is right."""
        held = served.held
        if served.newer or self._servicer.models.get(held.source_id) is not served:
            return False
        try:
            if served.watchman is not None:
                return await served.watchman.doubt(lambda: looked_at(held, chunk))
            found = await uncut(in_thread(looked_at, held, chunk))
        except MxError as error:  # such as a GPU's
            log.warning("%s could not be hashed again: %s", held.key, error)
            if isinstance(error, CudaError) and error.code in GONE_CODES:
                await uncut(self.lost(held, str(error)))
            return False
        wrong = found.moved or (found.wrong and f"{found.wrong}: written to while others read")
        if wrong and not served.newer:
            await uncut(self._give_up(held, wrong))
        return not wrong

    async def lost(self, held: SourceModel, why: str) -> None:
        """Withdraw a source whose memory can't be read any more, as it is on a lost GPU."""
        served = self._servicer.models.get(held.source_id)
        if served is not None and not (served.newer or served.changed or self.closing):
            served.changed = True
            await self._give_up(held, why)

    async def _give_up(self, held: SourceModel, why: str) -> None:
        self.withdrawn = why
        event(
            log,
            "source.withdrawn",
            level=logging.ERROR,
            model=str(held.key),
            source=held.source_id,
            text=f"{self.withdrawn}; no reader gets anything of it here any more",
        )
        await self.retire_memory(held.arena, 0.0, changed=True)

    async def free(self, served: ExposedModel) -> None:
        """Withdraw what is served no more, and release its memory unless that stays."""
        await self.withdraw(served)
        # The same memory may be served under an earlier id, too.
        shared = any(
            each.held.arena is served.held.arena for each in self._servicer.models.values()
        )
        # Live memory stays while its owner changes it.
        stays = served.held.borrowed or (served.held.live and not self.closing)
        if not stays and not shared:
            served.held.release()

    async def withdraw(self, served: ExposedModel) -> None:
        """End the exposures of what is served no more. Its memory stays."""
        served.participant.withdrawn()
        frozen = served.held.frozen
        # Readers that copy let go at once, and who has attached is waited for by `let_go`.
        timeout_s = _LET_GO_S if frozen else 2 * self._stall_timeout_s
        left = await in_thread(withdraw, served.all_exposures(), timeout_s)
        if frozen:
            self._attached += left

    async def let_go(self, key: ModelKey, timeout_s: float) -> None:
        """Wait until no reader is attached to frozen memory that was withdrawn.

        Args:
            key: The model, for the error.
            timeout_s: How long to wait at most, if it is longer than a message may take.

        Raises:
            LocalError: Some still are. Nothing was freed.
        """
        if self._attached:
            # Who has closed just now is heard of a moment later.
            waited_s = max(timeout_s, _LET_GO_S)
            self._attached = await in_thread(withdraw, self._attached, waited_s)
        if self._attached:
            raise _in_use(key)

    def require_let_go(self, key: ModelKey) -> None:
        """Raise as `let_go` does, once the server is closed. Blocks, and needs no loop."""
        self._attached = withdraw(self._attached, _LET_GO_S)
        if self._attached:
            raise _in_use(key)


async def until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `done` returns True; return False if `timeout_s` passed first."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not done():
        if asyncio.get_running_loop().time() >= deadline_s:
            return False
        await asyncio.sleep(0.02)
    return True


def _in_use(key: ModelKey) -> LocalError:
    return LocalError(
        f"{key} is in use: readers are attached to its memory, which must be neither written to "
        "nor freed",
        hint="close what has attached to it, and try again",
    )
