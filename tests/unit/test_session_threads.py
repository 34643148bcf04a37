"""Sessions that get no thread, as where a process has reached its limit, leave nothing behind."""

from __future__ import annotations

import threading

import pytest

from mx.testing.bench import Bench, BenchSource
from mx.testing.harness import Harness
from mx.testing.holdings import HeldResources
from mx.transport import Unavailable
from mx.units import MIB
from mx_transports.ucx import UcxTransport

TRANSPORTS = {"tcp": "TcpTransport", "shm": "ShmTransport", "ucx": "UcxTransport"}


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_session_without_threads_is_none(
    name: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that can't start is the session's first or its second."""
    if name == "ucx" and isinstance(UcxTransport().probe(), Unavailable):
        pytest.skip("NIXL is not installed")
    start = threading.Thread.start
    names: list[str] = []

    def limited(thread: threading.Thread) -> None:
        ours = thread.name.startswith((f"mx-{name}-0", f"mx-{name}-1", f"mx-{name}-sinks"))
        if ours and thread.daemon:
            names.append(thread.name)
            if len(names) > nth:
                raise RuntimeError("can't start new thread")
        start(thread)

    with Bench(Harness(f"mx_transports.{name}:{TRANSPORTS[name]}")) as bench:
        _read(bench, bench.source(MIB))  # what a process has once is there
        before = HeldResources.after_join()
        source = bench.source(MIB)
        for _ in range(3):
            names.clear()
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", limited)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    bench.open(source)
            assert len(names) == nth + 1
        _read(bench, source)
        bench.eventually(
            lambda: not HeldResources.after_join().beyond(before),
            lambda: "; ".join(HeldResources.after_join().beyond(before)),
        )


def _read(bench: Bench, source: BenchSource) -> None:
    """Read from a source, and end it."""
    session = bench.open(source)
    bench.succeed(bench.read(session, 0, 0, bench.destination(MIB)))
    session.close()
    assert session.join(60)
    source.exposure.close()
    assert source.exposure.join(60)
    for memory in source.memories:
        memory.close()
