"""A process that has used mx ends as it would have without: with its own exit code, no traceback,
and what it had left open closed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from mx import api
from tests.integration.scripts import ran
from tests.support.commands import Run, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CLOSED = {
    "pull": "with api.pull('m', coordinator=coordinator) as pull: pull.wait()",
    "copy": "with api.pull('m', coordinator=coordinator, attach=False) as pull: pull.wait()",
    "plan": "api.plan('m', coordinator=coordinator)",
    "list": "api.list_models(coordinator=coordinator)",
    "serve": "with api.serve(sys.argv[2], model='n', coordinator=coordinator): pass",
}

LEFT_OPEN = {
    "pulled": "pull = api.pull('m', coordinator=coordinator, attach=False); pull.wait()",
    "pulling": "pull = api.pull('slow', coordinator=coordinator); next(pull.layers())",
    "just begun": "pull = api.pull('slow', coordinator=coordinator)",
    "waiting": "pull = api.pull('nothing', coordinator=coordinator, wait_s=600); time.sleep(0.5)",
    "dropped": "api.pull('m', coordinator=coordinator).wait()",
    # From Python 3.12 on no thread can start any more when the loop is given the pull.
    "dropped at exit": "pulls = [api.pull('m', coordinator=coordinator)]; pulls[0].wait();"
    " atexit.register(lambda: (pulls.clear(), time.sleep(0.3)))",
    "writing": "pull = api.pull('slow', coordinator=coordinator, out=sys.argv[3] + '/out');"
    " next(pull.layers())",
    "holding": "pull = api.pull('m', coordinator=coordinator, hold=True); source = pull.hold()",
    "serving": "source = api.serve(sys.argv[2], model='n', coordinator=coordinator)",
    # A server that was made, and has not started yet.
    "serving just begun": """
import asyncio, contextlib, threading, grpc.aio._server
begun = threading.Event()
async def start(self):
    begun.set()
    await asyncio.sleep(600)
grpc.aio._server.Server.start = start
def serve():
    with contextlib.suppress(MxError):
        api.serve(sys.argv[2], model='n', coordinator=coordinator)
threading.Thread(target=serve, daemon=True).start()
begun.wait()""",
    # Where no thread can start the tensors can't be lent again: nothing is to be said of it.
    "changing at exit": """
import contextlib, threading, numpy
lent = {'a': numpy.zeros(1 << 20, numpy.uint8)}
source = api.serve(lent, model='lent', coordinator=coordinator, copy=False)
inside, leave, over = threading.Event(), threading.Event(), threading.Event()
def change():
    with contextlib.suppress(MxError), source.changing():
        lent['a'] += 1
        inside.set()
        leave.wait()
    over.set()
threading.Thread(target=change, daemon=True).start()
inside.wait()
atexit.register(lambda: (leave.set(), over.wait(30)))""",
    "closing at exit": "pull = api.pull('slow', coordinator=coordinator); next(pull.layers());"
    " atexit.register(pull.close)",
    "ending at exit": "source = api.serve(sys.argv[2], model='n', coordinator=coordinator);"
    " atexit.register(source.close)",
}


@pytest.mark.parametrize("what", CLOSED)
def test_what_was_closed_leaves_no_trace(served: str, checkpoint: Path, what: str) -> None:
    assert ran(CLOSED[what], served, str(checkpoint)) == (0, "", "")


@pytest.mark.parametrize("what", LEFT_OPEN)
def test_what_was_left_open_is_closed(
    served: str, checkpoint: Path, tmp_path: Path, what: str
) -> None:
    found = ran(LEFT_OPEN[what] + "\nsys.exit(7)", served, str(checkpoint), str(tmp_path))
    assert found == (7, "", "")
    # Who was closed in order has said so: no lease needs to run out.
    sources = [each.record.model.name for each in api.list_sources(coordinator=served)]
    assert sorted(sources) == ["m", "slow"]


@pytest.mark.parametrize("verb", ["pull", "plan", "serve"])
def test_a_command_says_nothing_but_its_own(
    run: Run, served: str, checkpoint: Path, verb: str
) -> None:
    if verb == "serve":
        command = serve(run, checkpoint, "n", served)
        command.signal(signal.SIGINT)
    else:
        command = run(verb, "m", "--coordinator", served, "--json")
    assert command.wait(60) == 0
    assert "Traceback" not in command.err
    assert "Exception" not in command.err


def test_nothing_of_the_loops_runs_on_an_executors_threads(
    served: str, checkpoint: Path, tmp_path: Path
) -> None:
    """An executor takes no more work once the interpreter's end has begun, and its threads are
    few: a slow look-up would hold up the others."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from mx import runtime
class Executor(ThreadPoolExecutor):
    def submit(self, work, *arguments, **named):
        print('used by', work, file=sys.stderr)
        return super().submit(work, *arguments, **named)
loop = runtime.acquire()
executor = Executor()
loop.loop.call_soon_threadsafe(loop.loop.set_default_executor, executor)
folder = sys.argv[3]
with api.serve(sys.argv[2], model='n', coordinator=coordinator) as source:
    with api.pull('m', coordinator=coordinator, attach=False, out=folder + '/of-peers') as pull:
        pull.wait()
with api.pull('n', path=sys.argv[2], out=folder + '/of-disk') as pull:
    pull.wait()
runtime.release(loop)
"""
    assert ran(code, served, str(checkpoint), str(tmp_path)) == (0, "", "")


def test_an_exit_waits_for_a_loop_that_is_stopping() -> None:
    """A daemon thread that still runs when the interpreter ends is cut off in gRPC's code."""
    script = """
import asyncio, threading
from mx import runtime

def ended():
    print([each.name for each in threading.enumerate() if each.name == "mx-loop"])

atexit.unregister(runtime._stop_at_exit)
atexit.register(ended)
atexit.register(runtime._stop_at_exit)

async def lingering():
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(1)

loop = runtime.acquire()
loop.submit(lingering())
runtime.release(loop)
while runtime._current is not None:
    time.sleep(0.01)
"""
    assert ran(script, "no coordinator") == (0, "[]\n", "")


def test_an_exit_waits_for_work_that_nothing_awaits_any_more() -> None:
    """A thread in torch's code, where the interpreter ends beneath it, aborts the process."""
    script = """
import asyncio, threading
from mx import runtime

began = threading.Event()

def work():
    began.set()
    time.sleep(1)
    print("over")

loop = runtime.acquire()
waiting = loop.submit(runtime.in_thread(work))
began.wait()
waiting.cancel()
runtime.release(loop)
"""
    assert ran(script, "no coordinator") == (0, "over\n", "")


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="there no thread can start any more"
)
def test_a_thread_that_outlives_the_main_one_uses_all_of_mx(
    served: str, checkpoint: Path, tmp_path: Path
) -> None:
    code = """
import threading, numpy
def work():
    threading.main_thread().join()
    with api.pull('m', coordinator=coordinator, attach=False) as pull:
        pull.wait()
        with api.pull('m', coordinator=coordinator, attach=False, reuse=pull) as other:
            other.wait()
    with api.pull('m', coordinator=coordinator, out=sys.argv[3] + '/out') as pull:
        pull.wait()
    with api.pull('m', path=sys.argv[2]) as pull:
        pull.wait()
    with api.serve(sys.argv[2], model='n', coordinator=coordinator):
        pass
    lent = {'a': numpy.zeros(1 << 20, numpy.uint8)}
    with api.serve(lent, model='other', coordinator=coordinator, copy=False) as source:
        with source.changing():
            lent['a'] += 1
        assert not source.withdrawn
    print('over')
threading.Thread(target=work).start()
"""
    assert ran(code, served, str(checkpoint), str(tmp_path)) == (0, "over\n", "")


def test_a_channel_may_be_made_while_the_interpreter_ends() -> None:
    """A pull that has just begun dials then. No thread can start any more, gRPC's poller neither:
    where it did not run yet, the process died of SIGSEGV on Python 3.12."""
    script = """
from mx import runtime
from mx.wire.channel import dial

async def dialled():
    await dial("127.0.0.1:9").close()

loop = runtime.acquire()
atexit.register(lambda: loop.submit(dialled()).result(10))
"""
    assert ran(script, "no coordinator") == (0, "", "")


def test_an_exit_waits_for_a_loop_that_an_interruption_found_starting() -> None:
    script = """
import asyncio, threading
from mx import runtime

make = asyncio.new_event_loop
def made():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    return make()
asyncio.new_event_loop = made

def ended():
    print([each.name for each in threading.enumerate() if each.name == "mx-loop"])

atexit.unregister(runtime._stop_at_exit)
atexit.register(ended)
atexit.register(runtime._stop_at_exit)
try:
    runtime.acquire()
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert ran(script, "no coordinator") == (7, "[]\n", "")


def test_an_exit_does_not_wait_for_a_loop_that_never_started() -> None:
    script = """
import threading
from mx import runtime

start = threading.Thread.start
def interrupted(thread):
    raise KeyboardInterrupt
threading.Thread.start = interrupted
try:
    runtime.acquire()
except KeyboardInterrupt:
    threading.Thread.start = start
    before_s = time.monotonic()
    atexit.unregister(runtime._stop_at_exit)
    runtime._stop_at_exit()
    print(time.monotonic() - before_s < runtime._STOP_TIMEOUT_S / 2)
"""
    assert ran(script, "no coordinator") == (0, "True\n", "")
