"""What other distributions add to mx by entry points, found without reading all metadata."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator

from mx.errors import MxError

_OWN = "mx_peer-"

#: What a module that does not suit this machine or version raises while it is imported.
LOAD_FAILURES = (
    MxError,
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    OSError,
    RuntimeError,
    AssertionError,
)


def targets(group: str, built_in: dict[str, str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is there of a group, the built-in first, without importing any.

    Args:
        group: The group of entry points.
        built_in: "module:attribute" by name. A plain checkout has no metadata, so that what is
            mx's own is named in a table.

    Returns:
        Pairs of a name and a callable that imports what it stands for.
    """
    for name, target in built_in.items():
        yield name, functools.partial(load, target)
    declared = _declared(tuple(sys.path))
    if declared is None or any(b"[%s]" % group.encode() in each for each in declared):
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
            yield entry.name, entry.load


def load(target: str) -> object:
    """Import and return what "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.lru_cache(maxsize=4)
def _declared(places: tuple[str, ...]) -> tuple[bytes, ...] | None:
    """Return the entry points of other distributions that name a group of mx's; None if only the
    library can read them. The files are looked for here, since `importlib.metadata` takes 12 ms to
    import and reads all files of metadata."""
    declared = []
    for place in places:
        try:
            with os.scandir(place or ".") as entries:
                found = [
                    each.path for each in entries if each.name.endswith((".dist-info", ".egg-info"))
                ]
        except NotADirectoryError:
            return None  # an archive
        except OSError:
            continue
        for folder in found:
            if not os.path.basename(folder).startswith(_OWN):
                with contextlib.suppress(OSError), open(f"{folder}/entry_points.txt", "rb") as file:
                    text = file.read()
                    if b"[mx." in text:
                        declared.append(text)
    return tuple(declared)
