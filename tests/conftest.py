"""What every test is held to: it leaves no thread, task, descriptor, mapping or child behind.

The check compares what the process holds before and after each test, and gives what is on its
way out a few seconds to go. A test that has failed is not checked: its traceback keeps frames,
and with them buffers and sockets, alive.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import inspect
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import grpc
import grpc.aio
import hypothesis
import pytest
import tqdm

from mx.cuda import driver as cuda
from mx.transport import Unavailable
from tests.support.leftovers import Holdings
from tests.support.stores import KINDS, stores_of

#: How long what is left of a test may take to end: so long, and for so many looks at it. Where
#: other programs use the processors, this process may not have run at all in the time.
SETTLE_S = 5.0
SETTLE_LOOKS = 50
#: How many looks precede each collection: it takes longer than most of what is left, and no other
#: thread can go on meanwhile.
LOOKS_A_COLLECTION = 10

# Name keys and receipts of the tests, and of the processes that they start, are not the user's.
_state = tempfile.TemporaryDirectory(prefix="mx-tests-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _state.name

# Shrinking takes up to five minutes, the limit of a test is one: a test that was ended by that gave
# no example at all. So the first that fails is reported as it was found, and can be run again by
# the blob that is printed with it. To see it shrunk:
#   pytest --hypothesis-profile=explore -o timeout=0 -o faulthandler_timeout=0 FILE::TEST
_ci = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    phases=set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain},
)
hypothesis.settings.register_profile("ci", _ci)
# For what one Python has shown with more examples: it holds with other Pythons and versions.
hypothesis.settings.register_profile("few", _ci, max_examples=25)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("ci")

#: Test files by what they import that an environment of `make test-pythons` lacks. Named here, and
#: not skipped by themselves: a file that lacks anything else is an error.
_NEEDS = {
    "torch": [
        "integration/test_trainers.py",
        "unit/test_arrays.py",
        "unit/test_converted.py",
        "unit/test_doctor_disk.py",
        "unit/test_demo_models.py",
        "unit/test_engine_fill.py",
        "unit/test_engine_order.py",
        "unit/test_engine_registries.py",
        "unit/test_files_writer.py",
        "unit/test_graph_pool.py",
        "unit/test_describe.py",
        "unit/test_held_model.py",
        "unit/test_hints.py",
        "unit/test_holding_folders.py",
        "unit/test_in_place.py",
        "unit/test_job.py",
        "unit/test_live.py",
        "unit/test_naming.py",
        "unit/test_partial_output.py",
        "unit/test_pending.py",
        "unit/test_permuted.py",
        "unit/test_process_group.py",
        "unit/test_read_back.py",
        "unit/test_reader.py",
        "unit/test_reader_drives.py",
        "unit/test_reader_luck.py",
        "unit/test_reuse.py",
        "unit/test_safetensors.py",
        "unit/test_shared_folder.py",
        "unit/test_side_files.py",
        "unit/test_stages.py",
        "unit/test_tensors.py",
        "unit/test_text.py",
        "unit/test_verify.py",
        "unit/test_writer.py",
    ],
    "pynvml": ["unit/test_hardware_gpus.py"],
}
_LACKING = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
collect_ignore = [file for name in _LACKING for file in _NEEDS[name]]
_left_out = [f"left out without {name}: {', '.join(_NEEDS[name])}" for name in _LACKING]
# Hundreds of tests, each skipped for this one reason. Who asks for them (`pytest tests/gpu`,
# `python -m tests.gpu`) gets them, and the reason.
if isinstance(_gpus := cuda.presence(), Unavailable):
    collect_ignore.append("gpu")
    _left_out.append(f"left out: gpu ({_gpus.reason})")


#: Files of tests/integration that are `long` as a whole; there are quick tests of the parts.
_LONG = {
    # Whole pulls of GPUs, over the stand-in.
    "driver_beyond",
    "driver_counts",
    "driver_direct",
    "driver_disk",
    "driver_faults",
    "driver_graph_refusals",
    "driver_graphs",
    "driver_in_place",
    "driver_kernels",
    "driver_links",
    "driver_live",
    "driver_modes",
    "driver_snapshots",
    "driver_opening",
    "driver_paths",
    "driver_process",
    "driver_trips",
    "driver_ucx",
    # Engines, each of which imports torch and more.
    "adapters",
    "artifact_choice",
    "artifact_recording",
    "artifact_verbs",
    "engine_bad_luck",
    "engine_folders",
    "from_pretrained",
    "hub",
    "main_job",
    "pipelines",
    "sentences",
    "serve_in_engine",
    "variants",
    # Fleets, and many steps one after the other.
    "broadcast",
    "budgets",
    "bundles",
    "chain",
    "changing",
    "cli_verbs",
    "documented_store",
    "editions",
    "forks",
    "holders",
    "name_keys",
    "named_owners",
    "newest",
    "next_release",
    "redis_leases",
    "router",
    "ucx_exits",
    "updates",
    "writers",
}


def pytest_report_header() -> list[str]:
    return _left_out


# A suite that a shell runs in the background inherits that SIGINT is ignored (under nohup SIGHUP
# too), and its children inherit it in turn: some tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


_call_failed = pytest.StashKey[bool]()
_log = pytest.StashKey[pytest.LogCaptureFixture]()


class _FailuresAtOnce:
    """Prints a failure when it happens: a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")  # None in workers
        if report.failed and reporter is not None:
            reporter.write_line("")
            reporter.write_line(f"{report.nodeid}: its {report.when} failed\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FailuresAtOnce(config))


class _Settling:
    """The time in which what is left of a test has to end."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + SETTLE_S
        self.looks = 0

    def is_over(self) -> bool:
        """Count a look, and return True if it was one too many."""
        self.looks += 1
        return self.looks > SETTLE_LOOKS and time.monotonic() > self._until_s


@pytest.fixture(scope="session", autouse=True)
def _globals_of_libraries() -> None:
    """What libraries make on first use and keep, made before any test: gRPC's pollers, and the
    lock of tqdm, which transformers shows its progress with (and whose monitor is a thread)."""
    tqdm.tqdm.monitor_interval = 0
    tqdm.tqdm.get_lock()

    async def once() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        await server.stop(None)

    asyncio.run(once())


@pytest.fixture(
    params=[pytest.param(k, marks=[pytest.mark.long] if k == "redis" else []) for k in KINDS]
)
def each_store(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with `new_store` of each kind."""
    timeless = request.node.get_closest_marker("integration") is None
    with stores_of(request.param, timeless=timeless):
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind(
    _globals_of_libraries: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Fails a test after which something is still there that was not there before it."""
    before = Holdings.now()
    yield
    if request.node.stash.get(_call_failed, False):
        return
    settling, logged = _Settling(), list[str]()
    while left := Holdings.now().beyond(before):
        if settling.is_over():
            told = sorted(left) + [f"logged: {each}" for each in logged]
            pytest.fail("left behind:\n  " + "\n  ".join(told), pytrace=False)
        if settling.looks % LOOKS_A_COLLECTION == 0:
            logged += _without_tracebacks(request.node.stash[_log])
            gc.collect()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _log_of_the_test(
    nothing_left_behind: None, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Have a test's log at hand when it is checked what is left, with levels as they were then."""
    request.node.stash[_log] = caplog


def _without_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Have the log of a test, which pytest keeps, keep no frames, and with them calls of gRPC,
    alive. Yield the records that had any."""
    for record in (*caplog.get_records("call"), *caplog.get_records("teardown")):
        if record.exc_info:
            yield logging.Formatter().format(record)
            record.exc_info = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when in ("setup", "call") and report.failed:
        item.stash[_call_failed] = True
    return report


def _without_task_leaks(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """The runner of async tests silently cancels what is left; so look before it does."""

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        await test(*args, **kwargs)
        settling = _Settling()
        while left := asyncio.all_tasks() - before:
            if settling.is_over():
                names = "\n  ".join(sorted(map(repr, left)))
                pytest.fail(f"asyncio tasks left behind:\n  {names}", pytrace=False)
            await asyncio.sleep(0.02)

    return checked


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "integration" and item.path.stem.removeprefix("test_") in _LONG:
            item.add_marker(pytest.mark.long)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _without_task_leaks(item.obj)


def pytest_collection_finish() -> None:
    # What has been imported stays: else each collection looks through it, for half a second.
    gc.collect()
    gc.freeze()
