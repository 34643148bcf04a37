"""Python programs over the stand-in, for each major of CUDA that this machine has packages of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping

import pytest

from tests.support import forkserver
from tests.support.driver.build import MAJORS, environment, why_not

#: A program of several pulls takes some seconds, and many times as long on a machine that does
#: other work.
_PATIENCE_S = 270


def _majors(older: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """What differs between the majors is the bindings: the quick tests take the newer ones."""

    def marks(major: int) -> list[pytest.MarkDecorator]:
        absent = pytest.mark.skipif(bool(why_not(major)), reason=why_not(major))
        more = [older] if major != MAJORS[-1] else []
        return [absent, pytest.mark.timeout(_PATIENCE_S + 30), *more]

    return pytest.mark.parametrize(
        "major", [pytest.param(each, marks=marks(each), id=f"cuda{each}") for each in MAJORS]
    )


#: Runs a test for each major; skipped with the reason where the stand-in can't be built.
each_major = _majors(pytest.mark.long)
#: The same for tests of whole pulls, far from the bindings: with the older ones they are for
#: `make test-gpu-standin` alone.
each_major_at_leisure = _majors(pytest.mark.slow)
#: Leads a process group; one that has executed itself again does so already.
_LEADS = "if os.getpgrp() != os.getpid(): os.setsid()\n"
_PRELUDE = "import os, sys, threading, time\nfrom tests.support.driver.calling import *\n"


def finish(major: int, code: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Args:
        major: The major version of CUDA.
        code: The program, which has all names of `calling`.
        **settings: Settings of the stand-in.

    Returns:
        How it ended.
    """
    process = _started(major, _PRELUDE + _LEADS + code, settings, errors=True)
    with process:
        try:
            out, err = process.communicate(timeout=_PATIENCE_S)
        except BaseException:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes that it started, too
            raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(["python"], process.returncode, out, err)


def _started(
    major: int, code: str, settings: Mapping[str, object], *, errors: bool
) -> forkserver.Forked | subprocess.Popen[str]:
    """Start a program as a fork of a process that has imported the bindings, and used none."""
    env = environment(major, settings)
    if "mx.graphs" in code:  # which starts its process again, for addresses that are the same
        env["PYTHONHASHSEED"] = "random"  # as without: an interpreter of its own
    return forkserver.python(code, env=env, imported=f"cuda{major}", errors=errors)


def forked(majors: Iterable[int]) -> contextlib.ExitStack:
    """Have programs over the stand-ins of these majors be forks; until the result is closed."""
    servers = contextlib.ExitStack()
    for major in majors:
        if not why_not(major):
            servers.enter_context(forkserver.running(environment(major), f"cuda{major}"))
    return servers


def passes(major: int, code: str, **settings: object) -> list[str]:
    """Run a program that has to succeed, and return the lines of its output.

    Args:
        major: The major version of CUDA.
        code: The program.
        **settings: Settings of the stand-in.

    Returns:
        The lines.

    Raises:
        AssertionError: It failed; the message is its stderr.
    """
    ended = finish(major, code, **settings)
    assert ended.returncode == 0, f"ended with {ended.returncode}: {ended.stderr}"
    return ended.stdout.splitlines()


class Program:
    """A program that answers: `ask` sends a line to its input and returns one of its output."""

    def __init__(self, process: forkserver.Forked | subprocess.Popen[str]) -> None:
        self.process = process

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program ended; its stderr says why"
        return line.strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def program(major: int, code: str, **settings: object) -> Iterator[Program]:
    """Run a program for the length of the block.

    Args:
        major: The major version of CUDA.
        code: The program.
        **settings: Settings of the stand-in.
    """
    unbuffered = "sys.stdout.reconfigure(line_buffering=True)\n"
    process = _started(major, _PRELUDE + unbuffered + code, settings, errors=False)
    with process:
        try:
            yield Program(process)
        finally:
            process.kill()
