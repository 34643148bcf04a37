"""Names of KV blocks: what has to be in a block decides what it is called.

The name of a block is a keyed hash over the weights, the form of the block, who may share it, and
all tokens up to its end. It is keyed with a secret of the name's owner (`mx.kv.proof`), so that who
does not have that can't test a guess of what others have asked. A rank is not in it: ranks hold
heads of the same block.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from blake3 import blake3

from mx.core.canonical import read_json
from mx.errors import ConfigError, MxError, PeerProtocolError

#: The size of a block's name.
ID_BYTES = 32
_DOMAIN = b"mx kv block, version 1"


@dataclass(frozen=True)
class KvKey:
    """The form of an engine's KV blocks: where one field differs, a block is another one.

    Attributes:
        engine: The engine's name.
        version: Its release.
        dtype: Of the elements in the cache, as the engine calls it.
        layout: The order of a block's elements within one layer.
        block_tokens: How many tokens a block has.
        layers: The number of layers, of all pipeline stages.
        heads: The number of KV heads, of all ranks.
        head_size: Elements of one head of one token.
        more: What else changes the bytes, such as the method of a quantisation.
    """

    engine: str
    version: str
    dtype: str
    layout: str
    block_tokens: int
    layers: int
    heads: int
    head_size: int
    more: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.block_tokens, self.layers, self.heads, self.head_size) < 1:
            raise ConfigError("the key of KV blocks has a size that is not positive")

    def encode(self) -> bytes:
        """Return the bytes that are hashed, the same for equal keys."""
        return json.dumps({**vars(self), "more": dict(self.more)}, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> KvKey:
        """Return the key that `encode` has made these bytes of. Raises PeerProtocolError."""
        with contextlib.suppress(TypeError, MxError):
            found = cls(**read_json(data, "KV key"))  # type: ignore[arg-type]
            sizes = found.block_tokens, found.layers, found.heads, found.head_size
            if found.encode() == data and all(type(each) is int for each in sizes):
                return found
        raise PeerProtocolError("a KV pool has a form that is not understood")


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Return a digest of a model's configuration, for `KvKey.more`: the same weights make other
    blocks where the model is configured otherwise.

    Args:
        configuration: As transformers has it; what differs without a difference is left out.
    """
    unlike = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
    same = {name: value for name, value in configuration.items() if name not in unlike}
    return sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()


class BlockNames:
    """Names the blocks of one request's tokens."""

    def __init__(
        self, secret: bytes, identity: bytes, key: KvKey, *shared_with: bytes | str
    ) -> None:
        """
        Args:
            secret: The 32 bytes of `mx.kv.proof.secret_of`.
            identity: Of the weights that compute the blocks, as mx has verified it.
            key: The form of the blocks.
            shared_with: What else has to agree: the request's salt, the identity of an adapter.

        Raises:
            ConfigError: The weights' identity is not known.
        """
        if len(identity) != ID_BYTES:
            raise ConfigError(
                "KV blocks have names only where the identity of the weights is known",
                hint="load the weights by mx, or give the `pin` of what the engine has loaded",
            )
        self._secret, self._block_tokens = secret, key.block_tokens
        parts = (_DOMAIN, identity, key.encode(), *map(_encoded, shared_with))
        self._root = self._hash(*parts)

    def of(
        self,
        tokens: Sequence[int],
        inputs: Mapping[int, bytes] | None = None,
        after: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Return the names of all whole blocks of a request, in order.

        Args:
            tokens: All of its tokens, from the first one.
            inputs: By a block's index, what it holds besides tokens: the digests and places of
                images and sounds.
            after: The names of its first blocks, where they are known: they are not hashed again.
        """
        size, inputs = self._block_tokens, inputs or {}
        names = list(after[: len(tokens) // size])
        whole = np.asarray(tokens[len(names) * size : len(tokens) // size * size], dtype="<i8")
        last = names[-1] if names else self._root
        for at in range(0, len(whole), size):
            last = self._hash(last, whole[at : at + size].tobytes(), inputs.get(len(names), b""))
            names.append(last)
        return names

    def _hash(self, *parts: bytes) -> bytes:
        """Hash parts that can be told apart: each with its length before it."""
        hasher = blake3(key=self._secret)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
        return hasher.digest()


def _encoded(part: bytes | str) -> bytes:
    return b"s" + part.encode() if isinstance(part, str) else b"b" + part
