"""Real vLLM engines on a CPU: one takes the KV blocks that another one has computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import Host, host, lending, start

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]

_BLOCK = 32
#: Six blocks, and four tokens.
_PROMPT = [(7 * at + 3) % 250 for at in range(6 * _BLOCK + 4)]


def options(role: str = "kv_both", **more: Any) -> dict[str, Any]:
    """Return an engine's options."""
    return {
        "block_size": _BLOCK,
        "max_model_len": 256,
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": "MxConnector",
            "kv_connector_module_path": "mx.engines.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": "16MiB", **more},
        },
    }


def found(where: Host, count: int, *prompt: int) -> dict[str, Any]:
    """Have an engine complete prompts of its own until it has heard of all blocks of others, then
    return how it completes this one."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        made: dict[str, Any] = where.do("complete", list(prompt or _PROMPT))
        if made["cached"] >= count:
            return made
        assert where.do("forget")
        time.sleep(0.2)
    raise AssertionError(f"{made} {where.do('kv')}")


@pytest.fixture(scope="module")
def reference(coordinator: str, place: Path, checkpoint: Path) -> dict[str, Any]:
    """What an engine without a connector makes of the prompt."""
    with host(coordinator, place / "reference.log") as engine:
        engine.do(
            "start", str(checkpoint), load_format="auto", block_size=_BLOCK, max_model_len=256
        )
        made: dict[str, Any] = engine.do("complete", _PROMPT)
        return made


@pytest.fixture(scope="module")
def maker(
    coordinator: str, place: Path, checkpoint: Path, reference: dict[str, Any]
) -> Iterator[Host]:
    """An engine that has computed the prompt's blocks."""
    with host(coordinator, place / "maker.log") as engine:
        start(engine, checkpoint, "m", **options())
        lending(engine)
        made = engine.do("complete", _PROMPT)
        assert (made["tokens"], made["logprobs"]) == (reference["tokens"], reference["logprobs"])
        assert engine.do("kv")["listed"] == 8  # two of what the start has generated
        yield engine


def test_another_replica_takes_them(
    coordinator: str, place: Path, checkpoint: Path, maker: Host, reference: dict[str, Any]
) -> None:
    with host(coordinator, place / "taker.log") as engine:
        start(engine, bare(checkpoint), "m", **options())
        made = found(engine, 6 * _BLOCK)
        assert (made["tokens"], made["logprobs"]) == (reference["tokens"], reference["logprobs"])
        counts = engine.do("kv")
        assert counts["loaded"] == 6 and not counts.get("failed"), counts
        # What is of another tenant, or begins otherwise, is another block.
        assert engine.do("complete", _PROMPT, salt="another")["cached"] == 0
        assert engine.do("complete", [9, *_PROMPT])["cached"] == 0
        assert engine.do("kv")["loaded"] == 6
        assert engine.status()["kv"]["loaded"] == 6
        # A prompt that begins so takes what there is of it.
        longer = [*_PROMPT[: 3 * _BLOCK], *reversed(_PROMPT[:50])]
        assert engine.do("forget")
        assert engine.do("complete", longer)["cached"] == 3 * _BLOCK
        assert engine.do("kv")["loaded"] == 9


def test_one_prefills_and_another_decodes(
    coordinator: str, place: Path, checkpoint: Path, maker: Host, reference: dict[str, Any]
) -> None:
    prompt = [(5 * at + 1) % 250 for at in range(4 * _BLOCK + 7)]
    with host(coordinator, place / "decode.log") as engine:
        start(engine, bare(checkpoint), "m", **options("kv_consumer", wait_s=30.0))
        found(engine, 6 * _BLOCK)
        before = engine.do("kv")["loaded"]
        first = maker.do("complete", prompt, 1, do_remote_decode=True)
        assert first["transfer"]["do_remote_prefill"]
        # At once: it waits for what is on its way. (Of such a request vLLM says how much the other
        # one had cached.)
        made = engine.do("complete", prompt, **first["transfer"])
        assert made["tokens"][0] == first["tokens"][0]
        counts = engine.do("kv")
        assert counts["loaded"] == before + 4 and "listed" not in counts


def test_other_weights_under_the_name_share_nothing(
    coordinator: str, place: Path, maker: Host
) -> None:
    other = write_checkpoint(place / "other", seed=2)
    with mx.serve(other, model="other", coordinator=coordinator) as source:
        identity = source.identity_hex
    with host(coordinator, place / "other.log") as engine:
        more = options(model="m", pin=identity)
        engine.do("start", str(other), load_format="auto", **more)
        for _ in range(5):
            assert engine.do("complete", _PROMPT)["cached"] == 0
            assert engine.do("forget")
            time.sleep(0.3)
        counts = engine.do("kv")
        assert "shm" in counts["peers"].values() and not counts.get("loaded"), counts


def test_without_an_identity_it_is_off(coordinator: str, place: Path, checkpoint: Path) -> None:
    with host(coordinator, place / "unknown.log") as engine:
        engine.do("start", str(checkpoint), load_format="auto", **options(model="m"))
        engine.do("complete", _PROMPT)
        assert engine.do("kv")["listed"] == 0
        assert "the identity of the weights is not known" in engine.said()


def test_a_flipped_bit_is_computed_again(
    coordinator: str, place: Path, checkpoint: Path, reference: dict[str, Any]
) -> None:
    with (
        host(coordinator, place / "spoilt.log") as one,
        host(coordinator, place / "judge.log") as two,
    ):
        start(one, checkpoint, "spoilt", **options())
        lending(one)
        one.do("complete", _PROMPT)
        start(two, bare(checkpoint), "spoilt", **options("kv_consumer"))
        found(two, 6 * _BLOCK)
        one.do("spoil")
        assert two.do("forget")
        made = two.do("complete", _PROMPT)
        assert (made["tokens"], made["logprobs"]) == (reference["tokens"], reference["logprobs"])
        counts = two.do("kv")
        assert counts["failed"] == 6 and counts["loaded"] == 6, counts
        until_s = time.monotonic() + 30
        while one.do("kv")["wrong"] < 6:
            assert time.monotonic() < until_s
        # Who gave them is not asked any more.
        assert two.do("forget") and two.do("complete", _PROMPT)["cached"] == 0
        assert "kv.distrusted" in two.said()


def test_ranks_take_what_ranks_have(coordinator: str, place: Path, checkpoint: Path) -> None:
    two_ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    with mx.serve(checkpoint, model="plain", coordinator=coordinator) as source:
        pin = source.identity_hex
    with (
        host(coordinator, place / "ranks.log") as one,
        host(coordinator, place / "others.log") as two,
    ):
        start(one, checkpoint, "ranks", **two_ranks, **options(pin=pin))
        made = one.do("complete", _PROMPT)
        start(two, checkpoint, "ranks", **two_ranks, **options("kv_consumer", pin=pin))
        assert found(two, 6 * _BLOCK)["tokens"] == made["tokens"]
        status = two.do("call", "mx_peer_status")
        assert [each["kv"]["loaded"] for each in status] == [6, 6]
        # One rank has the heads of both.
        start(two, checkpoint, "ranks", extra={"lend": False}, **options("kv_consumer", pin=pin))
        assert found(two, 6 * _BLOCK)["tokens"] == made["tokens"]
        assert two.do("kv")["loaded"] == 6
