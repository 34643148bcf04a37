"""The system's rdma-core, which changes what UCX loads: whether it is here, and how to hide it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libefa.so.1")
FOLDERS = (
    *sorted(Path("/usr/lib").glob("*-linux-gnu")),
    *(Path(name) for name in ("/usr/lib64", "/usr/lib", "/usr/local/lib")),
)
MISSING = "rdma-core is not installed: apt-get install libibverbs1 librdmacm1 ibverbs-providers"
#: Hides what its arguments name, up to "--", from the command after that. `/dev/null` in the place
#: of a library is one that cannot be loaded.
_HIDE = """
while [ "$1" != -- ]; do mount --bind /dev/null "$1" || exit 99; shift; done
shift
exec "$@"
"""


@functools.cache
def found() -> tuple[Path, ...]:
    """Return the files of the libraries that are installed, where the linker looks by default."""
    paths = (folder / name for folder in FOLDERS for name in LIBRARIES)
    return tuple({path.resolve(): None for path in paths if path.is_file()})


def installed() -> bool:
    """Return True where UCX's modules bring the system's rdma-core into a process."""
    return {"libibverbs", "libefa"} <= {path.name.partition(".")[0] for path in found()}


@functools.cache
def can_hide() -> bool:
    """Return True where a mount namespace can be made, for which it takes root."""
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    done = subprocess.run(hidden_from(["true"]), capture_output=True, check=False)
    return done.returncode == 0


def hidden_from(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` as on a machine without rdma-core.

    The libraries are hidden in a mount namespace of that process's own, so that no other process
    is changed.
    """
    hide = ["unshare", "--mount", "sh", "-c", _HIDE, "sh"]
    return [*hide, *map(str, found()), "--", *command]
