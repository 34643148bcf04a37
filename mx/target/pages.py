"""Fetches the pages of a pull from its sources, while the bytes arrive.

A page is checked against the roots in the identity document, so it may come from anyone. A source
whose page is wrong has lied, and is read from no more; nor is one that holds everything and gives
no page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing

from mx.core.pages import check_page
from mx.core.types import SourceRecord
from mx.errors import DigestError, MxError, PeerProtocolError
from mx.runtime import in_thread
from mx.target.transfer import Transfer
from mx.wire.locate import Locator

#: Pause after all sources were asked in vain, the first, which doubles each time,
FIRST_S = 0.1
#: up to this.
LONGEST_S = 1.0
#: A source that holds everything is given up after it was asked so often in vain.
MOST_FAILURES = 3


class PageFetcher:
    """One pull's; on the loop."""

    def __init__(
        self,
        locator: Locator,
        transfer: Transfer,
        sources: Callable[[], Sequence[SourceRecord]],
        causes: list[MxError],
        *,
        stall_timeout_s: float,
    ) -> None:
        """
        Args:
            locator: Asks sources.
            transfer: Gets the pages, and is told which sources lie.
            sources: Returns the sources that are known now.
            causes: Collects why sources gave no page.
            stall_timeout_s: After so long without progress a source is given up for now.
        """
        self._locator = locator
        self._transfer = transfer
        self._sources = sources
        self._causes = causes
        self._stall_timeout_s = stall_timeout_s
        self._failures: dict[str, int] = {}
        self._given_up: dict[str, MxError] = {}

    async def run(self) -> None:
        """Ask sources until every page is known."""
        pause_s = FIRST_S
        while self._transfer.pages.missing:
            before = len(self._transfer.pages.missing)
            for source in self._candidates():
                await self._ask(source)
                if not self._transfer.pages.missing:
                    return
            for source_id, error in self._given_up.items():  # they may have connected since
                self._transfer.exclude(source_id, error)
            if len(self._transfer.pages.missing) < before:
                pause_s = FIRST_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)

    def _candidates(self) -> Iterator[SourceRecord]:
        """Yield those that are read from first, then those that hold everything."""
        reading = {
            each.path.source.source_id for each in self._transfer.connections if not each.lost
        }
        ordered = sorted(
            self._sources(), key=lambda each: (each.source_id not in reading, not each.whole)
        )
        for source in ordered:
            if source.source_id not in self._given_up:
                yield source

    async def _ask(self, source: SourceRecord) -> None:
        transfer, peer = self._transfer, source.endpoint
        pages, failure = transfer.pages, None
        try:
            stream = self._locator.pages(
                source, pages.missing, pages.nbytes, stall_timeout_s=self._stall_timeout_s
            )
            async with aclosing(stream) as found:
                async for layer, page in found:
                    # Off the loop, which has leases to renew: a page may have a million digests.
                    await in_thread(check_page, transfer.manifest, layer, page)
                    transfer.put_page(layer, page)
        except DigestError as error:
            failure = DigestError(
                f"{peer}: {error.message}", peer=peer, hint="the source lies; do not use it"
            )
            self._failures[source.source_id] = MOST_FAILURES
        except MxError as error:
            failure = error
        else:
            if not pages.missing or not source.whole:
                return
            failure = PeerProtocolError(f"{peer} does not give the block digests", peer=peer)
        self._causes.append(failure)
        failures = self._failures.get(source.source_id, 0) + 1
        self._failures[source.source_id] = failures
        if failures >= MOST_FAILURES:
            self._given_up[source.source_id] = failure
            transfer.exclude(source.source_id, failure)
