"""A store in SQLite, which keeps nothing but text: what is not written back is not there.

It shows that the verbs of `mx.core.store` are enough for a database: a registry over it does what
it does over memory, and one that begins with the same file goes on where the other one ended.
"""

from __future__ import annotations

import enum
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from mx.core import answers, binding, bound_name, changes, name_state, store, topology, types
from mx.core.answers import Listed
from mx.core.changes import Entry
from mx.core.name_state import NameState
from mx.core.store import Gone, Kind, Store
from mx.errors import MxError

_T = TypeVar("_T")

_MODULES = (answers, binding, bound_name, changes, name_state, store, topology, types)
_CLASSES = {name: each for module in _MODULES for name, each in vars(module).items()}
_COLLECTIONS: dict[str, type] = {"tuple": tuple, "list": list, "set": set}
_TABLES = """
CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, version INTEGER, due_s REAL, data TEXT);
CREATE TABLE IF NOT EXISTS sources (
    id TEXT PRIMARY KEY, data TEXT, until_s REAL, readers INTEGER, gb_per_s REAL, beaten INTEGER,
    renewal INTEGER);
CREATE TABLE IF NOT EXISTS gone (id TEXT PRIMARY KEY, until_s REAL, data TEXT);
CREATE TABLE IF NOT EXISTS counts (kind TEXT, address TEXT, n INTEGER, UNIQUE (kind, address));
CREATE TABLE IF NOT EXISTS documents (digest BLOB PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY AUTOINCREMENT, data TEXT);
CREATE TABLE IF NOT EXISTS life (epoch TEXT);
"""


@contextmanager
def shutting(store: SqliteStore) -> Iterator[SqliteStore]:
    """Close a store's database in the end."""
    try:
        yield store
    finally:
        store.shut()


class Conflict(Exception):
    """A name has changed since it was read."""


def encode(value: Any) -> str:
    return json.dumps(_plain(value))


def decode(text: str) -> Any:
    return _value(json.loads(text))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__name__, value.value]
    if isinstance(value, dict):
        return ["dict", [[_plain(key), _plain(each)] for key, each in value.items()]]
    if is_dataclass(value):
        given = {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.init}
        return ["class", type(value).__name__, given]
    return [type(value).__name__, [_plain(each) for each in value]]


def _value(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, first, *rest = plain
    if kind == "bytes":
        return bytes.fromhex(first)
    if kind == "enum":
        return _CLASSES[first](rest[0])
    if kind == "dict":
        return {_value(key): _value(each) for key, each in first}
    if kind == "class":
        return _CLASSES[first](**{name: _value(each) for name, each in rest[0].items()})
    return _COLLECTIONS[kind](map(_value, first))


class SqliteStore(Store):
    """State in a file, or in a database of its own in memory."""

    def __init__(self, path: str = ":memory:") -> None:
        super().__init__()
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_TABLES)
        if self._one("SELECT epoch FROM life") is None:
            self._db.execute("INSERT INTO life VALUES (?)", (uuid.uuid4().hex,))
        self.epoch = self._one("SELECT epoch FROM life")

    def clock(self) -> float:
        return time.monotonic()

    async def catch_up(self) -> None:
        pass

    async def begin_epoch(self, expected: str, doubt_until_s: float) -> None:
        raise NotImplementedError

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    async def atomically(self, steps: Callable[[], _T]) -> _T:
        while True:
            self._db.execute("BEGIN IMMEDIATE")
            done = "ROLLBACK"
            try:
                found = steps()
                done = "COMMIT"
                return found
            except MxError:
                done = "COMMIT"
                raise
            except Conflict:
                continue
            finally:
                self._db.execute(done)
                self._wake()

    def name(self, name: str) -> NameState | None:
        data = self._one("SELECT data FROM names WHERE name = ?", name)
        return None if data is None else decode(data)

    def names(self) -> list[NameState]:
        return [decode(data) for (data,) in self._rows("SELECT data FROM names ORDER BY rowid")]

    def decide(self, state: NameState) -> None:
        version = self._one("SELECT version FROM names WHERE name = ?", state.name) or 0
        if version != state.version:
            raise Conflict(state.name)
        if state.empty:
            self._db.execute("DELETE FROM names WHERE name = ?", (state.name,))
            return
        row = (state.name, version + 1, state.due_s, encode(replace(state, version=version + 1)))
        self._db.execute(
            "INSERT INTO names VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "version = excluded.version, due_s = excluded.due_s, data = excluded.data",
            row,
        )

    def due_names(self, now: float) -> list[str]:
        return [n for (n,) in self._rows("SELECT name FROM names WHERE due_s <= ?", now)]

    def _listed(self, where: str, *values: Any) -> list[Listed]:
        found = []
        columns = "data, until_s, readers, gb_per_s"
        for data, *lease in self._rows(f"SELECT {columns} FROM sources {where}", *values):
            listed: Listed = decode(data)
            listed.lease_until_s, listed.readers, listed.gb_per_s = lease
            found.append(listed)
        return found

    def source(self, source_id: str) -> Listed | None:
        return next(iter(self._listed("WHERE id = ?", source_id)), None)

    def sources(self) -> list[Listed]:
        return self._listed("ORDER BY rowid")

    def put_source(self, listed: Listed) -> None:
        lease = (listed.lease_until_s, listed.readers, listed.gb_per_s, False, 0)
        self._db.execute(
            "INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET data = excluded.data",
            (listed.record.source_id, encode(listed), *lease),
        )

    def renew(
        self, source_id: str, until_s: float, readers: int, gb_per_s: float, *, first: bool = False
    ) -> None:
        self._db.execute(
            "UPDATE sources SET until_s = ?, readers = ?, gb_per_s = ?, beaten = ?, "
            "renewal = (SELECT max(renewal) + 1 FROM sources) WHERE id = ?",
            (until_s, readers, gb_per_s, not first, source_id),
        )

    def due_sources(self, now: float) -> list[str]:
        query = "SELECT id FROM sources WHERE until_s <= ? ORDER BY beaten, renewal"
        return [source_id for (source_id,) in self._rows(query, now)]

    def drop(self, source_id: str) -> None:
        self._db.execute("DELETE FROM sources WHERE id = ?", (source_id,))

    def gone(self, source_id: str) -> Gone | None:
        data = self._one("SELECT data FROM gone WHERE id = ?", source_id)
        return None if data is None else decode(data)

    def bury(self, source_id: str, gone: Gone, most: int) -> None:
        excess = self._one("SELECT count(*) FROM gone") + 1 - most
        self._db.execute(
            "DELETE FROM gone WHERE id IN (SELECT id FROM gone ORDER BY rowid LIMIT ?)",
            (max(0, excess),),
        )
        self._db.execute(
            "INSERT INTO gone VALUES (?, ?, ?)", (source_id, gone.until_s, encode(gone))
        )

    def forget(self, now: float, source_id: str = "") -> None:
        self._db.execute("DELETE FROM gone WHERE until_s <= ? OR id = ?", (now, source_id))

    def counted(self, kind: Kind, address: str) -> tuple[int, int]:
        rows = dict(self._rows("SELECT address, n FROM counts WHERE kind = ?", kind.value))
        return sum(rows.values()), rows.get(address, 0)

    def count(self, kind: Kind, address: str, by: int) -> None:
        self._db.execute(
            "INSERT INTO counts VALUES (?, ?, ?) "
            "ON CONFLICT (kind, address) DO UPDATE SET n = n + excluded.n",
            (kind.value, address, by),
        )

    def document(self, digest: bytes) -> bytes | None:
        found: bytes | None = self._one("SELECT data FROM documents WHERE digest = ?", digest)
        return found

    def documents(self) -> list[tuple[bytes, int]]:
        return self._rows("SELECT digest, length(data) FROM documents")

    def put_document(self, digest: bytes, data: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (digest, data))

    def drop_document(self, digest: bytes) -> None:
        self._db.execute("DELETE FROM documents WHERE digest = ?", (digest,))

    @property
    def latest(self) -> int:
        return self._one("SELECT max(number) FROM entries") or 0

    def append(self, entry: Entry) -> None:
        self._db.execute("INSERT INTO entries (data) VALUES (?)", (encode(entry),))

    def read(self, after: int) -> Sequence[Entry] | None:
        rows = self._rows("SELECT data FROM entries WHERE number > ? ORDER BY number", after)
        return None if len(rows) < self.latest - after else [decode(data) for (data,) in rows]

    def forget_entries(self) -> None:
        """Keep no entry but the last one."""
        self._db.execute("DELETE FROM entries WHERE number < (SELECT max(number) FROM entries)")

    async def close(self) -> None:
        pass

    def shut(self) -> None:
        self._db.close()
