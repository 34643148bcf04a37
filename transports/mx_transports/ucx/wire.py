"""The messages between reader and source of `ucx`, and the names of their devices.

The bytes are read one-sidedly and the fabric checks nothing, so the rest goes over a connection to
the source's socket, TLS if there is any: after the HELLO come INFO frames, a kind and a length,
with what the reader needs of the source's agent. Then, for each read, the reader sends BEGIN and
waits for the answer, reads, sends END and waits again: only with that second answer does it know
that the grant and the generation still stood when its bytes had arrived.

Where the source's memory is a GPU's, `slot_bytes` in INFO is not 0, and no region has an address.
Then BEGIN names pieces (`mx_transports.toolkit.pieces`) of at most so many bytes together, and the
answer says where in the agent's memory they are, one after the other; END gives that place back.
An answer WAITING comes before, once or more, where many small pieces take long to copy.

Where INFO says `direct`, a reader may ask (DIRECT) for an agent of its own that has the GPU's
memory itself; INFO frames answer, with the places that the regions lie in there. BEGIN names no
pieces then. A second DIRECT, which has no answer, gives the agent back: a read that was tried with
it failed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mx.core.json_bounds import MAX_TICKET_PARSED_BYTES, check_json
from mx.core.topology import Nic, Place
from mx.errors import PeerProtocolError
from mx.units import KIB
from mx_transports.toolkit.reach import is_loopback
from mx_transports.ucx.nixl import LOOPBACK_DEVICE

MAGIC = b"mxucx\0\0\2"

#: Kind and number of bytes that follow.
INFO = struct.Struct("!BI")
STARTING, READY, FAILED = 0, 1, 2
MAX_INFO_BYTES = 1 << 20
#: BEGIN, END or DIRECT, a number of the reader's own, the generation that it planned on, and the
#: number of pieces that follow.
REQUEST = struct.Struct("!BIQI")
BEGIN, END, DIRECT = 1, 2, 3
#: The number, a status of `framing`, and where the bytes are if BEGIN has named pieces.
RESPONSE = struct.Struct("!IIQ")
#: Smaller slots would make a read a matter of messages.
MIN_SLOT_BYTES = 64 * KIB


@dataclass(frozen=True)
class AgentRegion:
    """`address` is in the agent's process."""

    address: int
    nbytes: int


class GpuPlace(NamedTuple):
    """`nbytes` from `offset` of a region are at `address` in the agent's process."""

    region: int
    offset: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class AgentInfo:
    """An agent as its readers see it. `devices` are UCX's names of what it listens on; `slot_bytes`
    is 0 if the agent has the regions themselves. `direct`: another one that has the GPU's memory
    may be asked for, which has `places`, in order."""

    metadata: bytes
    regions: dict[int, AgentRegion]
    devices: tuple[str, ...]
    slot_bytes: int = 0
    direct: bool = False
    places: tuple[GpuPlace, ...] = ()

    def encode(self) -> bytes:
        document = {
            "metadata": self.metadata.hex(),
            "regions": [[index, r.address, r.nbytes] for index, r in self.regions.items()],
            "devices": self.devices,
            "slot_bytes": self.slot_bytes,
            "direct": self.direct,
            "places": self.places,
        }
        return json.dumps(document).encode()


def decode_info(data: bytes, peer: str) -> AgentInfo:
    """Read what `AgentInfo.encode` returned. Raises PeerProtocolError for anything malformed."""
    try:
        check_json(data, most_nbytes=MAX_TICKET_PARSED_BYTES)
        document = json.loads(data)
        regions = {}
        listed = document["regions"]
        # Sources of earlier releases have no places.
        places = [GpuPlace(*fields) for fields in document.get("places", ())]
        numbers = [*listed, *places]
        if not all(type(n) is int and n >= 0 for fields in numbers for n in fields):
            raise ValueError("not a number")
        if any(fields[-2] + fields[-1] > 1 << 64 for fields in numbers):
            raise ValueError("beyond all memory")
        for index, address, nbytes in listed:
            regions[index] = AgentRegion(address, nbytes)
        devices = tuple(str(name) for name in document["devices"])
        slot_bytes = document["slot_bytes"]
        if type(slot_bytes) is not int or 0 != slot_bytes < MIN_SLOT_BYTES:
            raise ValueError("too small a slot")
        metadata, direct = bytes.fromhex(document["metadata"]), document.get("direct") is True
        return AgentInfo(metadata, regions, devices, slot_bytes, direct, tuple(sorted(places)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PeerProtocolError(
            f"{peer}: its description of its UCX agent can't be read", peer=peer
        ) from error


def goes_direct(setting: Callable[[str], Any], devices: Sequence[str]) -> bool:
    """Return True if an agent that uses these devices may have a GPU's memory itself.

    Args:
        setting: Returns the value of a setting by its name.
        devices: UCX's names of them.
    """
    try:
        wanted = setting("gpudirect")
    except KeyError:
        wanted = "auto"
    return wanted == "always" or (wanted == "auto" and any(":" in name for name in devices))


def nic_of(place: Place, host: str) -> Nic | None:
    """Return the interface with an address, None if the place has none such."""
    for nic in place.nics:
        if any(address.partition("/")[0] == host for address in nic.addresses):
            return nic
    return None


def rdma_name(nic: Nic) -> str:
    """Return UCX's name of the interface's RDMA port, "" if it has none."""
    return f"{nic.rdma_device}:{nic.rdma_port or 1}" if nic.rdma_device else ""


def devices_at(place: Place, host: str) -> tuple[str, ...]:
    """Return the devices that an agent reachable at `host` uses; none where they are not known."""
    if is_loopback(host):
        return (LOOPBACK_DEVICE,)
    nic = nic_of(place, host)
    return () if nic is None else tuple(filter(None, (nic.name, rdma_name(nic))))


def reader_device(place: Place, host: str, theirs: Sequence[str]) -> str:
    """Return the device that a reader at `host` uses: its RDMA port if both sides have one."""
    mine = devices_at(place, host)
    both_rdma = len(mine) > 1 and any(":" in name for name in theirs)
    return "" if not mine else mine[-1 if both_rdma else 0]
