"""Fetches the pages of a pull from its sources, while the bytes arrive.

A page is checked against the roots in the identity document, so it may come from anyone. A source
whose page is wrong has lied, and is read from no more; nor is one that holds everything and gives
no page in time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing

import grpc.aio

from mx.core.pages import check_page
from mx.core.types import SourceRecord
from mx.errors import DigestError, IncompleteError, MxError, PeerProtocolError
from mx.fetching.transfer import Transfer
from mx.runtime import in_thread
from mx.tasks import end_tasks
from mx.wire.channel import Remote, Role
from mx.wire.pages import fetch_pages

#: Pause after all sources were asked in vain, the first, which doubles each time,
FIRST_S = 0.1
#: up to this.
LONGEST_S = 1.0
MOST_STALLS = 3
#: The next source is asked too when no page has come for so long.
PATIENCE_S = 0.25


class PageFetcher:
    """One pull's; on the loop."""

    def __init__(
        self,
        channel_to: Callable[[str], grpc.aio.Channel],
        transfer: Transfer,
        sources: Callable[[], Sequence[SourceRecord]],
        causes: list[MxError],
        *,
        stall_timeout_s: float,
    ) -> None:
        """
        Args:
            channel_to: Returns the channel to a source at HOST:PORT.
            transfer: Gets the pages, and is told which sources lie.
            sources: Returns the sources that are known now.
            causes: Collects why sources gave no page.
            stall_timeout_s: The connections to a source that holds everything are closed when it
                has given no page for so long; after `MOST_STALLS` times it is given up.
        """
        self._channel_to = channel_to
        self._transfer = transfer
        self._sources = sources
        self._causes = causes
        self._stall_timeout_s = stall_timeout_s
        self._failing_since_s: dict[str, float] = {}
        self._stalls: Counter[str] = Counter()

    async def run(self) -> None:
        """Ask sources until every page is known."""
        pause_s = FIRST_S
        while self._transfer.pages.missing:
            before = len(self._transfer.pages.missing)
            await self._ask_all()
            if len(self._transfer.pages.missing) < before:
                pause_s = FIRST_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)

    async def rest(self, within_s: float, model: str) -> None:
        """Wait so many seconds for the pages that verifying did not need. Raises the last cause why
        one can't be obtained; an error of its own names the model."""
        try:
            async with asyncio.timeout(within_s):
                await self.run()
        except TimeoutError:
            raise (
                self._causes[-1]
                if self._causes
                else IncompleteError(f"no source has all block digests of {model}")
            ) from None

    async def _ask_all(self) -> None:
        """Ask one source after the other, the next one as soon as those before send nothing: any
        number of sources may be silent."""
        pages = self._transfer.pages
        candidates = self._candidates()
        asking: set[asyncio.Task[None]] = set()
        try:
            while pages.missing:
                known = len(pages.missing)
                source = next(candidates, None)
                if source is not None:
                    asking.add(asyncio.create_task(self._ask(source), name="mx-pages"))
                while asking and pages.missing:
                    done, asking = await asyncio.wait(
                        asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        task.result()
                    if len(pages.missing) == known and source is not None:
                        break
                    known = len(pages.missing)
                if source is None and not asking:
                    return
        finally:
            await end_tasks(*asking)

    def _candidates(self) -> Iterator[SourceRecord]:
        """Yield those that are read from first, then those that hold everything."""
        reading = {each.path.source.key for each in self._transfer.connections if not each.lost}
        ordered = sorted(
            self._sources(), key=lambda each: (each.key not in reading, not each.whole)
        )
        ref = self._transfer.manifest.ref
        for source in ordered:
            if source.key not in self._transfer.excluded and source.ref.same_weights(ref):
                yield source

    async def _ask(self, source: SourceRecord) -> None:
        transfer, peer = self._transfer, source.endpoint
        pages, failure = transfer.pages, None
        try:
            stream = fetch_pages(
                self._channel_to(peer),
                Remote(Role.SOURCE, peer),
                transfer.manifest.ref,
                pages.missing,
                pages.nbytes,
                stall_timeout_s=self._stall_timeout_s,
            )
            async with aclosing(stream) as found:
                async for several in found:
                    # Off the loop, which has leases to renew: a page may have a million digests,
                    # and layers that it makes ready are reported to the caller, who may take long.
                    await in_thread(self._put, several)
                    self._failing_since_s.pop(source.key, None)
        except DigestError as error:
            lie = DigestError(
                f"{peer}: {error.message}", peer=peer, hint="the source lies; do not use it"
            )
            self._give_up(source, lie)
            return
        except MxError as error:
            failure = error
        else:
            if not pages.missing or not source.whole:
                return
            failure = PeerProtocolError(f"{peer} does not send the block digests", peer=peer)
        now_s = time.monotonic()
        since_s = self._failing_since_s.setdefault(source.key, now_s)
        if now_s - since_s < self._stall_timeout_s:
            return
        del self._failing_since_s[source.key]
        self._stalls[source.key] += 1
        if self._stalls[source.key] >= MOST_STALLS:
            self._give_up(source, failure)
        else:
            transfer.exclude(source.key, failure)

    def _put(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Use pages up to the first that is wrong, for which this raises DigestError.

        One after the other: while the caller is told of a layer, no other one becomes ready here.
        """
        for layer, page in pages:
            check_page(self._transfer.manifest, layer, page)
            self._transfer.put_page(layer, page)

    def _give_up(self, source: SourceRecord, error: MxError) -> None:
        self._causes.append(error)
        self._transfer.exclude(source.key, error, for_good=True)
