"""Lets a process explain a hang: SIGUSR1 prints its threads' stacks and its swarm's state."""

from __future__ import annotations

import faulthandler
import gc
import reprlib
import signal
import sys

#: Classes whose objects are printed.
_MACHINES = (
    "ConnectionPool",
    "Node",
    "Origin",
    "Receiver",
    "Seeder",
    "Slots",
    "TransferMachine",
    "_ConnectedPeer",
    "_Peer",
    "_SeededPeer",
)
_DEEP = reprlib.Repr()
_DEEP.maxdict = _DEEP.maxlist = _DEEP.maxset = _DEEP.maxdeque = 20
_DEEP.maxstring = _DEEP.maxother = 400


def register() -> None:
    """Install the signal's handler; call it on the main thread."""
    signal.signal(signal.SIGUSR1, lambda number, frame: _tell())


def _tell() -> None:
    faulthandler.dump_traceback(all_threads=True)
    for item in gc.get_objects():
        kind = type(item)
        if str(kind.__module__).startswith("mx.") and kind.__name__ in _MACHINES:
            print(f"\n{kind.__name__} {id(item):x}", file=sys.stderr)
            for name, value in _fields(item):
                print(f"  {name} = {_DEEP.repr(value)}", file=sys.stderr)
    sys.stderr.flush()


def _fields(item: object) -> list[tuple[str, object]]:
    names = [*getattr(item, "__dict__", ()), *getattr(type(item), "__slots__", ())]
    return [(name, getattr(item, name, None)) for name in names]
