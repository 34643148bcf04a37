"""What every test on GPUs is held to, and the GPUs; without any the tests are skipped.

Over the stand-in driver, whose log tells, a test that passes has given everything back: contexts,
memory, maps, streams, events, and what the process itself holds.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from mx.cuda import driver as cuda
from mx.cuda.bindings import Driver
from mx.cuda.device import CudaStream, Device, PinnedMemory
from mx.transport import Unavailable
from mx_transports.toolkit.cuda.hosts import source_maps
from tests.gpu.claims import FIGURES, table
from tests.gpu.rig import Spy
from tests.support.driver.logs import OwnLog, kept
from tests.support.leftovers import Holdings

HERE = Path(__file__).parent
#: What needs torch is left out where there is none.
_NEED_TORCH = ["test_pulls.py", "test_end_to_end.py", "test_torch.py"]
collect_ignore = [] if importlib.util.find_spec("torch") else _NEED_TORCH
#: How long what is left of a test may take to go.
_SETTLE_S = 5.0
_failed = pytest.StashKey[bool]()


def pytest_report_header() -> list[str]:
    return [f"left out without torch: {', '.join(collect_ignore)}"] if collect_ignore else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    found = cuda.probe() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if isinstance(found, Unavailable):
            item.add_marker(pytest.mark.skip(reason=found.reason))


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Let CUDA make what it makes once and keeps (threads, descriptors) before any test."""
    if isinstance(cuda.probe(), Unavailable):
        yield
        return
    with Device(cuda.load(), 0) as device:
        with CudaStream(device) as stream, PinnedMemory(device, 4096):
            stream.synchronize()
        yield


@pytest.fixture
def driver() -> Driver:
    """Give the driver of this process."""
    return cuda.load()


@pytest.fixture
def gpu(driver: Driver) -> Iterator[Device]:
    """Give GPU 0."""
    with Device(driver, 0) as device:
        yield device


@pytest.fixture
def gpus(driver: Driver) -> int:
    """Give the number of GPUs, which are two or more: else the test is skipped."""
    if driver.device_count() < 2:
        pytest.skip("one GPU only")
    return driver.device_count()


@pytest.fixture
def spy(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Give what counts the calls of this process and makes some fail."""
    found = Spy(driver._d)
    monkeypatch.setattr(driver, "_d", found)
    return found


@pytest.fixture(autouse=True)
def nothing_kept(_warm: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test over the stand-in after which something was not given back."""
    folder = os.environ.get("MX_STANDIN_LOG")
    if not folder:
        yield
        return
    log, before = OwnLog(Path(folder), os.getpid()), Holdings.now()
    yield
    if request.node.stash.get(_failed, False):
        return
    source_maps.clear()  # they would stay for a while
    until = time.monotonic() + _SETTLE_S
    while left := [*kept(log.calls()), *Holdings.now().beyond(before)]:
        if time.monotonic() > until:
            pytest.fail("not given back:\n  " + "\n  ".join(left), pytrace=False)
        gc.collect()
        time.sleep(0.02)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when in ("setup", "call") and report.failed:
        item.stash[_failed] = True
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the claims, and on a real GPU the figures; not in a run of the other tests too."""
    if config.inipath != HERE / "pytest.ini":
        return
    outcomes = []
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.getreports(outcome):
            file, _, test = report.nodeid.partition("::")
            name = f"{Path(file).name}::{test}"
            outcomes.append((name, "failed" if outcome == "error" else outcome))
    terminalreporter.section("claims")
    for line in table(outcomes):
        terminalreporter.write_line(line)
    for row in config.stash.get(FIGURES, []):
        verdict = "" if row.bar == "none" else f"{row.bar} {'met' if row.ok else 'MISSED'}"
        terminalreporter.write_line(f"{row.work}: {row.value:g} {row.unit} {verdict} {row.detail}")
