"""Marks, by which a coordinator notices that the state has lost some of what it has said."""

from __future__ import annotations

import asyncio
import logging
import math

from mx.coordinator.proofs import Proofs
from mx.core.marks import MAX_MARK_BYTES, Losses, Mark
from mx.core.ownership import MAC_BYTES, Receipt
from mx.core.store import Store
from mx.errors import ConfigError
from mx.log import Throttle, event

log = logging.getLogger(__name__)


class Marks:
    """The marks of one coordinator, in its event loop."""

    def __init__(self, store: Store, proofs: Proofs, lease_s: float) -> None:
        """
        Args:
            store: The state.
            proofs: Makes marks, and tells whose one is.
            lease_s: How long the state is in doubt after a loss.
        """
        self._store = store
        self._proofs = proofs
        self._lease_s = lease_s
        self._losses = Losses()
        self._epoch = ""
        self._told, self._at = b"", ("", 0)  # what is told, and of what
        self._doubting = asyncio.Lock()
        self._said = Throttle()

    def current(self) -> bytes:
        """Return what to tell sources; b"" if the state ends with this coordinator."""
        store = self._store
        if not store.outlives:
            return b""
        at = store.epoch, store.latest
        if self._at != at:
            self._told, self._at = self._proofs.mark(Mark(*at)), at
        return self._told

    async def heed(self, told: bytes, address: str = "") -> None:
        """Begin an epoch in doubt if what a source was told shows that the state has lost some.

        Args:
            told: What the source echoes; b"" for nothing.
            address: Where it does that from.

        Raises:
            MxError: The state cannot be reached.
        """
        if not self._store.outlives:
            return
        if self._epoch != self._store.epoch:
            await self._follow()
        if not told or told == self.current():
            return
        try:
            mark = Mark.decode(told[MAC_BYTES:MAX_MARK_BYTES])
        except ConfigError:
            self._foreign(address)
            return
        if mark.epoch == self._store.epoch and mark.sequence <= self._store.latest:
            return
        if len(told) > MAX_MARK_BYTES or not self._proofs.is_genuine(told):
            self._foreign(address)
        elif self._shows_loss(mark):
            await self._doubt(mark)

    async def read_seen(self, told: bytes, name: str) -> Receipt | None:
        """Return what a reader has seen of a name that the state may not know of: in an earlier
        life, or in what this one has lost; that begins an epoch in doubt, as in `heed`.

        Args:
            told: What the reader brings; b"" for nothing.
            name: The name that it asks for.

        Raises:
            MxError: As `heed`.
        """
        found = self._proofs.read_seen(told)
        if found is None or found[0].key.name != name:
            return None
        await self.heed(self._proofs.mark(found[1]))
        seen, _ = self._proofs.read_seen(told) or found  # maybe an epoch has begun
        return None if seen.this_life else seen

    def _shows_loss(self, mark: Mark) -> bool:
        store = self._store
        state = Mark(store.epoch, store.latest)
        return self._losses.shown(store.clock(), mark, state, store.doubt_until_s)

    async def _follow(self) -> None:
        """Note an epoch that has ended. If the next one has not begun in doubt, the state came back
        empty while this coordinator runs."""
        before, self._epoch = self._epoch, self._store.epoch
        self._losses.begun(self._epoch)
        if not before:
            return
        if self._store.doubt_until_s > -math.inf:
            self._losses.note(before)
        else:
            await self._doubt(Mark(before, 0))

    async def _doubt(self, mark: Mark) -> None:
        async with self._doubting:
            await self._store.catch_up()
            if not self._shows_loss(mark):
                return
            lost, store = Mark(self._store.epoch, self._store.latest), self._store
            # With a number that is not lower, its marks show no loss to later coordinators either.
            until_s = store.clock() + self._lease_s
            await store.begin_epoch(lost.epoch, until_s, mark.sequence)
            self._epoch = store.epoch
            self._losses.note(lost.epoch)
            self._losses.note(mark.epoch)
        event(
            log,
            "coordinator.doubt",
            level=logging.WARNING,
            told=f"{mark.epoch[:8]}/{mark.sequence}",
            state=f"{lost.epoch[:8]}/{lost.sequence}",
            seconds=self._lease_s,
            text="the state is older than what a source was told, or empty: names bind by receipt "
            f"only for {self._lease_s:g} s, and other weights are found by their pins",
        )

    def _foreign(self, address: str) -> None:
        held_back = self._said.passes("foreign")
        if held_back is not None:
            event(
                log,
                "coordinator.mark",
                address=address,
                more=held_back,
                text="a mark that is not this coordinator's was ignored: it was forged, or comes "
                "from a coordinator with another `receipt_key`",
            )
