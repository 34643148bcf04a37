"""Opens grants for both GPU transports: finds devices, connects, maps memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mx import users
from mx.core.topology import Gpu, GpuPeer, Place
from mx.cuda import driver as cuda
from mx.cuda.device import Device, find_ordinal
from mx.cuda.errors import CudaError
from mx.cuda.vmm import HOST
from mx.errors import ConfigError, PathError
from mx.transport import Grant, Unavailable, Viable
from mx_transports.toolkit.cuda.hosts import DEFAULT_OPTIONS, HostOptions
from mx_transports.toolkit.cuda.remote import GpuTicket, RemoteMemory, translated
from mx_transports.toolkit.cuda.session import GpuSession
from mx_transports.toolkit.reach import same_user

CPU = "cpu"


def may_share(here: Place, there: Place) -> bool:
    """Return True if two processes can pass each other descriptors and handles: those of one user
    on one kernel, in one IPC namespace too (legacy handles name their exporter by pid)."""
    return same_user(here, there) and here.ipc_namespace == there.ipc_namespace


def probe() -> Viable | Unavailable:
    """Return whether CUDA is here, and other processes can be known as this user's."""
    found = cuda.presence()
    why = users.ambiguity() if isinstance(found, Viable) else ""
    return Unavailable(why) if why else found


def links(here: Place, there: Place) -> list[tuple[Gpu, GpuPeer]]:
    """Return, for each end, its own GPU and what it knows of its link to the other's. An end
    without NVML, or in a container with one GPU, knows no other; then the other end's word
    counts."""
    return [
        (one.gpu, peer)
        for one, other in ((here, there), (there, here))
        for peer in (one.gpu.peers if one.gpu is not None else ())
        if one.gpu is not None and peer.uuid == other.device.removeprefix("cuda:")
    ]


class Devices:
    """The GPUs of one session, each opened once. Opening makes a context, which takes some hundred
    MB of the GPU's memory: only what copies needs one.

    Both the session and the source's memory use them, and each calls `close` at its end: attached
    memory may be opened after the session's."""

    def __init__(self, path: str, peer: str) -> None:
        self.path, self.peer = path, peer
        self._users = [None, None]
        with translated(path, peer):
            self.driver = cuda.load()
        self._opened: dict[str, Device] = {}

    def open(self, name: str) -> Device:
        """Open a GPU by "cuda:UUID" or UUID. Raises PathError if this process does not see it."""
        uuid = name.removeprefix("cuda:")
        if uuid not in self._opened:
            try:
                with translated(self.path, self.peer):
                    self._opened[uuid] = Device.open(self.driver, uuid)
            except ConfigError as error:
                raise PathError(
                    f"{self.peer} by {self.path}: this process does not see the GPU {uuid}",
                    peer=self.peer,
                    hint="CUDA_VISIBLE_DEVICES may leave it out",
                ) from error
        return self._opened[uuid]

    def sees(self, uuid: str) -> bool:
        """Return True if CUDA shows a GPU to this process, as CUDA_VISIBLE_DEVICES may not."""
        with translated(self.path, self.peer), contextlib.suppress(ConfigError):
            return find_ordinal(self.driver, uuid) >= 0
        return False

    def may_access(self, device: Device, uuid: str) -> bool | None:
        """Return whether a GPU can map the memory of another one, or of itself; None where that is
        known only once it has tried, since this process does not see the other one.

        Neither GPU needs a context for this."""
        if uuid == device.uuid:
            return True
        if not self.sees(uuid):
            return None
        with translated(self.path, self.peer):
            ordinal = find_ordinal(self.driver, uuid)
            return self.driver.can_access_peer(device.ordinal, ordinal)

    def all(self) -> list[Device]:
        return list(self._opened.values())

    def close(self) -> None:
        """Close them all, at the second call."""
        with contextlib.suppress(IndexError):
            self._users.pop()  # atomic, and so needs no lock that a finalizer could wait for
        if self._users:
            return
        for device in self.all():
            with contextlib.suppress(CudaError):
                device.close()


#: (devices, target, the source's GPU) -> which device maps and copies that GPU's memory. Raises
#: PathError where the path can't.
Choose = Callable[[Devices, Device | None, str], Device]


def open_session(
    path: str,
    magic: bytes,
    grant: Grant,
    choose: Choose,
    step_nbytes: Callable[[bool], int],
    host_options: HostOptions = DEFAULT_OPTIONS,
) -> GpuSession:
    """Open a session of a GPU transport.

    Args:
        path: The transport's name.
        magic: The transport and its version.
        grant: The grant.
        choose: Which device maps and copies a GPU's memory.
        step_nbytes: Returns the size of a step in bytes, given whether all bytes go straight to the
            target.
        host_options: How host memory is reached in place.

    Raises:
        SourceError: The source can't be reached, or its memory can't be mapped.
    """
    ticket = GpuTicket(grant.ticket, grant.peer)
    devices = Devices(path, grant.peer)
    mappers: dict[str, Device] = {}
    remote = RemoteMemory(path, magic, grant, ticket, mappers.__getitem__, devices.close)
    try:
        target = None if grant.place.device == CPU else devices.open(grant.place.device)
        for uuid in sorted(ticket.gpus):
            if uuid != HOST:
                mappers[uuid] = choose(devices, target, uuid)
            elif target is not None:
                mappers[HOST] = target
            else:
                raise PathError(
                    f"{grant.peer} by {path}: its memory is mapped by GPUs only", peer=grant.peer
                )
        if not devices.all():
            raise PathError(f"{grant.peer} by {path}: neither side is on a GPU", peer=grant.peer)
        with translated(path, grant.peer), (target or devices.all()[0]).current():
            remote.connect()
            remote.map()
        direct = bool(mappers) and all(device is target for device in mappers.values())
        with translated(path, grant.peer):
            size = step_nbytes(direct)
            home = target or devices.all()[0]
            return GpuSession(grant, remote, target, home, devices.close, size, host_options)
    except BaseException:
        remote.drop()
        devices.close()
        raise
