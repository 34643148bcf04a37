"""The fields of processing keys, compared with the installed vLLM's own key of cached weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mx.core.variant import differences
from tests.vllm.hosts import Host, host
from tests.vllm.seams import missing, uncovered

pytestmark = [pytest.mark.timeout(300), pytest.mark.integration]

#: Its folder: it is read, not imported.
_VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # type: ignore[union-attr,index]


@pytest.fixture(scope="module")
def engine(coordinator: str, place: Path) -> Iterator[Host]:
    with host(coordinator, place / "keys.log") as found:
        yield found


def test_vllm_distinguishes_no_weights_by_what_mx_does_not_know() -> None:
    assert uncovered(_VLLM) == []


def test_what_mx_uses_of_vllm_is_there() -> None:
    assert missing(_VLLM) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"runner": "pooling", "convert": "embed"}, {"convert": "embed", "runner": "pooling"}),
        ({"model_impl": "transformers"}, {"class": "TransformersForCausalLM"}),
        ({"dtype": "float16"}, {"dtype": "fp16"}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"cache": "fp8_e5m2"}),
    ],
)
def test_what_builds_other_modules_is_in_the_key(
    engine: Host, checkpoint: Path, options: dict[str, Any], told: dict[str, str]
) -> None:
    usual, other = (
        engine.do("processing_key", str(checkpoint), **each)
        for each in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", **options})
    )
    assert {each.field: each.second for each in differences(usual, other)} == told


def test_the_layers_of_each_stage_are_in_the_key(engine: Host, checkpoint: Path) -> None:
    usual, other = (
        engine.do("processing_key", str(checkpoint), stages=2, partition=each)
        for each in ("", "1,2")
    )
    (found,) = differences(usual, other)
    assert (found.field, found.first, found.second) == ("stages", "2-1", "1-2")
