"""Real vLLM engines on a CPU: one takes the KV blocks that another one has computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import Host, host, lending, start, wait_for

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
def maker(coordinator: str, place: Path, checkpoint: Path) -> Iterator[Host]:
    """An engine that has the checkpoint's weights, and gives what it computes."""
    with host(coordinator, place / "maker.log") as engine:
        start(engine, checkpoint, "m", **options())
        lending(engine)
        yield engine


@pytest.fixture(scope="module")
def made(maker: Host) -> dict[str, Any]:
    """What the maker has computed of the prompt."""
    found: dict[str, Any] = maker.do("complete", _PROMPT)
    assert found["cached"] == 0
    assert maker.do("kv")["listed"] == 8  # two of what the start has generated
    return found


@pytest.fixture(scope="module")
def taker(coordinator: str, place: Path, checkpoint: Path, made: dict[str, Any]) -> Iterator[Host]:
    """An engine that takes blocks, and gives none."""
    with host(coordinator, place / "taker.log") as engine:
        start(engine, bare(checkpoint), "m", **options("kv_consumer", wait_s=30.0))
        yield engine


def loaded(where: Host) -> int:
    """Return how many blocks an engine has taken until now; none may have failed."""
    counts = where.do("kv")
    assert not counts.get("failed"), counts
    return int(counts.get("loaded", 0))


def test_another_replica_takes_them(taker: Host, made: dict[str, Any]) -> None:
    took = found(taker, 6 * _BLOCK)
    assert (took["tokens"], took["logprobs"]) == (made["tokens"], made["logprobs"])
    assert loaded(taker) == taker.status()["kv"]["loaded"] == 6
    # What is of another tenant, or begins otherwise, is another block.
    assert taker.do("complete", _PROMPT, salt="another")["cached"] == 0
    assert taker.do("complete", [9, *_PROMPT])["cached"] == 0
    assert loaded(taker) == 6
    # A prompt that begins so takes what there is of it.
    longer = [*_PROMPT[: 3 * _BLOCK], *reversed(_PROMPT[:50])]
    assert taker.do("forget")
    assert taker.do("complete", longer)["cached"] == 3 * _BLOCK
    assert loaded(taker) == 9


def test_one_prefills_and_another_decodes(maker: Host, taker: Host) -> None:
    prompt = [(5 * at + 1) % 250 for at in range(4 * _BLOCK + 7)]
    found(taker, 6 * _BLOCK)
    before = loaded(taker)
    first = maker.do("complete", prompt, 1, do_remote_decode=True)
    assert first["transfer"]["do_remote_prefill"]
    # At once: it waits for what is on its way. (Of such a request vLLM says how much the other one
    # had cached.)
    made = taker.do("complete", prompt, **first["transfer"])
    assert made["tokens"][0] == first["tokens"][0]
    assert loaded(taker) == before + 4 and "listed" not in taker.do("kv")


def forgets(where: Host) -> None:
    """Have an engine forget what is cached. Of a request that was aborted while its blocks came it
    frees them in a step after they have come."""
    until_s = time.monotonic() + 60
    while not where.do("forget"):
        assert time.monotonic() < until_s
        where.do("complete", [1, 2, 3], 1)


def test_requests_are_aborted(maker: Host, taker: Host, made: dict[str, Any]) -> None:
    found(taker, 6 * _BLOCK)
    for steps in (0, 1, 2, 3):
        forgets(taker)
        taker.do("abort", _PROMPT, steps)
        # One that waits for blocks of a prompt that is prefilled elsewhere, and never comes.
        taker.do("abort", [*range(200, 240), *_PROMPT], steps, do_remote_prefill=True)
        maker.do("abort", [*range(100, 200), *_PROMPT[:90]], steps, do_remote_decode=True)
    forgets(taker)
    took = found(taker, 6 * _BLOCK)
    assert (took["tokens"], took["logprobs"]) == (made["tokens"], made["logprobs"])
    assert not taker.do("kv").get("failed")
    counts = maker.do("kv")
    assert counts["listed"] + counts["free"] + counts["leaving"] == counts["slots"]


def test_requests_are_preempted(
    coordinator: str, place: Path, checkpoint: Path, maker: Host, made: dict[str, Any]
) -> None:
    """The cache has room for one of them, and a part of another."""
    prompts = [[*_PROMPT[: (6 - at) * _BLOCK], *range(at * 9, at * 9 + 20)] for at in range(4)]
    wanted = [maker.do("complete", each, 24)["tokens"] for each in prompts]
    with host(coordinator, place / "preempted.log") as engine:
        cache = options("kv_consumer") | {"kv_cache_memory_bytes": 12 * 3 * 2 * 2 * 32 * 32 * 2}
        start(engine, bare(checkpoint), "m", **cache)
        found(engine, 6 * _BLOCK)
        assert engine.do("forget")
        together = engine.do("complete_all", prompts, 24)
        assert together["preempted"]
        assert engine.do("kv")["loaded"] > 6
        # What is in its cache since is right.
        assert [engine.do("complete", each, 24)["tokens"] for each in prompts] == wanted
        assert engine.do("forget")
        assert [engine.do("complete", each, 24)["tokens"] for each in prompts] == wanted


def test_a_flipped_bit_is_computed_again(maker: Host, taker: Host, made: dict[str, Any]) -> None:
    assert taker.do("forget")
    found(taker, 6 * _BLOCK)
    before = loaded(taker)
    maker.do("spoil")
    assert taker.do("forget")
    took = taker.do("complete", _PROMPT)
    assert (took["tokens"], took["logprobs"]) == (made["tokens"], made["logprobs"])
    counts = taker.do("kv")
    assert counts["failed"] == 6 and counts["loaded"] == before, counts
    until_s = time.monotonic() + 30
    while maker.do("kv")["wrong"] < 6 or "kv.distrusted" not in taker.said():
        assert time.monotonic() < until_s, maker.do("kv")
        time.sleep(0.1)
    # Who gave them is not asked any more.
    assert taker.do("forget") and taker.do("complete", _PROMPT)["cached"] == 0
    assert taker.do("kv")["failed"] == 6


def test_other_weights_under_the_name_share_nothing(
    coordinator: str, place: Path, maker: Host, made: dict[str, Any]
) -> None:
    assert maker.do("forget")
    assert maker.do("complete", _PROMPT)["tokens"] == made["tokens"]  # its blocks are right again
    other = write_checkpoint(place / "other", seed=2)
    with mx.serve(other, model="other", coordinator=coordinator) as source:
        identity = source.identity_hex
    with host(coordinator, place / "other.log") as engine:
        engine.do("start", str(other), load_format="auto", **options(model="m", pin=identity))
        for _ in range(5):
            assert engine.do("complete", _PROMPT)["cached"] == 0
            assert engine.do("forget")
            time.sleep(0.3)
        counts = engine.do("kv")
        assert "shm" in counts["peers"].values() and not counts.get("loaded"), counts
        # Whose weights are not known has no names.
        engine.do("start", str(other), load_format="auto", **options(model="m"))
        engine.do("complete", _PROMPT)
        assert engine.do("kv")["listed"] == 0
        assert "the identity of the weights is not known" in engine.said()


@pytest.mark.slow
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


def test_blocks_outlive_their_engine(coordinator: str, place: Path, checkpoint: Path) -> None:
    prompt = [(11 * at + 5) % 250 for at in range(6 * _BLOCK + 4)]
    files, snapshot = place / "blocks", place / "frozen"
    with host(coordinator, place / "first.log") as engine:
        start(engine, checkpoint, "filed", **options(files=str(files)))
        made = engine.do("complete", prompt)
        assert made["cached"] == 0
        (frozen,) = engine.do("call", "mx_peer_freeze", str(snapshot), "1GiB")
        assert frozen["kv_blocks"] == engine.do("kv")["listed"]
        wait_for(lambda: list(files.glob("*/*.safetensors")))
        engine.kill()
    with host(coordinator, place / "second.log") as engine:
        # Its first request: what files have is known before that.
        start(engine, checkpoint, "filed", **options("kv_consumer", files=str(files)))
        took = engine.do("complete", prompt)
        assert took["cached"] == 6 * _BLOCK
        assert (took["tokens"], took["logprobs"]) == (made["tokens"], made["logprobs"])
        assert loaded(engine) == 6
        # Weights and blocks of a snapshot.
        extra = {"snapshot": str(snapshot)}
        start(engine, bare(checkpoint), "filed", extra=extra, **options("kv_consumer"))
        took = engine.do("complete", prompt)
        assert (took["cached"], took["tokens"]) == (6 * _BLOCK, made["tokens"])
        assert loaded(engine) == 6
        # A bit of one of them is flipped: it is computed, and what follows it.
        for path in (snapshot / "kv").glob("*/*.safetensors"):
            data = bytearray(path.read_bytes())
            data[20_000] ^= 1
            path.write_bytes(data)
        start(engine, bare(checkpoint), "filed", extra=extra, **options("kv_consumer"))
        took = engine.do("complete", prompt)
        assert took["tokens"] == made["tokens"]
        assert engine.do("kv")["failed"] == 1
