"""Coordinators that lie, and that have restarted and heard a stranger first."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx import api
from tests.hostile.conftest import CONFIG, SIDE_FILE, Started, Weights, failed, succeeded
from tests.integration.conftest import Run, free_port, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

OWN_DIGESTS = {"bytes": "others", "digests": "own"}
#: How long a pull waits for the honest source to be listed again.
WAIT = ("--wait", "30")


def source_id(coordinator: str) -> str:
    (status,) = api.list_sources("m", coordinator=coordinator)
    return status.record.source_id


def other_weights_first(run: Run, start: Started, others: Weights, coordinator: str, _: str) -> None:
    serve(run, others.folder, "m", coordinator)


def garbage_layout_first(run: Run, start: Started, others: Weights, coordinator: str, _: str) -> None:
    start.liar(coordinator, layout="garbage", **OWN_DIGESTS)


def other_files_first(run: Run, start: Started, others: Weights, coordinator: str, _: str) -> None:
    start.liar(coordinator, packaging="others", **OWN_DIGESTS)


def own_id_first(run: Run, start: Started, others: Weights, coordinator: str, taken: str) -> None:
    """A source's id is in every listing."""
    start.liar(coordinator, source_id=taken, **OWN_DIGESTS)


STRANGERS = [other_weights_first, garbage_layout_first, own_id_first]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda each: each.__name__)
def test_a_stranger_that_is_first_after_a_restart(
    run: Run,
    start: Started,
    weights: Weights,
    other_weights: Weights,
    tmp_path: Path,
    stranger: Callable[..., None],
) -> None:
    port = free_port()
    coordinator, daemon = start_coordinator(run, port=port)
    honest = serve(run, weights.folder, "m", coordinator)
    taken = source_id(coordinator)
    honest.signal(signal.SIGSTOP)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    start_coordinator(run, port=port)
    stranger(run, start, other_weights, coordinator, taken)
    honest.signal(signal.SIGCONT)
    for number, pin in enumerate((weights.identity, weights.pin)):
        out = tmp_path / str(number)
        pulling = ("pull", f"m@{pin}", "--coordinator", coordinator, "--out", str(out), "--json")
        succeeded(run(*pulling, "--transport", "tcp", *WAIT), weights, out)
    assert (out / SIDE_FILE).read_bytes() == CONFIG


@pytest.mark.parametrize("named", ["identity", "pin"])
def test_a_coordinator_that_answers_a_pin_with_other_weights(
    run: Run, start: Started, weights: Weights, other_weights: Weights, tmp_path: Path, named: str
) -> None:
    coordinator = start.module("false_coordinator").json()["address"]
    serve(run, other_weights.folder, "m", coordinator)
    out, pinned = tmp_path / "out", f"m@{getattr(weights, named)}"
    pulling: tuple[Any, ...] = ("pull", pinned, "--coordinator", coordinator, "--json")
    failed(run(*pulling, "--out", str(out)), coordinator, out=out)


def test_a_coordinator_that_answers_a_pin_with_other_files(
    run: Run, start: Started, weights: Weights, other_files: Weights, tmp_path: Path
) -> None:
    coordinator = start.module("false_coordinator").json()["address"]
    serve(run, other_files.folder, "m", coordinator)
    with_files, alone = tmp_path / "with files", tmp_path / "alone"
    where = ("--coordinator", coordinator, "--json", "--out")
    failed(run("pull", f"m@{weights.pin}", *where, str(with_files)), coordinator, out=with_files)
    succeeded(run("pull", f"m@{weights.identity}", *where, str(alone)), weights, alone)
