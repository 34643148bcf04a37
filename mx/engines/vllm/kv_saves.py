"""Gives the blocks that an engine computes: copies them into a pool, layer by layer, and lists them
once they are hashed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import torch

from mx.config import Settings
from mx.engines.vllm.kv_names import memory_order
from mx.errors import ConfigError, MxError
from mx.kv import KvFiles, KvKey, KvMemory, KvPool
from mx.units import parse_bytes

log = logging.getLogger(__name__)


class _Saving:
    """The blocks that one step computes, each with its number in the engine's cache, what comes
    before it, and its slot in the pool; `layers` are those that are copied."""

    def __init__(self, blocks: Sequence[tuple[bytes, int, bytes]], slots: Sequence[int]) -> None:
        self.names = [name for name, _, _ in blocks]
        self.before = [before for _, _, before in blocks]
        self.slots = slots
        self.there = torch.tensor([number for _, number, _ in blocks])
        self.here = torch.tensor(slots)
        self.layers: set[int] = set()
        #: By block; of its layers, which are hashed in any order.
        self.digests: list[dict[int, bytes]] = [{} for _ in blocks]
        self.dropped = False  # it is not listed


class KvSaver:
    """The pool of one rank, and the files behind it. Of the engine's thread."""

    def __init__(
        self,
        name: str,
        form: KvKey,
        caches: Sequence[torch.Tensor],
        memory: KvMemory,
        pool: str,
        settings: Settings,
    ) -> None:
        """
        Args:
            name: The model's name.
            form: The form of the blocks.
            caches: The engine's cache: blocks, heads, tokens, elements of each layer.
            memory: The same, for what its heads are.
            pool: The pool's size, such as "4GiB".
            settings: Those of mx.

        Raises:
            ConfigError: There is no room for a block, or the key is not for KV blocks.
        """
        part, layers = memory.rows[0].nbytes, len(caches)
        slots = int(parse_bytes(pool)) // (part * layers)
        if slots < 1:
            raise ConfigError(f"`pool` has no place for a KV block of {part * layers} bytes")
        kept = torch.empty(slots, layers, part, dtype=torch.uint8)
        self._caches = caches
        self._kept = [_in_order(kept[:, at], cache) for at, cache in enumerate(caches)]
        own = KvMemory.whole(kept, [part] * layers, memory.first_head, memory.heads)
        self.pool = KvPool.open(name, form, own, settings=settings)
        self._files: KvFiles | None = None
        self._saving: _Saving | None = None
        #: What is copied: one layer, or all of them (None): then the blocks are listed.
        self._copied: SimpleQueue[tuple[_Saving, int | None] | None] = SimpleQueue()
        self._hasher = threading.Thread(target=self._hash, name="mx-kv-digests", daemon=True)
        self._hasher.start()

    def write_files(self, folder: str | Path, size: str, settings: Settings) -> None:
        """Keep blocks in files, too. Raises MxError."""
        self._files = KvFiles(self.pool, folder, parse_bytes(size), settings=settings)

    def begin(self, stores: Sequence[tuple[bytes, int, bytes]], counts: Counter[str]) -> None:
        """Begin to save blocks that this step computes, if there is room for them.

        Args:
            stores: Their names, their numbers in the engine's cache, and the name of what comes
                before each in its prompt.
            counts: What is stored, and what is not.
        """
        self.drop()
        names, before = {name for name, *_ in stores}, {before for *_, before in stores}
        self.pool.used(names ^ before)  # where prompts begin and end in this step
        new = [each for each in stores if self.pool.slot_of(each[0]) is None]
        slots = self.pool.take(len(new))
        counts["stored"] += len(slots)
        counts["not stored"] += len(new) - len(slots)
        if slots:
            self._saving = _Saving(new[: len(slots)], slots)

    def copy(self, layer: int) -> None:
        """Copy a layer of the blocks, which is computed."""
        saving = self._saving
        if saving is not None and layer not in saving.layers:
            saving.layers.add(layer)
            self._kept[layer][saving.here] = self._caches[layer][saving.there]
            self._copied.put((saving, layer))

    def end(self) -> None:
        """Copy all layers that are not copied, and list the blocks soon."""
        if self._saving is not None:
            for layer in range(len(self._caches)):
                self.copy(layer)
            self._copied.put((self._saving, None))
            self._saving = None

    def drop(self) -> None:
        """List nothing of the blocks that were begun."""
        if self._saving is not None:
            self._saving.dropped = True
            self._copied.put((self._saving, None))
            self._saving = None

    def _hash(self) -> None:
        """On a thread of its own: what engines compute next does not wait for it."""
        while (item := self._copied.get()) is not None:
            saving, layer = item
            if saving.dropped:
                if layer is None:
                    self.pool.give_back(saving.slots)
            elif layer is not None:
                for slot, digests in zip(saving.slots, saving.digests, strict=True):
                    digests[layer] = self.pool.memory.digest(slot, layer)
            else:
                self._list(saving)

    def _list(self, saving: _Saving) -> None:
        layers = range(len(self._caches))
        whole = [b"".join(digests[layer] for layer in layers) for digests in saving.digests]
        blocks = zip(saving.names, saving.slots, whole, saving.before, strict=True)
        try:
            self.pool.publish_all(list(blocks))
        except MxError as error:
            log.debug("KV blocks are not listed: %s", error)
            return
        if self._files is not None:
            for block in saving.names:
                self._files.keep(block)

    def close(self) -> None:
        """Close the pool, once all that was saved is in files. Idempotent."""
        if self._hasher.is_alive():
            self._copied.put(None)
            self._hasher.join()
        if self._files is not None:
            self._files.close()
        self.pool.close()


def _in_order(kept: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return the slots of a pool for one layer as tensors of the cache's shape, each element where
    it is in the order of the cache's memory."""
    order = memory_order(cache)
    shape = [cache.shape[at] for at in order]
    typed = kept.view(cache.dtype).view(kept.shape[0], *shape)
    back = [order.index(at) + 1 for at in range(1, 4)]
    return typed.permute(0, *back)
