"""Hosts on one machine: network namespaces, joined by links that have a speed and can fail.

What runs in them shares a kernel and nothing of the network, so that for mx they are machines of
their own. Linux, root and iproute2 are needed; `unavailable` says what is missing. Speeds are
limited by a token bucket (tc-tbf(8)) at the sending end of each direction. Everything made is
removed when the context ends; what a process left that was killed, by the next one's.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from mx.errors import LocalError

#: A bucket holds what a link carries in this time: little enough that a second's measure is
#: exact, and enough that a timer which is late by a scheduler's tick loses nothing.
BURST_S = 0.004
#: And no less than this: a packet that the kernel segments late is up to 64 KiB long.
MIN_BURST_NBYTES = 128 * 1024
#: A switch's port queues this much time's worth before it drops, as shallow switches do.
QUEUE_S = 0.020
_COMMAND_TIMEOUT_S = 20.0
_UP_TIMEOUT_S = 10.0
_UP_POLL_S = 0.02

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Link:
    """A cable between two hosts, or a host (`a`) and a switch (`b`, without an address).

    `devices` and `addresses` are those of `a` and `b`; an address is without its prefix length.
    """

    a: str
    b: str
    devices: tuple[str, str]
    addresses: tuple[str, str]

    def device(self, host: str) -> str:
        """The interface at this end."""
        return self.devices[self._end(host)]

    def address(self, host: str) -> str:
        return self.addresses[self._end(host)]

    def _end(self, host: str) -> int:
        return (self.a, self.b).index(host)


@functools.cache
def unavailable() -> str | None:
    """Why no hosts can be made here; None if they can. Finds out by making two."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"making network namespaces needs iproute2: there is no {' and no '.join(missing)}"
    try:
        with Hosts() as hosts:
            hosts.link("a", "b", mbit_per_s=1000)
    except LocalError as error:
        return f"this machine can't make network namespaces: {error}"
    return None


class Hosts:
    """A context: leaving it ends what was started in the hosts, and removes them.

    Names of hosts are short and stand for the namespace `mx-PID-N-NAME`. Every method raises
    LocalError where the kernel refuses.
    """

    def __init__(self) -> None:
        self._prefix = f"mx-{os.getpid()}-{next(_serial)}-"
        self._names: list[str] = []
        self._links: list[Link] = []
        self._switches = 0
        self._devices: dict[str, int] = {}
        self._rates: dict[tuple[Link, str], float | None] = {}  # (link, sender) -> Mbit/s
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        remove_stale()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what there is --------------------------------------------------------------------------

    def namespace(self, host: str) -> str:
        return self._prefix + host

    def prefix(self, host: str) -> list[str]:
        """Return what to put before a command to run it in a host; the process keeps its pid."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def add(self, host: str) -> None:
        """A host without any link but its loopback."""
        _run("ip", "netns", "add", self.namespace(host))
        self._names.append(host)
        self._ip(host, "link", "set", "lo", "up")

    def link(
        self,
        a: str,
        b: str,
        *,
        mbit_per_s: float | None = None,
        back_mbit_per_s: float | None = None,
    ) -> Link:
        """A cable of a subnet of its own between two hosts, which are made if they are not there.
        `mbit_per_s` limits what `a` sends, `back_mbit_per_s` what `b` does (None: nothing)."""
        net = f"10.213.{len(self._links)}"
        link = self._cable(a, b, (f"{net}.1", f"{net}.2"), 30)
        self.throttle(link, mbit_per_s, a)
        self.throttle(link, back_mbit_per_s, b)
        return link

    def star(
        self,
        names: Sequence[str],
        *,
        up_mbit_per_s: float | Mapping[str, float] | None = None,
        down_mbit_per_s: float | Mapping[str, float] | None = None,
    ) -> dict[str, Link]:
        """Hosts around a switch, in one subnet, by name. `up` limits what a host sends, `down`
        what the switch sends to it: one figure for all, or one by name."""
        switch = f"switch{self._switches}"
        net = f"10.214.{self._switches}"
        self._switches += 1
        self.add(switch)
        self._ip(switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        self._ip(switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        found = {}
        for index, name in enumerate(names):
            link = self._cable(name, switch, (f"{net}.{index + 1}", ""), 24)
            self._ip(switch, "link", "set", link.device(switch), "master", "bridge")
            self.throttle(link, _of(up_mbit_per_s, name), name)
            self.throttle(link, _of(down_mbit_per_s, name), switch)
            found[name] = link
        return found

    def dead_end(self, host: str, address: str) -> Link:
        """A cable to a host of its own without an address: nothing answers in that subnet."""
        return self._cable(host, f"{host}end", (address, ""), 24)

    def _cable(self, a: str, b: str, addresses: tuple[str, str], length: int) -> Link:
        for host in (a, b):
            if host not in self._names:
                self.add(host)
        one, other = (self._next_device(host) for host in (a, b))
        far = ("peer", "name", other, "netns", self.namespace(b))
        self._ip(a, "link", "add", one, "type", "veth", *far)
        link = Link(a, b, (one, other), addresses)
        for host, device, address in zip((a, b), link.devices, addresses, strict=True):
            if address:
                self._ip(host, "address", "add", f"{address}/{length}", "dev", device)
            self._ip(host, "link", "set", device, "addrgenmode", "none", "up")
        self._wait_until_up(link)
        self._links.append(link)
        return link

    def _wait_until_up(self, link: Link) -> None:
        """Wait until both ends are up. The kernel reports the carrier up to a second after `ip link
        set up` has returned (linkwatch); until then the interface is down."""
        end_s = time.monotonic() + _UP_TIMEOUT_S
        for host, device in zip((link.a, link.b), link.devices, strict=True):
            while (state := self._state(host, device)) != "UP":
                if time.monotonic() > end_s:
                    raise LocalError(f"{device} of {host} is {state} long after it was set up")
                time.sleep(_UP_POLL_S)

    def _state(self, host: str, device: str) -> str:
        return str(
            json.loads(self._ip(host, "-json", "link", "show", "dev", device))[0]["operstate"]
        )

    def _next_device(self, host: str) -> str:
        number = self._devices.get(host, 0)
        self._devices[host] = number + 1
        return f"eth{number}"

    # -- what happens to it ---------------------------------------------------------------------

    def throttle(self, link: Link, mbit_per_s: float | None, sender: str) -> None:
        """Limit what `sender` puts into the link to this speed from now on; None: no limit."""
        self._rates[link, sender] = mbit_per_s
        namespace, device = self.namespace(sender), link.device(sender)
        if mbit_per_s is None:
            tried = _try("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            # 2 says that there was none.
            if tried.returncode not in (0, 2):
                raise LocalError(f"tc: {tried.stderr.strip()}")
            return
        bytes_per_s = mbit_per_s * 1e6 / 8
        burst = max(MIN_BURST_NBYTES, int(bytes_per_s * BURST_S))
        queue = burst + max(MIN_BURST_NBYTES, int(bytes_per_s * QUEUE_S))
        shape = ("rate", f"{round(mbit_per_s * 1000)}kbit", "burst", str(burst))
        where = ("qdisc", "replace", "dev", device, "root")
        _run("tc", "-n", namespace, *where, "tbf", *shape, "limit", str(queue))

    def mute(self, link: Link, sender: str) -> None:
        """Drop silently what `sender` puts into the link; the other way still works."""
        where = ("qdisc", "replace", "dev", link.device(sender), "root")
        _run("tc", "-n", self.namespace(sender), *where, "pfifo", "limit", "0")

    def cut(self, link: Link) -> None:
        """Pull the cable: both ends see the carrier go."""
        self._ip(link.b, "link", "set", link.device(link.b), "down")

    def heal(self, link: Link) -> None:
        """Undo `cut` and `mute`; speeds are what they were."""
        self._ip(link.b, "link", "set", link.device(link.b), "up")
        self._wait_until_up(link)
        for sender in (link.a, link.b):
            self.throttle(link, self._rates[link, sender], sender)

    def sent_nbytes(self, link: Link, sender: str) -> int:
        """Return what `sender` has put into the link so far, headers included."""
        shown = self._ip(sender, "-json", "-stats", "link", "show", "dev", link.device(sender))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    # -- processes ------------------------------------------------------------------------------

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command in a host. It is killed at the end, if it still runs then."""
        process = subprocess.Popen(
            [*self.prefix(host), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Idempotent; goes on over what fails, and raises LocalError for that at the end."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
        failed = []
        while self._names:
            tried = _try("ip", "netns", "del", self.namespace(self._names.pop()))
            if tried.returncode:
                failed.append(tried.stderr.strip())
        if failed:
            raise LocalError("network namespaces were left behind: " + "; ".join(failed))

    def _ip(self, host: str, *arguments: str) -> str:
        return _run("ip", "-n", self.namespace(host), *arguments)


def remove_stale() -> None:
    """Remove the hosts of processes that are gone."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(r"mx-(\d+)-\d+-\S+", line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            _try("ip", "netns", "del", found[0])  # another process may have been quicker


def _of(rate: float | Mapping[str, float] | None, name: str) -> float | None:
    return rate.get(name) if isinstance(rate, Mapping) else rate


def _run(*command: str) -> str:
    done = _try(*command)
    if done.returncode:
        raise LocalError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
    )
