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
from fnmatch import fnmatch
from pathlib import Path

from mx import keyfile
from mx.errors import ConfigError, MxError, install_hint
from mx.fleet import cached
from mx.memory.budget import available_nbytes
from mx.operations.doctor.findings import ExaminedHost, Finding, failure, note, ok, warning
from mx.units import GIB, count, format_bytes
from mx.wire.descriptors import MOST_DESCRIPTORS

#: The versions of Python that mx is tested with.
_PYTHONS = ((3, 11), (3, 12), (3, 13))
#: Releases of grpcio with known faults; pyproject.toml excludes the same.
GRPC_FAULTS = {
    "1.83.0": "its servers take in messages of any size",
    "1.84.*": "whatever listens on a peer's port can abort this process",
    "1.85.*": "whatever listens on a peer's port can abort this process",
}
#: Servers of older ones take in messages of any size.
_LEAST_GRPC = (1, 82, 2)
_GRPC = "pip install 'grpcio>=1.82.2,!=1.83.0,!=1.84.*,!=1.85.*'"
#: What an extra brings, by a module of it, or several of which one is enough.
_EXTRAS = {"torch": "torch", "redis": "redis", "metrics": "prometheus_client", "web": "starlette"}
_EXTRAS |= {"transformers": "transformers", "hub": "huggingface_hub", "objects": "obstore"}
_EXTRAS |= {"cuda12": "nixl_cu12 nixl_cu13"}
#: Fewer descriptors than these are soon used up: each connection takes one.
_FEW_DESCRIPTORS = 4096
#: Linux has MADV_COLLAPSE from here on; and memfd, pidfd and their like from there.
_COLLAPSE, _PIDFD = (6, 1), (5, 3)
#: And shared maps of what is sealed against writing, which GPUs copy from.
_SHARED_SEALED = (6, 7)
_CAP_SYS_PTRACE = 19
#: Of adjtimex(2): the size of its structure, the place of its status, and "not synchronised".
_TIMEX_BYTES, _STATUS_AT, _STA_UNSYNC = 208, 40, 0x40


def _pair(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; zeros for what is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def python(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on Python, grpc and the optional packages."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        yield ok(f"Python {version}")
    else:
        yield warning(f"mx is not tested with Python {version}", "use Python 3.11, 3.12 or 3.13")
    yield grpc_finding(importlib.metadata.version("grpcio"))
    there = [n for n, known in _EXTRAS.items() if any(map(importlib.util.find_spec, known.split()))]
    absent = [name for name in _EXTRAS if name not in there]
    yield ok(f"installed extras: {', '.join(there) or 'none'}")
    if absent:
        what = f"extras that are not installed: {', '.join(absent)}"
        yield note(what, f"what needs one says so; {install_hint(absent[0])}")


def grpc_finding(version: str) -> Finding:
    """Return the finding on a release of grpcio."""
    for pattern, fault in GRPC_FAULTS.items():
        if fnmatch(version, pattern):
            return failure(f"grpcio {version} has a fault: {fault}", _GRPC)
    patch = re.match(r"\d+\.\d+\.(\d+)", version)
    if (*_pair(version), int(patch[1]) if patch else 0) < _LEAST_GRPC:
        return failure(f"grpcio {version} is old: its servers take in messages of any size", _GRPC)
    return ok(f"grpcio {version}")


def kernel(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on the kernel's features."""
    release = subject.text("proc/sys/kernel/osrelease") or os.uname().release
    if _pair(release) < _PIDFD:
        yield failure(
            f"Linux {release} has no pidfd_open: processes of one host share no memory",
            "use Linux 5.3 or later, 6.1 is better",
        )
    elif _pair(release) < _COLLAPSE:
        yield note(
            f"Linux {release} puts no filled memory into huge pages (MADV_COLLAPSE): who attaches "
            "to a model pays a fault for each 64 KiB at first touch",
            "Linux 6.1 or later does",
        )
    else:
        yield ok(f"Linux {release}: memfd, pidfd, huge pages on request")
    if "tls" not in subject.text("proc/sys/net/ipv4/tcp_available_ulp").split():
        yield note("the kernel does no TLS of its own here (module tls); mx does not need it")


def registering(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield what may keep a GPU from reaching host memory in place. CUDA is not asked."""
    release = subject.text("proc/sys/kernel/osrelease") or os.uname().release
    yield from registering_findings(release, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def registering_findings(release: str, most_nbytes: int) -> Iterator[Finding]:
    """Yield the findings on a kernel, and on how much memory a process may lock; -1 is no limit."""
    slots = "is copied by CPUs through slots"
    if _pair(release) < _SHARED_SEALED:
        yield note(
            f"Linux {release} maps no sealed memory for a GPU: what one pulls from here {slots}",
            "Linux 6.7 or later does",
        )
    if most_nbytes != resource.RLIM_INFINITY:
        yield note(
            f"this process may lock {format_bytes(most_nbytes)} of memory: if the driver heeds "
            f"that, what goes between it and a GPU {slots}; the log of a pull says so",
            "LimitMEMLOCK=infinity (systemd), or the ulimit memlock of a container",
        )


def descriptors(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the finding on the limit of open files."""
    yield descriptors_finding(*resource.getrlimit(resource.RLIMIT_NOFILE))


def descriptors_finding(soft: int, hard: int) -> Finding:
    """Return the finding on the limits of open files; -1 means no limit."""
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if most >= _FEW_DESCRIPTORS:
        own = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
        return ok(f"open files: {own}, which mx's commands raise to {most}")
    return warning(
        f"a process may open {most} files: a coordinator or a source has room for about as many "
        "connections, and one that is full ends the idle ones",
        "raise the hard limit: LimitNOFILE=32768 (systemd), the ulimit nofile of a container, "
        "/etc/security/limits.conf",
    )


def memory(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on free memory and /dev/shm."""
    free = available_nbytes(subject.root / "proc", subject.root)
    text = f"{format_bytes(free)} of memory are free for models"
    more = "a source and a pull hold the whole model: raise the container's limit, or free some"
    yield ok(text) if free >= GIB else warning(text, more)
    try:
        found = os.statvfs(subject.root / "dev/shm")
        size = found.f_blocks * found.f_frsize
    except OSError:
        size = 0
    if size < GIB:
        yield note(
            f"/dev/shm has {format_bytes(size)}: engines' worker processes use it, mx does not",
            "give a container more (shm_size; in Kubernetes an emptyDir of Memory at /dev/shm)",
        )


def processes(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield whether a process may read another one's memory, for lent weights."""
    scope = subject.text("proc/sys/kernel/yama/ptrace_scope")
    status = re.search(r"CapEff:\s*([0-9a-f]+)", subject.text("proc/self/status"))
    may_all = bool(status and int(status[1], 16) >> _CAP_SYS_PTRACE & 1)
    if scope in ("", "0") or (may_all and scope != "3"):
        yield ok("processes of one user may read each other's memory, as far as Yama goes")
        return
    yield warning(
        f"kernel.yama.ptrace_scope is {scope}: pulls attach to sealed memory of this host, but "
        "can't copy what a process lends; they use tcp for it",
        "sysctl kernel.yama.ptrace_scope=0" + ("" if scope != "3" else " after the next boot"),
    )


def clock(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield whether the clock is synchronised. Only certificates depend on it."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        yield note("the kernel does not say whether the clock is synchronised")
    else:
        status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder)
        yield clock_finding(status, tls=subject.tls is not None)


def clock_finding(status: int, *, tls: bool) -> Finding:
    """Return the finding on adjtimex's status."""
    if not status & _STA_UNSYNC:
        return ok("the clock is synchronised")
    return (warning if tls else note)(
        "the clock is not synchronised: leases do not use it, but certificates are refused where "
        "it is wrong",
        "run chrony or systemd-timesyncd (on the host, for a container)",
    )


def keys(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the finding on the name key, by which this user owns names."""
    path = subject.settings.name_key
    lasting = "set `name_key` to a file in a folder that lasts, or mount one there"
    if not path:
        yield warning(
            "there is no home folder to keep a name key in: no other process, and none after a "
            "restart, can update the names that this one binds",
            lasting,
        )
        return
    try:
        keyfile.read(Path(path))
        yield ok(f"the name key {path} can be used")
    except FileNotFoundError:
        folder = next(each for each in Path(path).absolute().parents if each.exists())
        if os.access(folder, os.W_OK | os.X_OK):
            yield ok(f"the name key {path} is made at first use")
        else:
            yield warning(f"the name key {path} can't be made: {folder} is not writable", lasting)
    except ConfigError as error:
        yield failure(error.message, error.hint)
    except OSError as error:
        yield failure(f"the name key {path} can't be read: {error.strerror}")


def cache(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the finding on this host's cache."""
    if subject.settings.cache_socket == "off":
        yield note("no cache is asked: `cache_socket=off`")
        return
    try:
        found = cached(settings=subject.settings)
    except MxError as error:
        yield warning(f"the cache does not answer: {error.message}", error.hint)
        return
    if found is None:
        yield note("no cache runs for this user on this host: each pull takes memory of its own")
    else:
        used = f"{format_bytes(found.held_bytes)} of {format_bytes(found.budget_bytes)}"
        yield ok(f"a cache runs: {count(len(found.models), 'model')}, {used}")
