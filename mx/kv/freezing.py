"""Writes KV blocks to a snapshot: this process's own, or those of the processes that serve a
model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mx import config
from mx.errors import ConfigError
from mx.kv import service
from mx.kv.files import SEGMENT_BYTES, KvFiles
from mx.kv.index import KvEntry
from mx.kv.layout import KvMemory
from mx.kv.names import KvKey
from mx.kv.peer import KvListing
from mx.kv.pool import KvPool
from mx.kv.reader import KvReader

#: How long a pool may take to say what it lists.
_LISTS_S = 10.0


class _Staged(NamedTuple):
    """Blocks of others in memory of this process, as `KvFiles` takes them."""

    name: str
    form: KvKey
    memory: KvMemory
    came: Mapping[bytes, KvEntry]

    def entry_of(self, block: bytes) -> KvEntry | None:
        return self.came.get(block)


def freeze_blocks(
    name: str,
    folder: Path,
    budget_bytes: int,
    *,
    endpoints: Collection[str] | None = None,
    transport: str | None = None,
    settings: config.Settings | None = None,
) -> int:
    """Write KV blocks of a model to a folder, the prompts of use last first, up to so many bytes
    for each rank. Blocks until they are durable.

    Args:
        name: The model's name.
        folder: The folder, which `KvReader.open` takes as one of `files`.
        budget_bytes: The most bytes of blocks of a rank.
        endpoints: HOST:PORT of sources of the processes that have them; None for the pool of this
            process.
        transport: The only transport to use.
        settings: As for `KvPool.open`.

    Returns:
        How many blocks were written.

    Raises:
        ConfigError: There is no pool, or the key is not for these KV blocks.
        MxError: They can't be written.
    """
    settings = settings or config.load()
    if endpoints is not None:
        return _from_others(name, folder, budget_bytes, endpoints, transport, settings)
    pool = service.pools.get(name)
    if pool is None:
        raise ConfigError(
            f"this process has no KV blocks of {name}",
            hint="give the engine a pool of them (vLLM: `MxConnector`, with the role kv_both)",
        )
    count = budget_bytes // sum(each.nbytes for each in pool.memory.rows)
    return _written(pool, pool.newest()[:count], folder, settings)


def _written(
    pool: KvPool | _Staged, blocks: Sequence[bytes], folder: Path, settings: config.Settings
) -> int:
    files = KvFiles(pool, folder, sys.maxsize, settings=settings)
    try:
        for block in blocks:
            files.keep(block)
    finally:
        files.close(None)
    if files.error is not None:
        raise files.error
    return files.written


def _from_others(
    name: str,
    folder: Path,
    budget_bytes: int,
    endpoints: Collection[str],
    transport: str | None,
    settings: config.Settings,
) -> int:
    timeout_s = settings.connect_timeout_s + _LISTS_S
    ranks: dict[tuple[bytes, range, tuple[int, ...]], list[KvListing]] = {}
    with KvReader.open(name, None, None, peers=endpoints, settings=settings) as reader:
        for each in reader.listings(timeout_s):
            ranks.setdefault((each.form, each.heads, each.part_nbytes), []).append(each)
        why = "; ".join(f"{endpoint}: {why}" for endpoint, why in sorted(reader.peers().items()))
    if not ranks:
        raise ConfigError(
            f"no process that serves {name} gives KV blocks ({why or 'there is none'})",
            hint="start its engine with a pool of them (vLLM: `MxConnector`, role kv_both)",
        )
    written = 0
    for (form, heads, part_nbytes), listings in ranks.items():
        count = budget_bytes // sum(part_nbytes)
        rounds = itertools.zip_longest(*(each.blocks for each in listings))
        blocks = [block for each in rounds for block in each if block is not None]
        blocks = list(dict.fromkeys(blocks))[:count]
        slots = min(len(blocks), max(1, SEGMENT_BYTES // sum(part_nbytes)))
        if not slots:
            continue
        kept = np.empty((slots, sum(part_nbytes)), np.uint8)
        memory = KvMemory.whole(kept, part_nbytes, heads.start, len(heads))
        key, peers = KvKey.decode(form), [each.endpoint for each in listings]
        with KvReader.open(
            name, key, memory, peers=peers, transport=transport, settings=settings
        ) as reader:
            reader.listings(timeout_s)
            for at in range(0, len(blocks), slots):
                batch = blocks[at : at + slots]
                fetch = reader.fetch(list(zip(batch, range(slots), strict=False)))
                fetch.wait()
                staged = _Staged(name, key, memory, fetch.came())
                written += _written(staged, batch, folder, settings)
    return written
