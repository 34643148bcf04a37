"""What a commit writes, as the stream and the script in Redis have it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mx.coordinator.stores.draft import Draft, Renewal
from mx.coordinator.stores.encoding import decode, encode
from mx.core.answers import ListedSource
from mx.core.changes import AnswerChange, Change, ChangeKind
from mx.core.store import CountedKind
from mx.errors import ConfigError
from mx.units import MIB

#: What is sent at a time, also over a slow link.
_PAGE_BYTES = 4 * MIB
#: A kind of values, the key, and the value as text; "" for none.
Write = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Commit:
    """A draft, and what it writes. `listed_s` says since when the sources in it are listed."""

    draft: Draft
    writes: list[Write]
    listed_s: dict[str, float]


def commit_of(draft: Draft, listed_s: Mapping[str, float], now: float) -> Commit:
    """Return the commit of a draft.

    Args:
        draft: The draft.
        listed_s: Since when each source is listed that was listed before.
        now: The time.
    """
    sources = draft.written_sources()
    since = {each: listed_s.get(each, now) for each, listed in sources.items() if listed}
    writes = [
        ("names", name, encode(each) if each else "")
        for name, each in draft.written_names().items()
    ]
    writes += [
        ("sources", each, encode((since[each], listed)) if listed else "")
        for each, listed in sources.items()
    ]
    writes += [("gone", each, encode(gone) if gone else "") for each, gone in draft.gone.items()]
    return Commit(draft, writes, since)


def named(draft: Draft) -> set[bytes]:
    """Return the documents that a draft's entries come to name."""
    found: list[tuple[bytes, int]] = []
    for entry in draft.entries:
        if isinstance(entry, AnswerChange):
            found += entry.ref.documents if entry.held else []
        elif isinstance(entry, Change) and entry.kind in (ChangeKind.UP, ChangeKind.CHANGED):
            found += entry.record.documents
    return {digest for digest, _ in found}


def record_of(commit: Commit, leases: Sequence[tuple[str, int]]) -> str:
    """Return a commit, and the milliseconds of the leases that begin with it, as text."""
    draft = commit.draft
    counts = [[kind.value, address, by] for (kind, address), by in draft.counts.items()]
    entries = encode(tuple(draft.entries))
    return json.dumps([commit.writes, entries, counts, leases, draft.epoch], separators=(",", ":"))


def commit_in(record: bytes, now: float) -> Commit:
    """Return the commit that `record_of` wrote, of another coordinator.

    Raises:
        ConfigError: It is of a later release, or damaged.
    """
    try:
        return _commit_in(record, now)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"a commit is not what mx writes: {type(error).__name__}: {str(error)[:200]}",
            hint="it is damaged, or of a later version",
        ) from None


def _commit_in(record: bytes, now: float) -> Commit:
    writes, entries, counts, leases, epoch = json.loads(record)
    draft = Draft(now=now, entries=[*decode(entries)])
    listed_s = {}
    for kind, key, text in writes:
        value = decode(text) if text else None
        if kind == "names":
            draft.names[key] = value
            draft.decided[key] = None
        elif kind == "sources":
            draft.sources[key] = value and value[1]
            if value:
                listed_s[key] = value[0]
            draft.put[key] = None
        else:
            draft.gone[key] = value
    for each, address, by in counts:
        draft.counts[CountedKind(each), address] = by
    for source_id, ttl_ms in leases:
        draft.renewals[source_id] = Renewal(now + ttl_ms / 1000, 0, 0.0, True)
    if epoch is not None:
        draft.epoch = epoch[0], float(epoch[1]), int(epoch[2])
    return Commit(draft, [(kind, key, text) for kind, key, text in writes], listed_s)


def pages_of(documents: Mapping[bytes, bytes]) -> Iterator[dict[bytes, bytes]]:
    """Yield documents in parts of about `_PAGE_BYTES`."""
    page: dict[bytes, bytes] = {}
    left = _PAGE_BYTES
    for digest, data in documents.items():
        page[digest] = data
        left -= len(data)
        if left <= 0:
            yield page
            page, left = {}, _PAGE_BYTES
    if page:
        yield page


def decode_all(
    names: Mapping[bytes, bytes], sources: Mapping[bytes, bytes], gone: Mapping[bytes, bytes]
) -> tuple[list[Any], list[tuple[float, ListedSource]], dict[str, Any]]:
    """Return all that is kept of names, of sources with since when they are listed, and of those
    that are gone."""
    return (
        [decode(each) for each in names.values()],
        [decode(each) for each in sources.values()],
        {key.decode(): decode(each) for key, each in gone.items()},
    )
