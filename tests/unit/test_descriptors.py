"""Closing what has descriptors: a close that an exception from a signal interrupts may run again,
and closes no descriptor that another file got meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mx.core.local_ranks import index_of
from mx.core.types import ManifestRef
from mx.fetching.exchange import Exchange
from mx.fetching.ring import Ring
from mx.fleet.collapsing import _HugePageWork
from mx.memory.arena import MemfdArena
from mx.storage.journal import Journal
from mx.storage.staging import Staging
from mx_transports.toolkit.local import _ControlPage
from tests.support.local_exchange import all_of
from tests.support.transfer_machine import grid_of

Close = Callable[[], object]


def arena(folder: Path) -> Close:
    return MemfdArena(4096).release


def ring(folder: Path) -> Close:
    grid = grid_of([4])
    return Ring.create(index_of(grid, all_of(grid)), 1).close


def exchange(folder: Path) -> Close:
    grid = grid_of([4])
    return Exchange(grid, Ring.create(index_of(grid, all_of(grid)), 1), []).close


def staging(folder: Path) -> Close:
    return Staging(folder / "out").release


def journal(folder: Path) -> Close:
    ref = ManifestRef(identity=bytes(32), layout=bytes(32), packaging=b"", sizes=(1, 1, 0))
    return Journal(folder / "journal", ref, new=True).close


def huge_pages(folder: Path) -> Close:
    descriptor = os.memfd_create("mx:test")
    try:
        return _HugePageWork(descriptor, 4096).cancel
    finally:
        os.close(descriptor)


def control_page(folder: Path) -> Close:
    return _ControlPage().close


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


class Interrupted(BaseException):
    pass


@contextmanager
def interrupts() -> Iterator[None]:
    """A signal comes right after a descriptor is closed, and its handler raises."""
    close = os.close

    def close_and_interrupt(descriptor: int) -> None:
        close(descriptor)
        signal.raise_signal(signal.SIGUSR1)

    def handle(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "close", close_and_interrupt)
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "make", [arena, ring, exchange, staging, journal, huge_pages, control_page]
)
def test_a_close_that_was_interrupted_closes_nothing_of_another(
    make: Callable[[Path], Close], tmp_path: Path
) -> None:
    before = descriptors()
    close, others = make(tmp_path), []
    for _ in range(8):
        with interrupts():
            try:
                close()
                break
            except Interrupted:
                others.append(os.open(os.devnull, os.O_RDONLY))
    left = descriptors() - before
    for each in others:
        with suppress(OSError):
            os.close(each)
    assert sorted(left) == sorted(str(each) for each in others)
