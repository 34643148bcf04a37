"""Caches of transformers' models as KV blocks: what is loaded generates what is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from mx.engines.transformers import KvCaches
from mx.errors import ConfigError
from tests.support import families, forkserver
from tests.support.commands import environment
from tests.support.kv_blocks import key_file, settings, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NAME, PIN = "org/model", "ab" * 32
TOKENS = [(7 * at + 3) % 90 for at in range(70)]  # two blocks, and six tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kv") / "model"
    families.save(families.FAMILIES["llama"], made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    made: Any = AutoModelForCausalLM.from_pretrained(folder)
    return made.eval()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


def generated(model: Any, cache: Any) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that follow the prompt, and the last logits."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([TOKENS]),
            attention_mask=torch.ones(1, len(TOKENS), dtype=torch.long),
            past_key_values=cache,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return found.sequences[0].tolist(), found.logits[-1]


def static(model: Any) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=128)


def opened(model: Any, key: Path, **more: Any) -> KvCaches:
    return KvCaches.open(model, NAME, more.pop("pin", PIN), settings=settings(key), **more)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_loaded_cache_generates_the_same(
    model: Any, key: Path, tmp_path: Path, kind: str
) -> None:
    computed = DynamicCache() if kind == "dynamic" else static(model)
    wanted = generated(model, computed)
    with opened(model, key, files=tmp_path / "kv") as own:
        assert own.load(TOKENS, DynamicCache()) == 0
        # Of the tokens that were generated the last one was not computed.
        assert own.save(wanted[0], computed) == 2
        assert own.save(wanted[0], computed) == 0
        assert own.load(TOKENS, DynamicCache(), salt="another") == 0
        assert own.load([1, *TOKENS], DynamicCache()) == 0
        mine = DynamicCache()
        assert own.load(TOKENS, mine) == 64  # of its own pool
        assert own.load(TOKENS[:64], DynamicCache()) == 32  # the last token is computed
        with pytest.raises(ConfigError, match="not empty"):
            own.load(TOKENS, mine)
    with opened(model, key, pin="cd" * 32, files=tmp_path / "kv") as own:
        assert own.load(TOKENS, DynamicCache()) == 0  # other weights
    with opened(model, key, files=tmp_path / "kv") as own:
        for cache in (DynamicCache(), static(model), mine):
            assert cache is mine or own.load(TOKENS, cache) == 64
            tokens, logits = generated(model, cache)
            assert tokens == wanted[0]
            torch.testing.assert_close(logits, wanted[1])


_OTHER = """
import sys, torch
from transformers import AutoModelForCausalLM, DynamicCache
from mx.engines.transformers import KvCaches
from tests.integration.test_transformers_kv import NAME, PIN, TOKENS, generated
from tests.support.kv_blocks import settings

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
cache = DynamicCache()
tokens, _ = generated(model, cache)
with KvCaches.open(model, NAME, PIN, settings=settings(sys.argv[2])) as own:
    own.save(tokens, cache)
    print(__import__("json").dumps([own.endpoint, tokens]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(commands_are_forked: None, folder: Path, key: Path) -> Iterator[tuple[str, list[int]]]:
    """A process that has computed the prompt: its endpoint, and the tokens."""
    process = forkserver.python(
        _OTHER, str(folder), str(key), env=environment(), imported="torch", errors=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate(timeout=60))
        endpoint, tokens = json.loads(line)
        yield endpoint, tokens
        process.kill()


def test_another_process_loads_it(model: Any, key: Path, other: tuple[str, list[int]]) -> None:
    endpoint, tokens = other
    with opened(model, key, peers=[endpoint]) as own:
        cache = DynamicCache()
        until(lambda: own.load(TOKENS, cache))
        assert cache.get_seq_length() == 64
        assert generated(model, cache)[0] == tokens
        # Now it is here, too.
        assert own.save(tokens, cache) == 0


def test_caches_of_other_kinds_are_refused(model: Any, key: Path, folder: Path) -> None:
    with opened(model, key) as own:
        several = DynamicCache()
        several.update(torch.zeros(2, 1, 32, 4), torch.zeros(2, 1, 32, 4), 0)
        with pytest.raises(ConfigError):
            own.save(TOKENS, several)
    with pytest.raises(ConfigError, match="`pin`"):
        opened(model, key, pin="main")
    with pytest.raises(ConfigError, match="`pool`"):
        opened(model, key, pool="1KiB")
