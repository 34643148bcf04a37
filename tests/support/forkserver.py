"""Starts our commands as forks of a process that has imported what they import.

Most of the tests' time went into imports: half a second of a core for each of some thousand
processes. What is inherited is imported modules alone: the server has one thread, has run nothing
of mx, and is the parent of processes as real as any (their exit included). What an interpreter
reads as it starts (`PYTHON*`, `LD_*` ...) can't be given to a fork; such commands, and those of
another user, start an interpreter of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: Variables that count when an interpreter or a library starts; and when transformers is imported.
_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GRPC_")
_AT_IMPORT = {"transformers": ("HF_", "OMP_")}
#: What most commands import, before or while they run; what code imports that uses torch, and what
#: engines do; and what is imported before transformers is patched.
_AUTO = (
    "configuration", "feature_extraction", "image_processing", "modeling", "processing",
    "tokenization", "video_processing",
)  # fmt: skip
_IMPORTED = {
    "commands": (
        "mx.fleet.bundles",
        "mx.operations.observe",
        "mx.api.planning",
        "mx.api.pulling",
        "mx.fleet.router",
        "mx.api.serving",
        "mx.api.survey",
        "mx.artifacts.verbs",
        "mx.cli.listing",
        "mx.cli.plan",
        "mx.fetching.connections",
        "mx.fetching.ranks",
        "mx.fetching.whole",
        "mx.cli.app",
        "mx.cli.coordinator",
        "mx.cli.pull",
        "mx.cli.serve",
        "mx.coordinator.daemon",
    ),
    "torch": ("mx.api.pulling", "mx.api.serving", "torch", "safetensors.torch"),
    "engines": (
        "mx.api.pulling",
        "mx.api.serving",
        "mx.engines.replica.run",
        "mx.engines.vllm.worker",
        "safetensors.torch",
    ),
    # Of each major of CUDA, whose packages and libraries the environment names.
    **dict.fromkeys(
        ("cuda12", "cuda13"),
        (
            "mx.api.pulling",
            "mx.api.serving",
            "mx.memory.device",
            "mx_transports.cuda_ipc",
            "mx_transports.tcp",
            "mx_transports.shm",
            "tests.support.driver.arrays",
        ),
    ),
    "transformers": (
        "mx.api.pulling",
        "mx.api.serving",
        "safetensors.torch",
        "transformers.modeling_utils",
        "mx.engines.transformers.patched",
        *(f"transformers.models.auto.{each}_auto" for each in _AUTO),
    ),
}
_MAX_REQUEST = 1 << 17
_CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWUSER = 0x40000000, 0x00020000, 0x10000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 14, 1 << 19, 2
_TICK_S = 0.01
#: In place of a network namespace's name: a namespace of users.
OWN_USERS = "/users"


class Forked:
    """A process of the server's, used as a `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, stdout: IO[Any], stderr: IO[Any] | None) -> None:
        self.pid = pid
        self.stdout, self.stderr = stdout, stderr
        self.stdin: IO[str] | None = None
        self.returncode: int | None = None
        self._status = status  # a pipe, on which the server says how it has ended

    def poll(self) -> int | None:
        """Return how the process has ended, as `Popen.poll`; None if it still runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._status, 16)
                os.close(self._status)
                # The server is gone, and its processes with it.
                self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, as `Popen.wait`."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and timeout is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_TICK_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def communicate(self, given: str = "", timeout: float | None = None) -> tuple[Any, Any]:
        """Write to standard input, close it, and read the others to their ends, as
        `Popen.communicate`."""
        said: dict[str, Any] = {"stderr": None}

        def read(name: str, pipe: IO[Any]) -> None:
            said[name] = pipe.read()

        if self.stdin is not None:
            self.stdin.write(given)
            self.stdin.close()
        pipes = [("stdout", self.stdout), *([("stderr", self.stderr)] if self.stderr else [])]
        readers = [threading.Thread(target=read, args=each) for each in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said["stdout"], said["stderr"]

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """A server of this process. `close` it: its processes end with it."""

    def __init__(self, env: Mapping[str, str], imported: str) -> None:
        """
        Args:
            env: The environment in which it imports.
            imported: A name in `_IMPORTED`.
        """
        self._counting = (*_AT_START, *_AT_IMPORT.get(imported, ()))
        self._env = self._at_start(env)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = f"{theirs.fileno()}, {imported!r}"
        code = f"from tests.support import forkserver; forkserver.main({arguments})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would be missing in forks
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as its processes have it: it decides how they buffer
        )
        theirs.close()
        self.pid = self._process.pid
        assert self._control.recv(16) == b"ready"

    def can(self, env: Mapping[str, str]) -> bool:
        """Return True if a fork is what a new interpreter would be in this environment."""
        return self._at_start(env) == self._env

    def _at_start(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if name.startswith(self._counting)}

    def start(
        self,
        code: str,
        entry: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        namespace: str = "",
    ) -> Forked:
        """Run code, and `mx.cli.<entry>()` if there is an entry, with these arguments, standard
        output and error in pipes; in a namespace if one is named (`_enter`)."""
        out, err = os.pipe(), os.pipe()
        what = {"code": code, "entry": entry, "namespace": namespace}
        pid, status = self._start(what, arguments, env, (out[1], err[1]))
        return Forked(pid, status, open(out[0], "rb"), open(err[0], "rb"))

    def run(
        self, code: str, arguments: Sequence[str], env: Mapping[str, str], errors: bool
    ) -> Forked:
        """Run code as `python -c`, standard input and output (and error) in pipes of text."""
        given, out, err = os.pipe(), os.pipe(), os.pipe() if errors else (-1, os.dup(2))
        passed = (out[1], err[1], given[0])
        pid, status = self._start({"code": code}, arguments, env, passed)
        said = os.fdopen(err[0], encoding="utf-8") if errors else None
        forked = Forked(pid, status, os.fdopen(out[0], encoding="utf-8"), said)
        forked.stdin = os.fdopen(given[1], "w", encoding="utf-8")
        return forked

    def _start(
        self,
        what: dict[str, str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        streams: Sequence[int],
    ) -> tuple[int, int]:
        """Start a process, whose standard output, error (and input) these are; they are closed.
        Returns its id, and a pipe on which the server says how it has ended."""
        request = {**what, "arguments": arguments, "env": dict(env), "cwd": os.getcwd()}
        status = os.pipe()
        os.set_blocking(status[0], False)
        passed = [status[1], *streams]
        socket.send_fds(self._control, [json.dumps(request).encode()], passed)
        for descriptor in passed:
            os.close(descriptor)
        return int(self._control.recv(16)), status[0]

    def close(self) -> None:
        """End the server and its processes."""
        self._control.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


_servers: dict[str, ForkServer] = {}


@contextlib.contextmanager
def running(env: Mapping[str, str], imported: str = "commands") -> Iterator[None]:
    """Run a server for the commands of this process, or for code that imports torch, unless there
    is one."""
    if imported in _servers:
        yield
        return
    _servers[imported] = server = ForkServer(env, imported)
    try:
        yield
    finally:
        del _servers[imported]
        server.close()


def started(
    entry: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    change: str = "",
    namespace: str = "",
) -> Forked | None:
    """Start one of our commands, once the code `change` has run, which sees all of mx imported; in
    a namespace if one is named (`_enter`). None if only a new interpreter will do."""
    server = _servers.get("commands")
    if server is None or not server.can(env):
        return None
    return server.start(change, entry, arguments, env, namespace)


def coded(
    code: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    imported: str = "commands",
    namespace: str = "",
) -> Forked | None:
    """Start code as `started` starts a command, where a server runs that has imported this."""
    server = _servers.get(imported)
    if server is None or not server.can(env):
        return None
    return server.start(code, "", arguments, env, namespace)


def python(
    code: str,
    *arguments: str,
    env: Mapping[str, str],
    imported: str = "commands",
    errors: bool = False,
) -> Forked | subprocess.Popen[str]:
    """Run code as `python -c`, standard input and output in pipes of text, with `errors` standard
    error too: as a fork, where a server runs that has imported what is named."""
    server = _servers.get(imported)
    if server is not None and server.can(env):
        return server.run(code, arguments, env, errors)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors else None,
        text=True,
        env=dict(env),
    )


def server_pids() -> list[int]:
    """The processes whose children are those of this one."""
    return [server.pid for server in _servers.values()]


# -- the server -----------------------------------------------------------------------------------


def main(descriptor: int, imported: str) -> None:
    """Serve requests until the other side is gone. In a forked process: run the command."""
    from mx import config

    config.quieten_grpc()  # as commands do, before they import it
    with contextlib.suppress(ImportError):  # typer imports it for the first parameter
        importlib.import_module("typer._adapters")
    for module in _IMPORTED[imported]:
        importlib.import_module(module)
    if imported.startswith("cuda"):
        _read_triton()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.collect()
    gc.freeze()  # so that no collection of a fork writes to it, and copies all
    control = socket.socket(fileno=descriptor)
    control.send(b"ready")
    request = _serve(control)
    if request:
        code = compile(request["code"], "<string>", "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})
        if request.get("entry"):
            from mx import cli

            getattr(cli, request["entry"])()


def _read_triton() -> None:
    """Import Triton, and have it hash its own files, which it does before it compiles anything."""
    with contextlib.suppress(ImportError):
        importlib.import_module("mx.cuda.blake3_kernel")
        importlib.import_module("triton.runtime.cache").triton_key()


def _serve(control: socket.socket) -> dict[str, Any]:
    """Returns what a process of its own is to do; nothing at the end, in the server."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}  # pidfd: (pid, status pipe)
    while True:
        for key, _ in selector.select():
            if key.fd in running:
                pid, status = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, code = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(status)
                continue
            text, passed, _, _ = socket.recv_fds(control, _MAX_REQUEST, 4)
            if not text:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return {}
            if not (pid := os.fork()):
                selector.close()
                control.close()
                for pidfd, (_, status) in running.items():
                    os.close(pidfd)
                    os.close(status)
                os.close(passed.pop(0))
                return _become(json.loads(text), passed)
            control.send(str(pid).encode())
            for descriptor in passed[1:]:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, passed[0])
            selector.register(pidfd, selectors.EVENT_READ)


def _become(request: dict[str, Any], streams: Sequence[int]) -> dict[str, Any]:
    """Make this process what the request asks for, and return it."""
    for number, descriptor in zip((1, 2, 0), streams, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.get("namespace"):
        _enter(request["namespace"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # an import may have asked for it
    sys.argv = ["-c", *request["arguments"]]
    return request


def _enter(namespace: str) -> None:
    """Do what `ip netns exec` does before it executes a command; or, for `OWN_USERS`, what
    `unshare --user --map-root-user` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: bytes | int | None) -> None:
        given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
        if getattr(libc, name)(*given):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    if namespace == OWN_USERS:
        ids = {
            "setgroups": "deny",
            "uid_map": f"0 {os.geteuid()} 1",
            "gid_map": f"0 {os.getegid()} 1",
        }
        call("unshare", _CLONE_NEWUSER)
        for name, said in ids.items():
            Path(f"/proc/self/{name}").write_text(said)
        return
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)  # with its devices alone
