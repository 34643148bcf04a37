"""Real child processes for tests: Python code, and a coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.support import forkserver

ROOT = Path(__file__).resolve().parents[2]

_DAEMON = """
import sys
from mx.coordinator.daemon import CoordinatorOptions, run
from mx.transport import TlsFiles
listen, lease_s, *tls = sys.argv[1:]
files = TlsFiles(*tls) if tls else None
options = CoordinatorOptions(listen=listen, lease_s=float(lease_s), tls=files)
sys.exit(run(options))
"""


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a child that runs `code` with this repository on its path; its stderr is piped."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'transports'}"}


def mx(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of our commands to its end."""
    code = "from mx.cli import main; main()"
    with forkserver.python(code, *arguments, env=_environment(), errors=True) as process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.wait(), out, err)


Child = subprocess.Popen[str] | forkserver.Forked
ChildT = TypeVar("ChildT", bound=Child)


@contextmanager
def ended(process: ChildT) -> Iterator[ChildT]:
    """Yield the child; kill and reap it afterwards."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def daemon(
    listen: str = "127.0.0.1:0", *, lease_s: float = 15.0, tls: tuple[str, ...] = ()
) -> Iterator[tuple[Child, str]]:
    """Yield a coordinator daemon and the address that it says it listens on. Leases outlast an
    import that keeps a source in this process from its heartbeats."""
    given = (listen, str(lease_s), *tls)
    child = forkserver.python(_DAEMON, *given, env=_environment(), errors=True)
    with ended(child) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("mx-coordinator listening on "), line + process.stderr.read()
        yield process, line.split()[-1]


def terminate(process: Child) -> int:
    """Send SIGTERM and return the exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(60)
