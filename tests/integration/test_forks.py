"""Processes that fork while they pull and serve, before they do, and after."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mx import api
from tests.integration.scripts import ran, script
from tests.support.commands import Run, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

#: Pulls and serves in each way that has descriptors and threads of its own.
OPEN = """
checkpoint, folder = sys.argv[2:4]
serving = api.serve(checkpoint, model='n', coordinator=coordinator)
done = api.pull('m', coordinator=coordinator, attach=False)
done.wait()
held = api.pull('m', coordinator=coordinator, hold=True)
holding = held.hold()
slow = {how: api.pull('slow', coordinator=coordinator, attach=False, transport=how,
                      out=folder + '/' + how) for how in ('tcp', 'shm')}
for pull in slow.values():
    next(pull.layers())
"""

CHILD = """
def inherited():
    signal.alarm(60)  # a child that hangs is killed
    refused = [
        lambda: api.pull('m', coordinator=coordinator),
        lambda: api.serve(checkpoint, model='new', coordinator=coordinator),
        lambda: api.plan('m', coordinator=coordinator),
        lambda: api.list_models(coordinator=coordinator),
        lambda: serving.update(checkpoint),
        lambda: serving.drain(),
        lambda: held.hold(),
        lambda: done.wait(),
        lambda: done.buffer(),
        lambda: slow['tcp'].wait(),
        lambda: slow['tcp'].progress(),
        lambda: slow['tcp'].wait_manifest(),
        lambda: slow['tcp'].files(),
        lambda: done.files(),
        lambda: next(slow['shm'].layers()),
    ]
    for number, call in enumerate(refused):
        try:
            call()
        except ForkError as error:
            assert 'spawn' in error.hint
        else:
            raise AssertionError(f'call {number} was not refused')
    with slow['tcp'], serving, done:
        pass
    for each in (*slow.values(), serving, done, held, holding):
        each.close()
"""


@pytest.mark.parametrize("end", ["sys.exit(5)", "os._exit(5)", "multiprocessing"])
def test_a_forked_child_is_refused_and_its_parent_undisturbed(
    served: str, checkpoint: Path, tmp_path: Path, end: str
) -> None:
    fork = f"""
pid = os.fork()
if not pid:
    inherited()
    {end}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    if end == "multiprocessing":
        fork = """
import multiprocessing
def main():
    inherited()
    sys.exit(5)
child = multiprocessing.get_context('fork').Process(target=main)
child.start()
child.join()
print(child.exitcode)
"""
    after = """
before = {how: pull.progress().bytes_done for how, pull in slow.items()}
deadline = time.monotonic() + 60
while any(pull.progress().bytes_done <= before[how] for how, pull in slow.items()):
    assert time.monotonic() < deadline
    time.sleep(0.05)
for model in 'm', 'n':
    with api.pull(model, coordinator=coordinator, attach=False) as pull:
        print(pull.wait().layers)
for each in (*slow.values(), done, held, holding, serving):
    each.close()
"""
    code, out, err = ran(OPEN + CHILD + fork + after, served, str(checkpoint), str(tmp_path))
    assert (code, out.split()) == (0, ["5", "10", "10"]), err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


#: Each writes its line at once: of an unbuffered print the end of the line is a write of its own.
STAYING_CHILD = """
child = os.fork()
if not child:
    signal.alarm(120)
    os.write(1, b'forked\\n')
    while True:
        signal.pause()
os.write(1, f'{child} {serving.endpoint}\\n'.encode())
signal.pause()
"""


def shared_things_of(pid: int) -> list[str]:
    """The memory files, the parts of an output, and the sockets with a name or a peer that a
    process holds."""
    named = set()
    for table, column in (("tcp", 9), ("tcp6", 9)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            named.add(line.split()[column])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7:  # it has a name
            named.add(fields[6])
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = os.readlink(f"/proc/{pid}/fd/{name}")
        inode = link.removeprefix("socket:[").removesuffix("]")
        if "memfd:" in link or "mx-partial" in link or inode in named:
            found.append(link)
    return found


def test_a_child_that_outlives_its_parent_holds_nothing_of_it(
    run: Run, served: str, checkpoint: Path, tmp_path: Path
) -> None:
    with script(OPEN + STAYING_CHILD, served, str(checkpoint), str(tmp_path)) as parent:
        assert parent.stdout is not None
        said = sorted(parent.stdout.readline() for _ in range(2))
        number, endpoint = said[0].split()
        child = int(number)
        try:
            assert shared_things_of(parent.pid)
            assert shared_things_of(child) == []
            parent.kill()
            parent.wait()
            # The port is free: a connection there is refused at once.
            again = serve(run, checkpoint, "again", served, "--listen", endpoint)
            assert again.json()["endpoint"] == endpoint
            for how in ("tcp", "shm"):  # nor is the lock held
                with api.pull("m", coordinator=served, out=tmp_path / how) as pull:
                    pull.wait(60)
            Path(f"/proc/{child}/status").read_text()  # it was there all the time
        finally:
            subprocess.run(["kill", "-9", number], check=True)


def test_the_users_descriptors_are_the_childs_too(
    served: str, checkpoint: Path, tmp_path: Path
) -> None:
    code, out, err = ran(
        """
import socket
theirs = [*socket.socketpair(), socket.create_server(('127.0.0.1', 0)), open(sys.executable)]
theirs.append(socket.create_connection(theirs[2].getsockname()))
fds = [each.fileno() for each in theirs] + [os.memfd_create('mine')]
"""
        + OPEN
        + """
theirs.append(socket.create_connection(serving.endpoint.rsplit(':', 1)))
fds.append(theirs[-1].fileno())
before = [os.fstat(fd) for fd in fds]
pid = os.fork()
if not pid:
    os._exit(0 if all(map(os.path.samestat, before, map(os.fstat, fds))) else 9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        served,
        str(checkpoint),
        str(tmp_path),
    )
    assert (code, out) == (0, "0\n"), err


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_forked_before_the_first_use_or_after_the_last_may_use_mx(
    served: str, checkpoint: Path, when: str
) -> None:
    # What was closed is still referred to, as a variable of a module or a notebook does.
    use = """
kept = []
def use():
    with (api.serve(sys.argv[2], model='n', coordinator=coordinator) as source,
          api.pull('m', coordinator=coordinator, attach=False) as pull):
        kept.extend([source, pull])
        return pull.wait().layers
"""
    fork = f"""
{"print(use())" if when == "after" else ""}
pid = os.fork()
if not pid:
    signal.alarm(60)
    assert use() == 10
    sys.exit(6)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(use())
"""
    code, out, err = ran(use + fork, served, str(checkpoint))
    assert code == 0, err
    assert out.split() == ["10"] * (when == "after") + ["6", "10"], err


#: One thread forks while another, which holds forks off, needs a lock that a fork takes as well.
HELD_OFF = """
import faulthandler, os, sys, threading, time
import mx.forks
faulthandler.dump_traceback_later(60, exit=True)
forking, held = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)  # the last to register is the first to be called
def load():
    with mx.forks.no_fork:
        held.set()
        forking.wait()
        time.sleep(0.1)  # until the fork waits for `no_fork`
        import logging
        logging.getLogger("of a module that is loaded")
thread = threading.Thread(target=load)
thread.start()
held.wait()
pid = os.fork()
if not pid:
    import logging
    logging.getLogger("of the child")
    os._exit(5)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_waits_for_what_holds_it_off_without_a_deadlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD_OFF], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout, done.stderr) == ("5\n", "")


#: Forks beside threads that wait for work: `stays`, and the hook that ends them does not.
BESIDE_IDLE = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a thread
from mx import runtime, tasks
tasks._idle_s = 60.0
if sys.argv[1] == "stays":
    runtime.dismiss = lambda **_: None
worker = tasks.started(tasks.threading.current_thread).result(30)
while not tasks._idle:
    pass
pid = os.fork()
if not pid:
    os._exit(tasks.started(lambda: 5).result(30))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), worker.is_alive())
"""


@pytest.mark.parametrize("way", ["stays", "ends"])
def test_a_child_gives_no_work_to_a_thread_of_its_parent(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_IDLE, way],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"5 {way == 'stays'}\n", "")
