"""The memory that a pull fills."""

from __future__ import annotations

from mx.errors import ConfigError
from mx.memory.arena import Arena, BorrowedArena, HostArena, MemfdArena
from mx.memory.device import DeviceArena
from mx.target.options import PullOptions


def new_arena(options: PullOptions, nbytes: int) -> Arena:
    """Return the arena for these options: the caller's memory, memory that others can attach later,
    or plain memory of the host or a GPU. Raises ConfigError if the caller's memory is too small,
    CapacityError."""
    if options.into is not None:
        if options.into.nbytes < nbytes:
            raise ConfigError(f"the model needs {nbytes} bytes, `into` has {options.into.nbytes}")
        return BorrowedArena(options.into[:nbytes])
    if options.device != "cpu":
        return DeviceArena(nbytes, options.device)
    if options.hold:
        return MemfdArena(nbytes, name=f"pull:{options.name}")
    return HostArena(nbytes)
