"""Names of the KV blocks of vLLM's requests, and which of them are known to be whole."""

from __future__ import annotations

import json
from typing import Any

from mx.kv import BlockNames, KvKey, configuration_digest


def form_of(vllm_config: Any, tensor: Any, layers: int, version: str) -> KvKey:
    """Return the form of an engine's blocks.

    Args:
        vllm_config: The engine's configuration.
        tensor: One layer's cache: blocks, heads, tokens, elements.
        layers: How many layers of this form there are.
        version: vLLM's.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    _, heads, tokens, size = tensor.shape
    total = total_heads(vllm_config, heads)
    more = {
        "model dtype": str(model.dtype),
        "cache dtype": str(cache.cache_dtype),
        "configuration": configuration_digest(model.hf_config.to_dict()),
    }
    order_text = ",".join(
        ["blocks", "heads", "tokens", "elements"][at] for at in memory_order(tensor)
    )
    dtype = str(tensor.dtype)
    return KvKey("vllm", version, dtype, order_text, tokens, layers, total, size, more)


def memory_order(tensor: Any) -> list[int]:
    """Return the dimensions of a block, as they lie in memory from the outermost one."""
    strides: tuple[int, ...] = tensor.stride()
    return sorted(range(1, len(strides)), key=lambda at: (-strides[at], at))


def total_heads(vllm_config: Any, heads: int) -> int:
    """Return how many KV heads the model has, of which a rank has `heads`."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    return heads if heads == 1 and vllm_config.model_config.use_mla else max(total, heads)


class NamedRequest:
    """A request whose blocks are named as its tokens come.

    Attributes:
        identity: Of the weights that have computed its blocks, b"" once these have changed.
        saved: How many of its blocks were given to the pool, or came from one.
        found: Of the last search, the first block that the engine did not have, and the names of
            those from there on.
        took: Whether blocks of it were taken from elsewhere, or were to be.
    """

    def __init__(self, request: Any, identity: bytes) -> None:
        """
        Args:
            request: vLLM's.
            identity: Of the weights now.
        """
        self.request, self.identity = request, identity
        self.saved = 0
        self.found: tuple[int, list[bytes]] = 0, []
        self.took = False
        self._names: list[bytes] = []
        self._namer: BlockNames | None = None

    @property
    def why_not(self) -> str:
        """Why its blocks have no names; "" if they have."""
        if self.request.lora_request is not None:
            return "what an adapter is made of is not known"
        if self.request.prompt_embeds is not None:
            return "it has embeddings in place of tokens"
        return ""

    def names(self, secret: bytes, form: KvKey) -> list[bytes]:
        """Return the names of all of its whole blocks.

        Args:
            secret: Of `mx.kv.proof.secret_of`.
            form: The form of the blocks.
        """
        request = self.request
        if self._namer is None:
            salt = request.cache_salt or ""
            self._namer = BlockNames(secret, self.identity, form, salt)
        tokens, size = request.all_token_ids, form.block_tokens
        if len(self._names) < len(tokens) // size:
            self._names = self._namer.of(list(tokens), self._inputs(size), self._names)
        return self._names

    def _inputs(self, size: int) -> dict[int, bytes]:
        """Return what is in blocks besides tokens: images and sounds, and where they are."""
        found: dict[int, list[Any]] = {}
        for feature in self.request.mm_features:
            begin, length = feature.mm_position.offset, feature.mm_position.length
            for at in range(begin // size, (begin + length - 1) // size + 1):
                found.setdefault(at, []).append([feature.identifier, begin - at * size, length])
        return {at: json.dumps(each).encode() for at, each in found.items()}

    def computed(self, scheduled: int) -> int:
        """Return how many tokens of it have been computed after this step, and will not be computed
        otherwise: guesses of a draft model may be.

        Args:
            scheduled: How many this step computes.
        """
        request = self.request
        before: int = request.num_computed_tokens
        sure = before - request.num_in_flight_tokens
        prompt = min(before + scheduled, request.num_prompt_tokens)
        known: int = len(request.all_token_ids)
        return int(min(max(sure, prompt), known))


def whole_prefix(tokens: int, size: int) -> int:
    """Return how many blocks of so many tokens may come from elsewhere: the last token of a request
    is always computed."""
    return max(0, tokens - 1) // size
