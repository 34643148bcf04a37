"""Real vLLM engines on a CPU: one takes the KV blocks that another one has computed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from mx.snapshots.container import SNAPSHOT
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import EngineError, Host, host, lending, start, wait_for

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
def computed(maker: Host) -> dict[str, Any]:
    """What the maker has computed of the prompt."""
    found: dict[str, Any] = maker.do("complete", _PROMPT)
    assert found["cached"] == 0
    assert maker.do("kv")["listed"] == 8  # two of what the start has generated
    return found


@pytest.fixture(scope="module")
def made(maker: Host, computed: dict[str, Any]) -> dict[str, Any]:
    """The same, but for the blocks that it has in its own cache. (On some processors vLLM rounds
    otherwise if it computes all at once.)"""
    return from_its_cache(maker, _PROMPT, computed)


def from_its_cache(where: Host, prompt: list[int], computed: dict[str, Any]) -> dict[str, Any]:
    """Have an engine complete a prompt again, by the blocks that it has computed."""
    found: dict[str, Any] = where.do("complete", prompt)
    assert (found["cached"], found["tokens"]) == (6 * _BLOCK, computed["tokens"])
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


def test_a_flipped_bit_is_computed_again(
    maker: Host, taker: Host, computed: dict[str, Any]
) -> None:
    assert taker.do("forget")
    found(taker, 6 * _BLOCK)
    before = loaded(taker)
    maker.do("spoil")
    assert taker.do("forget")
    took = taker.do("complete", _PROMPT)
    assert (took["tokens"], took["logprobs"]) == (computed["tokens"], computed["logprobs"])
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
def test_blocks_of_eight_bits(coordinator: str, place: Path, checkpoint: Path) -> None:
    """Their scales are of the checkpoint, whose identity is in the names."""
    eight = {"kv_cache_dtype": "fp8_e4m3"}
    with (
        host(coordinator, place / "eight.log") as one,
        host(coordinator, place / "takes.log") as two,
    ):
        try:
            start(one, checkpoint, "eight", **options(), **eight)
        except EngineError as error:
            pytest.skip(f"vLLM has none on this processor: {error}")
        lending(one)
        computed = one.do("complete", _PROMPT)
        made = from_its_cache(one, _PROMPT, computed)
        start(two, bare(checkpoint), "eight", **options("kv_consumer", wait_s=30.0), **eight)
        took = found(two, 6 * _BLOCK)
        assert (took["tokens"], took["logprobs"]) == (made["tokens"], made["logprobs"])
        assert loaded(two) == 6
        # Of another dtype they are other blocks.
        start(two, checkpoint, "eight", **options("kv_consumer"))
        for _ in range(3):
            assert two.do("complete", _PROMPT)["cached"] == 0
            assert two.do("forget")
        assert not loaded(two)
        assert any("another form" in why for why in two.do("kv")["peers"].values())


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


def kv_files(snapshot: Path) -> dict[str, list[int]]:
    """Return the sizes of what a snapshot has of KV blocks, by folder."""
    found: dict[str, list[int]] = {}
    for each in (snapshot / "kv").glob("*/*"):
        found.setdefault(each.parent.name, []).append(each.stat().st_size)
    return found


def test_blocks_outlive_their_engine(coordinator: str, place: Path, checkpoint: Path) -> None:
    prompt = [(11 * at + 5) % 250 for at in range(6 * _BLOCK + 4)]
    files, snapshot, signalled = place / "blocks", place / "frozen", place / "signalled"
    on = {"freeze_on": "SIGUSR1", "freeze_to": str(signalled), "freeze_kv": "1GiB"}
    with host(coordinator, place / "first.log") as engine:
        start(engine, checkpoint, "filed", extra=on, **options(files=str(files)))
        computed = engine.do("complete", prompt)
        assert computed["cached"] == 0
        made = from_its_cache(engine, prompt, computed)
        (frozen,) = engine.do("call", "mx_peer_freeze", str(place / "apart"), "1GiB")
        assert frozen["kv_blocks"] == engine.do("kv")["listed"] > 0
        how = {"source": "engine", "kv_bytes": "1GiB", "coordinator": coordinator}
        assert mx.freeze("filed", snapshot, **how).kv_blocks == frozen["kv_blocks"]
        os.kill(engine.process.pid, signal.SIGUSR1)
        wait_for((signalled / SNAPSHOT).exists)
        assert kv_files(signalled) == kv_files(place / "apart") == kv_files(snapshot)
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
