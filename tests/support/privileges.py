"""Code that runs as another user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user at hand")


def as_nobody(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that runs code as nobody; its output is piped."""
    # Python itself may be where only root can read: it is loaded first.
    become = (
        "import os, shutil, sys\nos.chdir('/')\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", become + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


def done(child: subprocess.Popen[str]) -> str:
    """Wait for the process, and return what it printed."""
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return out
