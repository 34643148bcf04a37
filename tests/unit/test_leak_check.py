"""The leak check itself: each kind of thing left behind fails its test, and a tidy test passes."""

from __future__ import annotations

import re

import pytest

from tests.support.daemon import ROOT

pytest_plugins = ["pytester"]

TESTS = """
    import asyncio, mmap, os, subprocess, threading
    import grpc.aio

    stop = threading.Event()
    kept = []

    def teardown_module():
        stop.set()
        kept[-1].kill()
        kept[-1].wait()

    def test_thread():
        threading.Thread(target=stop.wait, daemon=True).start()

    def test_descriptor():
        os.dup(0)

    def test_mapping():
        fd = os.memfd_create("left")
        os.ftruncate(fd, 4096)
        kept.append(mmap.mmap(fd, 4096))
        os.close(fd)

    async def test_task():
        kept.append(asyncio.create_task(asyncio.sleep(20)))

    def test_child():
        kept.append(subprocess.Popen(["sleep", "20"]))

    async def test_tidy():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        await server.stop(None)
        child = await asyncio.create_subprocess_exec("true")
        await child.wait()
        await asyncio.to_thread(sum, [1])
"""


def test_each_kind_of_leak_is_found(pytester: pytest.Pytester) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    pytester.makeconftest(conftest.replace("SETTLE_S = 5.0", "SETTLE_S = 0.3"))
    pytester.makepyfile(TESTS)
    pytester.makeini(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        f"pythonpath = {ROOT}\n"
    )
    result = pytester.runpytest_subprocess("-rA", "-p", "no:cacheprovider", "-W", "error")
    found = set(re.findall(r"^(FAILED|ERROR) \S+::(\w+)", result.stdout.str(), re.M))
    assert found == {
        ("ERROR", "test_thread"),
        ("ERROR", "test_descriptor"),
        ("ERROR", "test_mapping"),
        ("FAILED", "test_task"),
        ("ERROR", "test_child"),
    }
    result.stdout.fnmatch_lines(
        [
            "  thread 'Thread-*",
            "  descriptor * -> /dev/null",
            "  mapping * /memfd:left*",
            "  child process *",
            "asyncio tasks left behind:",
        ]
    )
    result.assert_outcomes(passed=5, failed=1, errors=4)
