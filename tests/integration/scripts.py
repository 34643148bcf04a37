"""Python scripts that embed mx, in processes of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import forkserver
from tests.support.commands import environment

#: What the scripts begin with: `coordinator` is the first of their arguments.
HEADER = """
import atexit, os, signal, sys, time
from mx import api
from mx.errors import *
coordinator = sys.argv[1]
"""
TIMEOUT_S = 120.0


@contextmanager
def script(
    code: str, *arguments: str, imported: str = ""
) -> Iterator[forkserver.Forked | subprocess.Popen[str]]:
    """A process that runs the code, its standard streams piped; killed in the end. It is a fork
    where it names what is `imported`."""
    process = forkserver.python(
        HEADER + code, *arguments, env=environment(), imported=imported, errors=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ran(code: str, *arguments: str, imported: str = "") -> tuple[int, str, str]:
    """Run the code to its end: exit code, standard output, standard error."""
    with script(code, *arguments, imported=imported) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.wait(), out, err
