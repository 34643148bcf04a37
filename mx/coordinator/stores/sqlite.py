"""The state in one file of SQLite, for one coordinator at a time.

Steps end when a commit is on disk. Leases are not kept: after a restart each one gets a full
period, and until it is renewed, further restarts do not extend it. The clock is kept and stands
still while no coordinator runs, so that names which wait for their owners wait as long as ever,
whatever the wall clock does.
"""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mx import users
from mx.coordinator.stores.draft import Draft, Renewal
from mx.coordinator.stores.encoding import VERSION, decode, encode
from mx.coordinator.stores.kept import KeptStore
from mx.core.digest import document_digest
from mx.core.memory_store import MemoryStore
from mx.errors import CapacityError, ConfigError, LocalError, MxError
from mx.threads import Threads

_T = TypeVar("_T")

#: "mxco": which program's file it is.
_APPLICATION = 0x6D78636F
_TABLES = """
CREATE TABLE names (name TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE sources (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, data TEXT NOT NULL);
CREATE TABLE gone (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, data TEXT NOT NULL);
CREATE TABLE documents (digest BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE state (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch TEXT NOT NULL, doubt_until_s REAL NOT NULL,
    latest INTEGER NOT NULL, clock_s REAL NOT NULL);
"""
#: Sources that have not been heard of since a restart, and until when they are waited for.
_WAITING = "CREATE TABLE IF NOT EXISTS waiting (id TEXT PRIMARY KEY, until_s REAL NOT NULL)"
_ANOTHER = "name another file with `state`, or move this one away"
#: How often the clock is kept while nothing else is.
_CLOCK_S = 5.0


class SqliteStore(KeptStore):
    """State in a file."""

    def __init__(self, path: str) -> None:
        """
        Args:
            path: The file, which is made if it is not there.
        """
        super().__init__(self._time)
        self._path = Path(path)
        self._thread = Threads(1, "mx-state")
        self._began_s = time.monotonic()
        self._before_s = 0.0  # what the clock said when this life began
        self._clock_kept_s = -math.inf
        self._waiting: dict[str, float] = {}
        self._waiting_kept = True  # as it is now
        self._db: sqlite3.Connection | None = None

    def _time(self) -> float:
        return self._before_s + time.monotonic() - self._began_s

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Have the thread do some work.

        Raises:
            CapacityError: The disk is full.
            LocalError: SQLite failed otherwise.
        """
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            kind = CapacityError if full else LocalError
            raise kind(
                f"the coordinator cannot write its state to {self._path}: {error}",
                hint="what is listed goes on; make space" if full else "what is listed goes on",
            ) from None

    # -- the beginning and the end -----------------------------------------------------------------

    async def _load(self) -> None:
        try:
            await asyncio.wrap_future(self._thread.submit(self._read_all))
        except BaseException as error:  # noqa: BLE001 - it is raised, in words
            await self._unload()
            raise self._refused(error) from None
        self._count_anew()

    def _refused(self, error: BaseException) -> BaseException:
        """Return why the file cannot be used, in words."""
        name = self._path
        if isinstance(error, OSError):
            return ConfigError(
                f"the state file {name} cannot be used: {error.strerror or error}",
                hint="name one in a folder that is there, and that this user may write to",
            )
        if not isinstance(error, sqlite3.Error):
            if isinstance(error, ConfigError) and str(name) not in error.message:
                return ConfigError(f"the state file {name}: {error.message}", hint=_ANOTHER)
            return error
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return ConfigError(
                f"another process uses the state file {name}",
                hint="one coordinator at a time has it; stop the other one, or share a state over "
                "`state=redis://HOST:PORT/0`",
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR):
            return ConfigError(f"the state file {name} is damaged: {error}", hint=_ANOTHER)
        return LocalError(f"the state file {name} cannot be used: {error}")

    def _read_all(self) -> None:
        # SQLite gives its files beside this one the same mode.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(descriptor)
            own = users.is_own(found.st_uid, descriptor)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"the state file {self._path} is not a file", hint=_ANOTHER)
        if not own or found.st_mode & 0o077:
            raise ConfigError(
                f"the state file {self._path} is open to other users",
                hint=f"chmod 600 {self._path}, and own it",
            )
        db = self._db = sqlite3.connect(
            self._path, timeout=0, isolation_level=None, check_same_thread=False
        )
        # With this lock no other process comes in, and no file of shared memory is made.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION and (tables or application or version):
            raise ConfigError(f"{self._path} is a database of another program", hint=_ANOTHER)
        if version > VERSION:
            raise ConfigError(
                f"the state file {self._path} is of a later version of mx: {version}, not "
                f"{VERSION}",
                hint="use that version, or another file with `state`",
            )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        if not tables:
            for each in _TABLES.split(";"):
                db.execute(each)
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("INSERT INTO state VALUES (1, ?, ?, 0, 0)", (uuid.uuid4().hex, -math.inf))
        db.execute(_WAITING)
        db.execute("COMMIT")
        (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise ConfigError(f"the state file {self._path} is damaged: {said}", hint=_ANOTHER)
        self.epoch, self.doubt_until_s, self._latest, self._before_s = db.execute(
            "SELECT epoch, doubt_until_s, latest, clock_s FROM state"
        ).fetchone()
        self._began_s = time.monotonic()
        for (data,) in db.execute("SELECT data FROM names"):
            MemoryStore.decide(self, decode(data))
        for (data,) in db.execute("SELECT data FROM sources ORDER BY number"):
            listed = decode(data)
            self._sources[listed.record.source_id] = listed
        for source_id, data in db.execute("SELECT id, data FROM gone ORDER BY number"):
            self._gone[source_id] = decode(data)
        waiting = db.execute("SELECT id, until_s FROM waiting").fetchall()
        self._waiting = {each: until_s for each, until_s in waiting if each in self._sources}
        for digest, data in db.execute("SELECT digest, data FROM documents"):
            if document_digest(data) != digest:
                raise ConfigError(
                    f"the state file {self._path} is damaged: a document", hint=_ANOTHER
                )
            self._documents[digest] = data

    async def _unload(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            await asyncio.wrap_future(self._thread.submit(db.close))
        self._thread.shutdown()

    # -- leases ------------------------------------------------------------------------------------

    def resume(self, until_s: float) -> None:
        for listed in self._sources.values():
            self._waiting.setdefault(listed.record.source_id, until_s)
        for source_id, each_s in sorted(self._waiting.items(), key=lambda each: each[1]):
            listed = self._sources[source_id]
            MemoryStore.renew(self, source_id, each_s, listed.readers, listed.gb_per_s, first=True)
        self._waiting_kept = False

    def _renew_kept(self, source_id: str, said: Renewal) -> None:
        super()._renew_kept(source_id, said)
        self._wait_no_longer(source_id)

    def _drop_kept(self, source_id: str) -> None:
        super()._drop_kept(source_id)
        self._wait_no_longer(source_id)

    def _wait_no_longer(self, source_id: str) -> None:
        if self._waiting.pop(source_id, None) is not None:
            self._waiting_kept = False

    # -- commits -----------------------------------------------------------------------------------

    async def _keep(self, draft: Draft) -> bool:
        await self._write(draft)
        self._apply(draft)
        return True

    async def _keep_rest(self) -> None:
        late = self.clock() >= self._clock_kept_s + _CLOCK_S
        waits = bool(self._waiting) or not self._waiting_kept
        if late or waits or self._fresh or self._dropped or self._trouble or self._closed:
            await self._write(Draft(), waits=waits)

    async def _write(self, draft: Draft, *, waits: bool = False) -> None:
        fresh, self._fresh = self._fresh, {}
        dropped, self._dropped = self._dropped, set()
        clock_s = self.clock()
        epoch, doubt_until_s, lowest = draft.epoch or (self.epoch, self.doubt_until_s, 0)
        latest = max(self._latest + len(draft.entries), lowest)
        state = (epoch, doubt_until_s, latest)
        waiting = [*self._waiting.items()] if waits and not self._waiting_kept else None
        self._waiting_kept |= waits
        try:
            await self._in_thread(
                lambda: self._commit_all(draft, fresh, dropped, clock_s, state, waiting)
            )
        except MxError:
            self._waiting_kept &= waiting is None
            # What came meanwhile is newer.
            self._fresh = {
                d: data for d, data in fresh.items() if d in self._documents
            } | self._fresh
            self._dropped |= {digest for digest in dropped if digest not in self._documents}
            raise
        self._clock_kept_s = clock_s

    def _commit_all(
        self,
        draft: Draft,
        fresh: dict[bytes, bytes],
        dropped: set[bytes],
        clock_s: float,
        state: tuple[Any, ...],
        waiting: list[tuple[str, float]] | None,
    ) -> None:
        db = self._db
        assert db is not None
        names, sources = draft.written_names(), draft.written_sources()
        db.execute("BEGIN IMMEDIATE")
        try:
            _delete(db, "names", "name", [name for name, each in names.items() if each is None])
            db.executemany(
                "INSERT INTO names VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET data = excluded.data",
                [(name, encode(each)) for name, each in names.items() if each is not None],
            )
            _delete(db, "sources", "id", [each for each, listed in sources.items() if not listed])
            db.executemany(
                "INSERT INTO sources (id, data) VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET data = excluded.data",
                [(each, encode(listed)) for each, listed in sources.items() if listed],
            )
            if waiting is not None:
                db.execute("DELETE FROM waiting")
                db.executemany("INSERT INTO waiting VALUES (?, ?)", waiting)
            _delete(db, "waiting", "id", list(sources))
            _delete(db, "gone", "id", list(draft.gone))
            db.executemany(
                "INSERT INTO gone (id, data) VALUES (?, ?)",
                [(each, encode(gone)) for each, gone in draft.gone.items() if gone],
            )
            _delete(db, "documents", "digest", list(dropped))
            db.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?)", list(fresh.items()))
            db.execute("UPDATE state SET clock_s = ?", (clock_s,))
            if draft.writes:  # else a commit that is under way knows better
                db.execute("UPDATE state SET epoch = ?, doubt_until_s = ?, latest = ?", state)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _delete(db: sqlite3.Connection, table: str, column: str, keys: list[Any]) -> None:
    db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(key,) for key in keys])
