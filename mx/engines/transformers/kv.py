"""Caches of prompts as KV blocks: what one process has computed of a prompt, others load.

caches = KvCaches.open(model, "llama-8b", pin, coordinator="10.0.0.1:7600")
cache = DynamicCache()
caches.load(tokens, cache)  # what others have of the prompt
model.generate(input_ids, past_key_values=cache)
caches.save(tokens, cache)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer, StaticLayer

from mx import config, namekey
from mx.errors import ConfigError
from mx.kv import (
    BlockNames,
    KvFiles,
    KvKey,
    KvMemory,
    KvPool,
    KvReader,
    configuration_digest,
    secret_of,
)
from mx.units import parse_bytes

#: How many tokens a block has.
BLOCK_TOKENS = 32
_KINDS = (DynamicLayer, StaticLayer)


class KvCaches:
    """The KV blocks of one model in this process. Made by `open`; close it.

    Methods may be called from any thread. Caches are of one sequence (a batch of one), with full
    attention in all layers, such as DynamicCache and StaticCache make.
    """

    def __init__(
        self,
        form: KvKey,
        secret: bytes,
        identity: bytes,
        blocks: torch.Tensor,
        pool: KvPool,
        reader: KvReader,
        files: KvFiles | None,
        device: torch.device,
    ) -> None:
        """Use `open`."""
        self._form, self._secret, self._identity = form, secret, identity
        self._blocks, self._pool, self._reader = blocks, pool, reader
        self._files, self._device = files, device

    @classmethod
    def open(
        cls,
        model: Any,
        name: str,
        pin: str,
        *,
        pool: str = "1GiB",
        peers: Collection[str] = (),
        files: str | Path = "",
        files_bytes: str = "8GiB",
        coordinator: str | None = None,
        settings: config.Settings | None = None,
    ) -> KvCaches:
        """Give the KV blocks of a model to others, and take theirs.

        Args:
            model: The model, of transformers.
            name: Its name.
            pin: The identity of its weights, in hexadecimal; what is named is believed.
            pool: What the pool of blocks may have, in memory of the host.
            peers: HOST:PORT of pools, or of sources of their processes.
            files: A folder in which blocks are kept, and from which they are read; "" for none.
            files_bytes: What all files in it may have.
            coordinator: HOST:PORT of the coordinator, whose sources of the model are asked.
            settings: As for `mx.pull`.

        Raises:
            ConfigError: The key is not for KV blocks, or not all layers have full attention.
            LocalError: As `KvPool.open`.
        """
        settings = settings or config.load()
        secret, form = secret_of(namekey.load(settings), name), form_of(model)
        try:
            identity = bytes.fromhex(pin)
        except ValueError:
            raise ConfigError(f"`pin` is not the identity of weights: {pin[:80]!r}") from None
        part = 2 * form.heads * form.block_tokens * form.head_size * model.dtype.itemsize
        slots = parse_bytes(pool) // (form.layers * part)
        if slots < 1:
            raise ConfigError(f"`pool` has no place for a KV block of {form.layers * part} bytes")
        kept = torch.empty(slots, form.layers * part, dtype=torch.uint8)
        shape = slots, form.layers, 2, form.heads, form.block_tokens, form.head_size
        memory = KvMemory.whole(kept, [part] * form.layers, 0, form.heads)
        own = KvPool.open(name, form, memory, settings=settings)
        reader: KvReader | None = None
        try:
            folders = [files] if files else []
            reader = KvReader.open(
                name,
                form,
                memory,
                peers=peers,
                files=folders,
                coordinator=coordinator,
                settings=settings,
            )
            keeps = None
            if files:
                keeps = KvFiles(own, files, parse_bytes(files_bytes), settings=settings)
        except BaseException:
            if reader is not None:
                reader.close()
            own.close()
            raise
        blocks = kept.view(model.dtype).view(shape)
        return cls(form, secret, identity, blocks, own, reader, keeps, model.device)

    @property
    def endpoint(self) -> str:
        """HOST:PORT, for `peers` of others."""
        return self._pool.endpoint

    def save(self, tokens: Sequence[int], cache: Any, salt: str = "") -> int:
        """Give the whole blocks of a cache to others.

        Args:
            tokens: The tokens whose keys and values it has, from the first one; it may have more.
            cache: The cache.
            salt: What only those share who give the same.

        Returns:
            How many blocks are new. The pool may have no place for some.

        Raises:
            ConfigError: The cache is none of those that are understood.
        """
        layers = self._layers_of(cache)
        size = self._form.block_tokens
        whole = min(len(tokens), int(cache.get_seq_length())) // size
        names = self._names(tokens, salt)[:whole]
        new = [at for at, name in enumerate(names) if self._pool.slot_of(name) is None]
        self._pool.used(names[-1:])
        slots = self._pool.take(len(new))
        for at, slot in zip(new, slots, strict=False):
            for layer, each in enumerate(layers):
                here = slice(at * size, (at + 1) * size)
                self._blocks[slot, layer, 0] = each.keys[0, :, here]
                self._blocks[slot, layer, 1] = each.values[0, :, here]
        self._list(names, dict(zip(new, slots, strict=False)))
        return len(slots)

    def load(self, tokens: Sequence[int], cache: Any, salt: str = "") -> int:
        """Fill an empty cache with what there is of a prompt, each part verified.

        Args:
            tokens: The prompt. Its last token is left to be computed.
            cache: The cache.
            salt: As for `save`.

        Returns:
            How many tokens the cache has.

        Raises:
            ConfigError: The cache is not empty.
        """
        if int(cache.get_seq_length()):
            raise ConfigError("the cache is not empty")
        names = self._names(tokens, salt)[: max(0, len(tokens) - 1) // self._form.block_tokens]
        found: list[torch.Tensor] = []
        for block in names:
            here = self._copied(block)
            if here is None:
                break
            found.append(here)
        at = len(found)
        self._pool.used(names[at - 1 : at] if at else ())
        found += self._fetched(names[: at + self._reader.found(names[at:])], at)
        if found:
            # Layers, keys or values, heads, tokens, elements.
            whole = torch.cat(found, dim=3).to(self._device)
            for layer, (keys, values) in enumerate(whole):
                cache.update(keys[None], values[None], layer)
        return len(found) * self._form.block_tokens

    def _names(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        return BlockNames(self._secret, self._identity, self._form, salt).of(tokens)

    def _copied(self, block: bytes) -> torch.Tensor | None:
        """Return a copy of a block of the own pool; None if that does not list it."""
        slot = self._pool.slot_of(block)
        if slot is None:
            return None
        copied = self._blocks[slot].clone()
        # Else it may have been written meanwhile.
        return copied if self._pool.slot_of(block) == slot else None

    def _fetched(self, names: Sequence[bytes], first: int) -> list[torch.Tensor]:
        """Read a prompt's blocks from others, from this one on; return those up to the first that
        did not come."""
        wanted = dict(enumerate(self._pool.take(len(names) - first), first))
        fetch = self._reader.fetch([(names[at], slot) for at, slot in wanted.items()])
        fetch.wait()
        came = {at: slot for at, slot in wanted.items() if names[at] not in fetch.failed}
        self._pool.give_back([slot for at, slot in wanted.items() if at not in came])
        whole = itertools.takewhile(came.__contains__, wanted)
        found = [self._blocks[came[at]].clone() for at in whole]
        self._list(names, came)
        return found

    def _list(self, names: Sequence[bytes], slots: Mapping[int, int]) -> None:
        """List blocks of a prompt, by where they are in it, which are in these slots."""
        self._pool.publish_all(
            [
                (names[at], slot, self._pool.memory.digests(slot), names[at - 1] if at else b"")
                for at, slot in slots.items()
            ]
        )
        if self._files is not None:
            for at in slots:
                self._files.keep(names[at])

    def _layers_of(self, cache: Any) -> list[Any]:
        layers = list(cache.layers)
        if len(layers) != self._form.layers or any(type(each) not in _KINDS for each in layers):
            raise ConfigError("no KV blocks are of such a cache", hint="use a DynamicCache")
        of_one = 1, self._form.heads, self._form.head_size
        for each in layers:
            for held in (each.keys, each.values) if each.is_initialized else ():
                if (*held.shape[:2], held.shape[3]) != of_one:
                    raise ConfigError(
                        "a cache of several sequences, or of other heads, has no KV blocks"
                    )
        return layers

    def close(self) -> None:
        """End: others read these blocks no more. Idempotent."""
        self._reader.close()
        if self._files is not None:
            self._files.close()
        self._pool.close()

    def __enter__(self) -> KvCaches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def form_of(model: Any) -> KvKey:
    """Return the form of a model's KV blocks.

    Args:
        model: The model, of transformers.

    Raises:
        ConfigError: Not all layers have full attention.
    """
    told = model.config.get_text_config()
    kinds = set(getattr(told, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(f"layers with {', '.join(sorted(kinds))} have no KV blocks")
    heads = getattr(told, "num_key_value_heads", None) or told.num_attention_heads
    size = getattr(told, "head_dim", None) or told.hidden_size // told.num_attention_heads
    more = {
        "configuration": configuration_digest(model.config.to_dict()),
        "torch": torch.__version__,
        "attention": str(model.config._attn_implementation),
    }
    return KvKey(
        "transformers",
        transformers.__version__,
        str(model.dtype),
        "layers,2,heads,tokens,elements",
        BLOCK_TOKENS,
        told.num_hidden_layers,
        heads,
        size,
        more,
    )
