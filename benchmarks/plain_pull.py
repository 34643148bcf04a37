"""Counts what one plain pull makes and enters: the size of the code that has to be understood, and
can fail, when nothing special is asked for.

The pull is of four chunks over tcp from one named peer, in another process. From the call of
`mx.pull` to the end of `close` it counts, of mx and its transports:

- the classes of which it constructs instances, without values;
- the values: dataclasses, named tuples and errors;
- the functions that it enters, and the files that they are in, with their lines of code. What runs
  at the import of a module, and generated protobuf code, do not count.

    python -m benchmarks.plain_pull [--json | --list]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mx
import mx_transports
from mx import runtime
from mx.core import growth
from mx.swarm import sharing

from .checkpoints import write_checkpoint
from .code_lines import code_lines_of
from .processes import Cluster

MODEL, CHUNKS = "plain", 4
#: The most classes and functions of a plain pull, and lines of code of the files that these are in.
MOST_CLASSES, MOST_FUNCTIONS, MOST_LINES = 45, 550, 10_000

_ROOTS = (mx.__path__[0], mx_transports.__path__[0])
_PACKAGES = tuple(f"{package.__name__}." for package in (mx, mx_transports))
_GENERATED = "_pb2"


class Counts:
    """A profile function that counts."""

    def __init__(self) -> None:
        self._made: set[type] = set()
        self._codes: set[CodeType] = set()
        self._ended = False
        self._importing = threading.local()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._ended or event not in ("call", "return"):
            return
        code, depth = frame.f_code, getattr(self._importing, "depth", 0)
        if code.co_name == "<module>":
            self._importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth:
            self._codes.add(code)
            named_tuple = code.co_varnames[:1] == ("_cls",)  # its `__new__` has no name
            if (code.co_name in ("__init__", "__new__") and code.co_argcount) or named_tuple:
                self._constructed(frame.f_locals[code.co_varnames[0]])

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, in the block, what this thread does and those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self._ended = True  # threads that it has started go on to call it

    def _constructed(self, instance: object) -> None:
        made = instance if isinstance(instance, type) else type(instance)
        if f"{made.__module__}.".startswith(_PACKAGES):
            self._made.add(made)

    def _names(self, *, values: bool) -> list[str]:
        return sorted(
            f"{made.__module__}.{made.__qualname__}"
            for made in self._made
            if (dataclasses.is_dataclass(made) or issubclass(made, tuple | Exception)) == values
        )

    @property
    def classes(self) -> list[str]:
        """The classes that it has constructed, without values."""
        return self._names(values=False)

    @property
    def values(self) -> list[str]:
        """The dataclasses, named tuples and errors."""
        return self._names(values=True)

    @property
    def functions(self) -> list[str]:
        """The functions by file, line and name."""
        return sorted(
            f"{self._file(code)}:{code.co_firstlineno} {code.co_qualname}"
            for code in self._codes
            if code.co_filename.startswith(_ROOTS) and _GENERATED not in code.co_filename
        )

    @property
    def files(self) -> list[str]:
        return sorted({each.partition(":")[0] for each in self.functions})

    @property
    def lines(self) -> int:
        """The lines of code of the files."""
        return code_lines_of(Path(self._root(each)).parent / each for each in self.files)

    @staticmethod
    def _root(file: str) -> str:
        package = file.partition("/")[0]
        return next(root for root in _ROOTS if Path(root).name == package)

    @staticmethod
    def _file(code: CodeType) -> str:
        root = next(root for root in _ROOTS if code.co_filename.startswith(root))
        return str(Path(code.co_filename).relative_to(Path(root).parent))

    def to_json(self) -> dict[str, object]:
        """Return the counts, and the names of what was counted."""
        names = {
            "classes": self.classes,
            "values": self.values,
            "functions": self.functions,
            "files": self.files,
        }
        return {
            "schema": 1,
            "chunks": CHUNKS,
            **{what: len(each) for what, each in names.items()},
            "lines": self.lines,
            "most": {"classes": MOST_CLASSES, "functions": MOST_FUNCTIONS, "lines": MOST_LINES},
            "names": names,
        }


def count(peer: str) -> Counts:
    """Pull from this source, and return what that has made and entered. Nothing was pulled in this
    process before."""
    # It is plain on a busy machine, too.
    sharing.LONG_S = runtime.LINGER_S = growth.LOOK_S = 3600.0
    counts = Counts()
    with counts.counting():
        pull = mx.pull(MODEL, peer=peer, transport="tcp")
        report = pull.wait(60)
        pull.close()
    assert pull.manifest is not None
    assert len(pull.manifest.grid) == CHUNKS
    assert [path.transport for path in report.paths] == ["tcp"]
    return counts


def count_in_a_process() -> dict[str, Any]:
    """Serve a checkpoint of four chunks, and return the counts of a new process that pulls it."""
    with closing(Cluster()) as cluster, tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model.safetensors"
        write_checkpoint(
            checkpoint, {f"model.layers.{n}.weight": (1 << 10, 1 << 9) for n in range(CHUNKS)}
        )
        _, said = cluster.serve(checkpoint, MODEL)
        child = cluster.start("-m", f"{__package__}.plain_pull", "--peer", said["endpoint"])
        found: dict[str, Any] = json.loads(child.hear())
        return found


def table(found: dict[str, Any]) -> str:
    """Return a table of the counts and their bars."""
    bars = {what: f"<= {most}" for what, most in found["most"].items()}
    return "\n".join(
        f"{what:<10}{found[what]:>6}  {bars.get(what, '')}".rstrip()
        for what in (*found["names"], "lines")
    )


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object, with all names")
    parser.add_argument("--list", action="store_true", help="print all names, too")
    parser.add_argument("--peer", help="pull from this source, and print one object")
    options = parser.parse_args()
    if options.peer is not None:
        print(json.dumps(count(options.peer).to_json()))
        return
    found = count_in_a_process()
    if options.json:
        print(json.dumps(found))
        return
    if options.list:
        print(*(name for names in found["names"].values() for name in names), sep="\n")
    print(table(found))


if __name__ == "__main__":
    main()
