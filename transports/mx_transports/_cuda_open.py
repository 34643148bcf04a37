"""What both GPU transports do to open a grant: devices found, link connected, memory mapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mx.core.topology import Place
from mx.cuda import driver as cuda
from mx.cuda.device import Device
from mx.cuda.errors import CudaError
from mx.errors import ConfigError, PathError
from mx.transport import Grant
from mx_transports._cuda_link import Link, Ticket, translated
from mx_transports._cuda_maps import Maps
from mx_transports._cuda_session import GpuSession

CPU = "cpu"


def same_user(here: Place, there: Place) -> bool:
    """May these two hand each other descriptors and handles at all? One kernel, the same network,
    process, user and IPC namespaces (legacy handles name their exporter by pid), one uid."""
    if not here.boot_id or here.uid < 0 or here.same_host_key != there.same_host_key:
        return False
    mine = (here.uid, here.user_namespace, here.ipc_namespace)
    return mine == (there.uid, there.user_namespace, there.ipc_namespace)


class Devices:
    """The GPUs of one session, each opened once."""

    def __init__(self, path: str, peer: str) -> None:
        self.path, self.peer = path, peer
        with translated(path, peer):
            self.driver = cuda.load()
        self._opened: dict[str, Device] = {}

    def open(self, name: str) -> Device:
        """By "cuda:UUID" or UUID. Raises PathError where this process does not see it."""
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

    def all(self) -> list[Device]:
        return list(self._opened.values())

    def close(self) -> None:
        for device in self.all():
            with contextlib.suppress(CudaError):
                device.close()


#: (devices, target, the source's GPU) -> which device maps and copies that GPU's memory. Raises
#: PathError where the path can't.
Choose = Callable[[Devices, Device | None, str], Device]


def open_session(
    path: str, magic: bytes, grant: Grant, choose: Choose, step_nbytes: Callable[[bool], int]
) -> GpuSession:
    """Raises SourceError. `step_nbytes` is asked with whether all goes straight to the target."""
    ticket = Ticket(grant.ticket, grant.peer)
    devices = Devices(path, grant.peer)
    link = Link(path, magic, grant.peer, ticket)
    try:
        target = None if grant.place.device == CPU else devices.open(grant.place.device)
        mappers = {uuid: choose(devices, target, uuid) for uuid in sorted(ticket.gpus)}
        if not devices.all():
            raise PathError(f"{grant.peer} by {path}: neither side is on a GPU", peer=grant.peer)
        link.connect(grant.stall_timeout_s)
        link.map(Maps(grant.peer, lambda uuid: mappers[uuid]))
        direct = bool(mappers) and all(device is target for device in mappers.values())
        with translated(path, grant.peer):
            return GpuSession(grant, link, target, devices.all(), step_nbytes(direct))
    except BaseException:
        link.drop()
        devices.close()
        raise
