"""Ranks on one host that pull their slices together: each block is moved to the host once."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mx
from mx import api, config
from mx.errors import ConfigError
from mx.fetching import ranks as ranks_on_host
from mx.fetching import ring
from mx.fetching.exchange import Exchange
from mx.fetching.ranks import _address, meet
from tests.integration.scripts import script
from tests.support.commands import Run, serve
from tests.support.outcomes import error_of, until

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(180)]

RANKS = 2
#: Other runs of these tests on this host pull the same weights.
GROUP = str(os.getpid())
#: Long, since nothing here depends on it unless a test says so, and machines may be busy.
PATIENT = {"MX_PEER_STALL_TIMEOUT_S": "60"}


def patient(**more: str) -> config.Settings:
    return config.load(environ={"HOME": "/nonexistent", **PATIENT, **more})


def slices_of(rank: int, size: int = RANKS) -> dict[str, Any]:
    rows, columns = mx.Shard(0, rank, size), mx.Shard(1, rank, size)
    return {"*q_proj*": rows, "*up_proj*": rows, "*o_proj*": columns, "*down_proj*": columns}


def right_of(path: Path, rank: int, size: int = RANKS) -> dict[str, torch.Tensor]:
    found = load_file(path)
    for name, tensor in found.items():
        for dim, kinds in ((0, ("q_proj", "up_proj")), (1, ("o_proj", "down_proj"))):
            if any(kind in name for kind in kinds):
                found[name] = tensor.chunk(size, dim)[rank].contiguous()
    return found


def check(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        bits = (each.contiguous().view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(*bits), name


@contextmanager
def pulling(coordinator: str, ranks: int = RANKS, **options: Any) -> Iterator[list[api.Pull]]:
    """A pull for each rank, in this process."""
    settings = options.pop("settings", None) or patient()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                api.pull(
                    "m",
                    coordinator=coordinator,
                    slices=slices_of(rank, ranks),
                    local_ranks=mx.LocalRanks(rank, ranks, GROUP, wait_s=60),
                    settings=settings,
                    **options,
                )
            )
            for rank in range(ranks)
        ]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_block_is_moved_once(
    run: Run, coordinator: str, checkpoint: Path, transport: str, ranks: int
) -> None:
    serve(run, checkpoint, "m", coordinator)
    with pulling(coordinator, ranks, transport=transport) as pulls:
        for rank, pull in enumerate(pulls):
            report = pull.wait(60)
            check(pull.state_dict(), right_of(checkpoint, rank, ranks))
            assert report.verified == "rank"
            given = [path for path in report.paths if path.transport == "rank"]
            assert {path.source for path in given} <= {f"rank {n}" for n in range(ranks)}
            moved = sum(path.bytes for path in report.paths if path.transport == transport)
            assert report.moved_bytes == moved
            subset = pull.subset
            assert subset is not None
            assert moved + sum(path.bytes for path in given) == subset.moved_nbytes
        payload = sum(tensor.nbytes for tensor in load_file(checkpoint).values())
        assert sum(pull.report.moved_bytes or 0 for pull in pulls if pull.report) == payload


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_the_caller_changes_in_a_ready_layer_reaches_no_other_rank(
    run: Run,
    coordinator: str,
    checkpoint: Path,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "SLOTS", 1)  # so that threads wait to hand out what is in place

    def clear(event: api.LayerEvent) -> None:
        for tensor in event.tensors().values():
            tensor.zero_()

    for _ in range(2):  # a thread for each
        serve(run, checkpoint, "m", coordinator)
    with pulling(coordinator, transport=transport) as (first, second):
        first.on_layer(clear)
        first.wait(60)
        second.wait(60)
        check(second.state_dict(), right_of(checkpoint, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pull_that_is_closed_as_ranks_meet_leaves_nothing_open(
    run: Run,
    coordinator: str,
    checkpoint: Path,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fixtures look for descriptors and threads that are left."""
    serve(run, checkpoint, "m", coordinator)
    met, closing = threading.Event(), threading.Event()

    def slow(ranks: mx.LocalRanks, *arguments: Any) -> Exchange | None:
        found = meet(ranks, *arguments)
        if ranks.rank == rank:
            met.set()
            assert closing.wait(60)
        return found

    monkeypatch.setattr(ranks_on_host, "meet", slow)
    with pulling(coordinator) as pulls:
        assert met.wait(60)
        ending = threading.Thread(target=pulls[rank].close)
        ending.start()
        closed = pulls[rank]._job._context.closed  # type: ignore[union-attr]
        until(closed.is_set, "it is being closed", 30)
        closing.set()
        ending.join(60)
        pulls[1 - rank].wait(60)


RANK = """
import json, mx
from mx import config
from pathlib import Path
from tests.integration.test_local_ranks import check, patient, right_of, slices_of
rank, size, checkpoint = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
pull = api.pull("m", coordinator=coordinator, transport="tcp", slices=slices_of(rank, size),
                local_ranks=mx.LocalRanks(rank, size, sys.argv[5], wait_s=60), settings=patient(),
                wait_s=60)
with pull:
    next(pull.layers())
    print("began", flush=True)
    report = pull.wait()
    check(pull.state_dict(), right_of(checkpoint, rank, size))
    print(json.dumps(report.to_json()), flush=True)
"""


def test_ranks_in_processes_of_their_own(run: Run, coordinator: str, checkpoint: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(script(RANK, coordinator, str(rank), "2", str(checkpoint), GROUP))
            for rank in range(2)
        ]
        moved = 0
        for process in ranks:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            moved += json.loads(out.splitlines()[-1])["moved_bytes"]
    assert moved == sum(tensor.nbytes for tensor in load_file(checkpoint).values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_share_of_a_rank_that_is_gone_is_read_by_the_other(
    run: Run, coordinator: str, checkpoint: Path, how: signal.Signals
) -> None:
    """The first ends in the middle; a stopped one is left once it has been silent for long."""
    serve(run, checkpoint, "m", coordinator, "--max-bandwidth", "8MB")
    waits = "60" if how is signal.SIGKILL else "3"
    settings = patient(MX_PEER_STALL_TIMEOUT_S=waits)
    with script(RANK, coordinator, "1", "2", str(checkpoint), GROUP) as other:
        ranks = mx.LocalRanks(0, 2, GROUP, wait_s=60)
        with api.pull(
            "m", coordinator=coordinator, transport="tcp", slices=slices_of(0), local_ranks=ranks,
            settings=settings,
        ) as pull:  # fmt: skip
            assert other.stdout is not None and other.stdout.readline() == "began\n"
            other.send_signal(how)
            report = pull.wait(120)
            check(pull.state_dict(), right_of(checkpoint, 0))
        other.send_signal(signal.SIGCONT)
        if how is signal.SIGSTOP:  # and it comes to its end too, when it goes on
            out, err = other.communicate(timeout=120)
            assert other.returncode == 0, err
            assert json.loads(out.splitlines()[-1])["verified"] in ("rank", "digest")
    assert pull.subset is not None
    assert pull.subset.moved_nbytes // 2 < (report.moved_bytes or 0)


def test_a_pull_that_is_closed_leaves_its_share_to_the_other(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator, "--max-bandwidth", "20MB")
    with pulling(coordinator, transport="tcp") as (first, second):
        next(first.layers())
        next(second.layers())
        first.close()
        second.wait(60)
        check(second.state_dict(), right_of(checkpoint, 1))


def test_ranks_that_do_not_come_are_not_waited_for(
    run: Run, coordinator: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(run, checkpoint, "m", coordinator)
    for rank in range(2):
        with api.pull(
            "m",
            coordinator=coordinator,
            slices=slices_of(rank),
            local_ranks=mx.LocalRanks(rank, 2, GROUP, wait_s=0.2),
        ) as pull:
            report = pull.wait(60)
            check(pull.state_dict(), right_of(checkpoint, rank))
            assert pull.subset is not None and report.moved_bytes == pull.subset.moved_nbytes
    said = [each.getMessage() for each in caplog.records if "shares with no other" in each.message]
    assert said == [
        "rank 0 shares with no other on this host: none came within 0.2 s",
        "rank 1 shares with no other on this host: rank 0 did not arrive within 0.2 s",
    ]


def test_two_of_three_share(
    run: Run, coordinator: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(run, checkpoint, "m", coordinator)
    with ExitStack() as stack:
        pulls = [
            stack.enter_context(
                api.pull(
                    "m",
                    coordinator=coordinator,
                    only="*.down_proj*",
                    local_ranks=mx.LocalRanks(rank, 3, GROUP, wait_s=6.0),
                    settings=patient(),
                )
            )
            for rank in (0, 2)
        ]
        reports = [pull.wait(60) for pull in pulls]
    assert "2 of 3 ranks on this host have met" in caplog.text
    assert sum(report.moved_bytes or 0 for report in reports) == reports[0].bytes


def test_a_rank_that_is_there_twice_is_refused(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    options: dict[str, Any] = {"coordinator": coordinator, "only": "*.down_proj*"}
    for rank in (0, 1):
        twice = mx.LocalRanks(rank, 3, GROUP, wait_s=20.0)
        with ExitStack() as stack:
            if rank:  # else there is no rank 0 to say so
                leading = mx.LocalRanks(0, 3, GROUP, wait_s=20.0)
                stack.enter_context(api.pull("m", local_ranks=leading, **options))
            pulls = [
                stack.enter_context(api.pull("m", local_ranks=twice, **options)) for _ in range(2)
            ]
            until(lambda: any(p._state.error for p in pulls), "a refusal", 30)  # noqa: B023
            (refused,) = [pull for pull in pulls if pull._state.error]
            error = error_of(refused)
            assert isinstance(error, ConfigError) and f"rank {rank} of 3" in str(error)
            assert "group" in error.hint


def test_groups_do_not_meet(run: Run, coordinator: str, checkpoint: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    with ExitStack() as stack:
        pulls = [
            stack.enter_context(
                api.pull(
                    "m",
                    coordinator=coordinator,
                    only="*.down_proj*",
                    local_ranks=mx.LocalRanks(
                        rank, 2, group=f"{GROUP}, replica {rank}", wait_s=0.5
                    ),
                )
            )
            for rank in range(2)
        ]
        assert all(pull.wait(60).moved_bytes == pull.wait().bytes for pull in pulls)


def test_what_else_connects_is_no_rank(run: Run, coordinator: str, checkpoint: Path) -> None:
    """Strangers on rank 0's socket: silent, malformed, or gone at once."""
    serve(run, checkpoint, "m", coordinator)
    options: dict[str, Any] = {
        "coordinator": coordinator, "only": "*.down_proj*", "settings": patient(),
    }  # fmt: skip
    with api.pull("m", local_ranks=mx.LocalRanks(0, 2, GROUP, wait_s=60), **options) as first:
        prefix = f"@mx-ranks-{os.geteuid()}-"

        def names() -> list[str]:
            lines = Path("/proc/net/unix").read_text().splitlines()
            return [line.split()[-1] for line in lines if prefix in line]

        until(lambda: bool(names()), "rank 0's socket", 30)
        address = "\0" + names()[0][1:]
        with ExitStack() as stack:
            for said in (b"", b"hello", b"mxr1\x01\x00\x02\x00", b"x" * 4096):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.connect(address)
                if said:
                    stranger.send(said)
            with api.pull(
                "m", local_ranks=mx.LocalRanks(1, 2, GROUP, wait_s=60), **options
            ) as second:
                reports = [each.wait(60) for each in (first, second)]
    assert sum(report.moved_bytes or 0 for report in reports) == reports[0].bytes


def test_a_rank_whose_memory_is_another_s_shape_is_done_without(
    run: Run, coordinator: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one of another version."""
    serve(run, checkpoint, "m", coordinator)
    group = f"shape {os.getpid()}"
    ranks = mx.LocalRanks(0, 2, group=group, wait_s=60)
    with api.pull(
        "m", coordinator=coordinator, only="*.down_proj*", local_ranks=ranks, settings=patient()
    ) as pull:
        until(lambda: pull.progress().phase == "waiting for ranks", "it waits", 30)
        assert pull.manifest is not None
        address = _address(ranks, pull.manifest.ref.content)
        memfd = os.memfd_create("mx-testing")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            until(lambda: other.connect_ex(address) == 0, "rank 0's socket", 30)
            socket.send_fds(other, [struct.pack("<4sHH", b"mxr1", 1, 2)], [memfd])
            report = pull.wait(60)
        os.close(memfd)
    assert report.moved_bytes == report.bytes
    assert "shares memory of a wrong size" in caplog.text


def test_a_closed_pull_waits_for_no_rank(run: Run, coordinator: str, checkpoint: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    for rank in range(2):
        ranks = mx.LocalRanks(rank, 2, GROUP, wait_s=3600)
        with api.pull("m", coordinator=coordinator, only="*.down_proj*", local_ranks=ranks) as pull:
            until(lambda: pull.progress().phase == "waiting for ranks", "it waits", 30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "`only` or `slices`"),
        ({"only": "x", "verify": "strong"}, "verify=strong"),
    ],
)
def test_what_ranks_can_not_share_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        api.pull("m", coordinator="127.0.0.1:1", local_ranks=mx.LocalRanks(0, 2), **options)


def test_a_rank_lends_its_slices_as_a_variant(run: Run, coordinator: str, checkpoint: Path) -> None:
    """What was pulled in slices has an identity of its own, and another replica pulls it whole."""
    serve(run, checkpoint, "m", coordinator)
    right = right_of(checkpoint, 1)
    here = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    with api.pull("m", coordinator=coordinator, slices=slices_of(1), into=here) as pull:
        whole = pull.wait(60).identity
    key = mx.ProcessingKey(tp="1/2")
    with (
        api.serve(here, model="m", variant=key, coordinator=coordinator, copy=False),
        api.pull("m", variant=key, coordinator=coordinator) as again,
    ):
        assert again.wait(60).identity != whole
        check(again.state_dict(), right)
