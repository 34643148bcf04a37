"""Where the state of coordinators is: the verbs that a memory, a file or a server implements.

The store owns the state, and decides nothing: `mx.core.registry` decides, and watchers read the
stream of changes. What each verb promises is in docs/coordinator-state.md too.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mx.core.answers import ListedSource
from mx.core.changes import AnswerChange, Change, ChangeKind, Entry, NameMeaning, Tail
from mx.core.name_state import NameState
from mx.core.progress_board import ProgressBoard

_T = TypeVar("_T")


class CountedKind(enum.Enum):
    """What is counted by the address that it comes from."""

    MODELS = "models"
    SOURCES = "sources"
    KEPT_NAMES = "kept names"


@dataclass(frozen=True, slots=True)
class FormerSource:
    """What is known of a source that is no longer listed, until `until_s`."""

    secret_digest: bytes
    generation: int
    until_s: float


class Store(ABC):
    """The state of one or more coordinators.

    Reading verbs answer at once, and with their own writes. What they return may be changed only by
    who writes it back in the same steps (`decide`, `put_source`). Times are in seconds on `clock`.
    """

    #: Differs after each loss of state: clients that see a new epoch register again. It may change
    #: while the store is in use.
    epoch: str
    #: True if it goes on when its coordinators end. What then comes back may be older, or empty.
    outlives: bool = True
    #: Until when names bind by receipt only, since the state may have lost some; -inf: no doubt.
    doubt_until_s: float = -math.inf

    def __init__(self) -> None:
        self._wakes: list[Callable[[bool], None]] = []
        #: Names of which something was kept that no coordinator had written, until they are bound.
        self.distrusted: set[str] = set()

    def subscribe(self, wake: Callable[[bool], None]) -> None:
        """Call `wake`, on the event loop, whenever the stream may have grown.

        Args:
            wake: Called with True if the stream begins again: what was read of it does not count.
        """
        self._wakes.append(wake)

    def _wake(self, *, begins_again: bool = False) -> None:
        for wake in self._wakes:
            wake(begins_again)

    @abstractmethod
    def clock(self) -> float:
        """Return the time, in seconds, on the clock of all times here. It never goes back, and all
        coordinators that share the state share it."""

    async def open(self) -> None:  # noqa: B027 - a store in memory has nothing to do
        """Begin. Reading verbs answer from here on.

        Raises:
            MxError: The state cannot be obtained; the message says why.
        """

    async def close(self) -> None:  # noqa: B027
        """Write what is left to write, and release everything."""

    def check(self) -> None:  # noqa: B027
        """Raise an error if what the reading verbs know is too old to answer with.

        Raises:
            MxError: It is; the message says why.
        """

    def share_pulls(self, board: ProgressBoard) -> None:  # noqa: B027
        """Tell other coordinators of the state what pulls report to the board, and the board what
        reports to them, from `open` on. A state of one coordinator does nothing."""

    @abstractmethod
    async def catch_up(self) -> None:
        """See everything that any coordinator has written before this call.

        Raises:
            MxError: The state cannot be reached.
        """

    @abstractmethod
    async def begin_epoch(self, expected: str, doubt_until_s: float, latest: int = 0) -> None:
        """Begin a new epoch, with doubt. Does nothing if the epoch is not `expected` any more.

        Args:
            expected: The epoch that is to end.
            doubt_until_s: See `doubt_until_s`.
            latest: The number of an entry that was lost: the next ones have higher numbers.

        Raises:
            MxError: The state cannot be written.
        """

    @abstractmethod
    async def atomically(self, steps: Callable[[], _T]) -> _T:
        """Run `steps`, and return what they return once their writes have taken effect together.

        They take effect also if `steps` raise an MxError: it says what was refused, not that
        something was left half done. If another coordinator has meanwhile written what they read,
        nothing takes effect and they run again. They do nothing but call verbs.
        """

    # -- names ------------------------------------------------------------------------------------

    @abstractmethod
    def name(self, name: str) -> NameState | None:
        """Return the state of a name, or None."""

    @abstractmethod
    def names(self) -> Iterable[NameState]:
        """Return the states of all names."""

    @abstractmethod
    def decide(self, state: NameState) -> None:
        """Let a name be this if it still is what `name` returned: compare and set.

        An empty state ends it. If it has changed meanwhile, `atomically` begins again.
        """

    @abstractmethod
    def due_names(self, now: float) -> Sequence[str]:
        """Return the names whose `due_s` has come. Costs nothing while there are none."""

    # -- sources, and their leases ----------------------------------------------------------------

    @abstractmethod
    def source(self, source_id: str) -> ListedSource | None:
        """Return a listed source, or None."""

    @abstractmethod
    def sources(self) -> Iterable[ListedSource]:
        """Return all listed sources, in order of registration."""

    @abstractmethod
    def put_source(self, listed: ListedSource) -> None:
        """List a source, or replace what is listed of it. The lease of a listed one stays."""

    @abstractmethod
    def renew(
        self, source_id: str, until_s: float, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        """Extend a listed source's lease, and note its readers and its rate.

        Renewals may be kept later than `atomically` returns, many in one batch: what is lost of
        them, heartbeats repeat. `first` says that the source has not sent a heartbeat yet.
        """

    def resume(self, until_s: float) -> None:
        """Extend the leases of the sources that are there as a coordinator begins: none could be
        renewed. One whose source has not been heard of since an earlier beginning is not extended
        again."""
        for listed in list(self.sources()):
            source_id = listed.record.source_id
            self.renew(source_id, until_s, listed.readers, listed.gb_per_s, first=True)

    @abstractmethod
    def due_sources(self, now: float) -> Sequence[str]:
        """Return the sources whose leases have ended: first those without a heartbeat, each kind in
        the order of their renewals. Costs nothing while there are none."""

    @abstractmethod
    def drop(self, source_id: str) -> None:
        """Remove a source from the list."""

    @abstractmethod
    def gone(self, source_id: str) -> FormerSource | None:
        """Return the tombstone of a source that was dropped, or None."""

    @abstractmethod
    def bury(self, source_id: str, gone: FormerSource, most: int) -> None:
        """Remember a source that was dropped; of more than `most` the oldest ones are forgotten."""

    @abstractmethod
    def forget(self, now: float, source_id: str = "") -> None:
        """Forget the dropped sources whose time is over, and `source_id`."""

    # -- counts -----------------------------------------------------------------------------------

    @abstractmethod
    def counted(self, kind: CountedKind, address: str) -> tuple[int, int]:
        """Return how many there are of a kind, in all and from an address."""

    @abstractmethod
    def counted_within(self, kind: CountedKind, most: int) -> int:
        """Return how many of a kind there are, but of each address `most` at most."""

    @abstractmethod
    def count(self, kind: CountedKind, address: str, by: int) -> None:
        """Count some more of a kind from an address, or fewer."""

    # -- documents --------------------------------------------------------------------------------

    @abstractmethod
    def document(self, digest: bytes) -> bytes | None:
        """Return a document, or None."""

    @abstractmethod
    def documents(self) -> Iterable[tuple[bytes, int]]:
        """Return the digest and the size of each document."""

    @abstractmethod
    def put_document(self, digest: bytes, data: bytes) -> None:
        """Keep a document. Putting it twice is putting it once."""

    @abstractmethod
    def drop_document(self, digest: bytes) -> None:
        """Keep a document no longer."""

    # -- the stream -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def latest(self) -> int:
        """The number of the last entry. It grows by one with each; 0 before the first."""

    @abstractmethod
    def append(self, entry: Entry) -> None:
        """Add an entry, with the next number."""

    @abstractmethod
    def read(self, after: int) -> Sequence[Entry] | None:
        """Return the entries after a number, in order; None if they are no longer all kept."""

    def tail(self, after: int | None) -> Tail:
        """Return the entries after a number, or what there is if they are no longer all kept.

        Args:
            after: The number; None for what there is.
        """
        found = None if after is None else self.read(after)
        entries = [*self._snapshot()] if found is None else found
        return Tail(
            self.latest,
            [each for each in entries if isinstance(each, Change)],
            [each for each in entries if isinstance(each, NameMeaning)],
            [each for each in entries if isinstance(each, AnswerChange)],
            begins_again=found is None,
        )

    def _snapshot(self) -> Iterable[Entry]:
        for listed in self.sources():
            yield Change(ChangeKind.UP, listed.record, address=listed.address)
        for state in self.names():
            for binding in state.bindings():
                yield AnswerChange(binding.ref, held=True)
            for bundle, revision in state.meant.items():
                yield NameMeaning(state.name, bundle, revision)
