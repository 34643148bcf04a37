"""Checks of this host: versions, limits, memory, the kernel, the clock, keys.

Each check yields findings, and reads only files, limits and the clock. None starts CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from mx import keyfile
from mx.api.caching import cached
from mx.api.doctor.findings import Finding, Level, Subject
from mx.errors import ConfigError, MxError
from mx.memory.budget import available_nbytes
from mx.units import GIB, count, format_bytes
from mx.wire.descriptors import MOST_DESCRIPTORS

#: The versions of Python that mx is tested with.
_PYTHONS = ((3, 11), (3, 12), (3, 13))
#: Releases of grpcio with known faults; pyproject.toml excludes the same.
GRPC_FAULTS = {
    (1, 83): "a closed connection stays open until garbage is collected",
    (1, 84): "whatever listens on a peer's port can abort this process",
    (1, 85): "whatever listens on a peer's port can abort this process",
}
_GRPC_LEAST = (1, 71)
#: What an extra brings, by a module of it.
_EXTRAS = {
    "torch": "torch",
    "transformers": "transformers",
    "redis": "redis",
    "metrics": "prometheus_client",
    "web": "starlette",
    "hub": "huggingface_hub",
    "objects": "obstore",
}
#: Fewer descriptors than these are soon used up: each connection takes one.
_FEW_DESCRIPTORS = 4096
#: Linux has MADV_COLLAPSE from here on; and memfd, pidfd and their like from there.
_COLLAPSE, _PIDFD = (6, 1), (5, 3)
_CAP_SYS_PTRACE = 19
#: Of adjtimex(2): the size of its structure, the place of its status, and "not synchronised".
_TIMEX_BYTES, _STATUS_AT, _STA_UNSYNC = 208, 40, 0x40


def _pair(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros for what is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def python(subject: Subject) -> Iterator[Finding]:
    """Python and grpc: tested versions, and those with known faults."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        yield Finding(Level.OK, f"Python {version}")
    else:
        yield Finding(
            Level.WARNING,
            f"Python {version} is not one that mx is tested with",
            "use Python 3.11, 3.12 or 3.13",
        )
    grpc = importlib.metadata.version("grpcio")
    yield grpc_finding(grpc)


def grpc_finding(version: str) -> Finding:
    """Return what there is to say of a release of grpcio."""
    pair = _pair(version)
    fix = "pip install 'grpcio>=1.71.2,!=1.83.*,!=1.84.*,!=1.85.*'"
    if pair in GRPC_FAULTS:
        return Finding(Level.FAILURE, f"grpcio {version} has a fault: {GRPC_FAULTS[pair]}", fix)
    if pair < _GRPC_LEAST:
        return Finding(Level.FAILURE, f"grpcio {version} is too old", fix)
    return Finding(Level.OK, f"grpcio {version}")


def extras(subject: Subject) -> Iterator[Finding]:
    """The optional packages."""
    there = [name for name, module in _EXTRAS.items() if importlib.util.find_spec(module)]
    absent = [name for name in _EXTRAS if name not in there]
    if there:
        yield Finding(Level.OK, f"installed extras: {', '.join(there)}")
    if absent:
        yield Finding(
            Level.NOTE,
            f"extras that are not installed: {', '.join(absent)}",
            f"what needs one says so; pip install 'mx-peer[{absent[0]}]'",
        )


def kernel(subject: Subject) -> Iterator[Finding]:
    """The kernel's features."""
    release = subject.text("proc/sys/kernel/osrelease") or os.uname().release
    version = _pair(release)
    if version < _PIDFD:
        yield Finding(
            Level.FAILURE,
            f"Linux {release} has no pidfd_open: processes of one host share no memory",
            "use Linux 5.3 or later, 6.1 is better",
        )
    elif version < _COLLAPSE:
        yield Finding(
            Level.NOTE,
            f"Linux {release} puts no filled memory into huge pages (MADV_COLLAPSE): who attaches "
            "to a model pays a fault for each 64 KiB at first touch",
            "Linux 6.1 or later does",
        )
    else:
        yield Finding(Level.OK, f"Linux {release}: memfd, pidfd, huge pages on request")
    if "tls" not in subject.text("proc/sys/net/ipv4/tcp_available_ulp").split():
        yield Finding(
            Level.NOTE,
            "the kernel does no TLS of its own here (module tls): encrypted weights take this "
            "process's CPU",
            "nothing in mx needs it",
        )


def descriptors(subject: Subject) -> Iterator[Finding]:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield descriptors_finding(soft, hard)


def descriptors_finding(soft: int, hard: int) -> Finding:
    """Return what there is to say of the limits of open files; -1 is none."""
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if most < _FEW_DESCRIPTORS:
        return Finding(
            Level.WARNING,
            f"a process may open {most} files: a coordinator or a source has room for about as "
            "many connections, and one that is full ends the idle ones",
            "raise the hard limit: LimitNOFILE=32768 (systemd), the ulimit nofile of a container, "
            "/etc/security/limits.conf",
        )
    own = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    return Finding(Level.OK, f"open files: {own}, which mx's commands raise to {most}")


def memory(subject: Subject) -> Iterator[Finding]:
    """Free memory, huge pages, /dev/shm."""
    free = available_nbytes(subject.root / "proc", subject.root)
    if free < GIB:
        yield Finding(
            Level.WARNING,
            f"{format_bytes(free)} of memory are free, for this machine or this container",
            "a source and a pull hold the whole model: raise the container's limit, or free some",
        )
    else:
        yield Finding(Level.OK, f"{format_bytes(free)} of memory are free for models")
    try:
        found = os.statvfs(subject.root / "dev/shm")
        size = found.f_blocks * found.f_frsize
    except OSError:
        size = 0
    if size < GIB:
        yield Finding(
            Level.NOTE,
            f"/dev/shm has {format_bytes(size)}: mx does not use it, but engines' worker processes "
            "do",
            "give a container more (shm_size; in Kubernetes an emptyDir of Memory at /dev/shm)",
        )


def processes(subject: Subject) -> Iterator[Finding]:
    """Whether a process may read another one's memory, for lent weights."""
    scope = subject.text("proc/sys/kernel/yama/ptrace_scope")
    status = re.search(r"CapEff:\s*([0-9a-f]+)", subject.text("proc/self/status"))
    may_all = bool(status and int(status[1], 16) >> _CAP_SYS_PTRACE & 1)
    if scope in ("", "0") or (may_all and scope != "3"):
        yield Finding(
            Level.OK, "processes of one user may read each other's memory, as far as Yama goes"
        )
        return
    yield Finding(
        Level.WARNING,
        f"kernel.yama.ptrace_scope is {scope}: pulls attach to sealed memory of this host, but "
        "can't copy what a process lends; they use tcp for it",
        "sysctl kernel.yama.ptrace_scope=0"
        if scope != "3"
        else "a scope of 3 lasts until the next boot: boot with another",
    )


def clock(subject: Subject) -> Iterator[Finding]:
    """Whether the clock is kept right. Only certificates depend on it."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        yield Finding(Level.NOTE, "the kernel does not say whether the clock is synchronised")
        return
    status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder)
    yield clock_finding(status, tls=subject.tls is not None)


def clock_finding(status: int, *, tls: bool) -> Finding:
    """Return what there is to say of adjtimex's status."""
    if not status & _STA_UNSYNC:
        return Finding(Level.OK, "the clock is synchronised")
    return Finding(
        Level.WARNING if tls else Level.NOTE,
        "the clock is not synchronised: leases do not use it, but certificates are refused where "
        "it is wrong",
        "run chrony or systemd-timesyncd (on the host, for a container)",
    )


def keys(subject: Subject) -> Iterator[Finding]:
    """The name key, by which this user owns names."""
    path = subject.settings.name_key
    if not path:
        yield Finding(
            Level.WARNING,
            "there is no home folder to keep a name key in: no other process, and none after a "
            "restart, can update the names that this one binds",
            "set `name_key` to a file, or XDG_STATE_HOME to a folder that lasts",
        )
        return
    try:
        keyfile.read(Path(path))
    except FileNotFoundError:
        folder = next(each for each in Path(path).absolute().parents if each.exists())
        if os.access(folder, os.W_OK | os.X_OK):
            yield Finding(Level.OK, f"the name key {path} is made at first use")
        else:
            yield Finding(
                Level.WARNING,
                f"the name key {path} can't be made: {folder} is not writable for this user",
                "set `name_key` to a file in a folder that lasts, or mount one there",
            )
    except ConfigError as error:
        yield Finding(Level.FAILURE, error.message, error.hint)
    except OSError as error:
        yield Finding(Level.FAILURE, f"the name key {path} can't be read: {error.strerror}")
    else:
        yield Finding(Level.OK, f"the name key {path} can be used")


def cache(subject: Subject) -> Iterator[Finding]:
    """This host's cache."""
    where = subject.settings.cache_socket
    if where == "off":
        yield Finding(Level.NOTE, "no cache is asked: `cache_socket=off`")
        return
    try:
        found = cached(settings=subject.settings)
    except MxError as error:
        yield Finding(Level.WARNING, f"the cache does not answer: {error.message}", error.hint)
        return
    if found is None:
        yield Finding(
            Level.NOTE,
            "no cache runs for this user on this host: each pull takes memory of its own",
            "`mx serve` with `cache` starts one",
        )
    else:
        used = f"{format_bytes(found.held_bytes)} of {format_bytes(found.budget_bytes)}"
        yield Finding(Level.OK, f"a cache runs: {count(len(found.models), 'model')}, {used}")
