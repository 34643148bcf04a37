"""Counts what one plain pull makes and enters: the size of the code that has to be understood, and
can fail, when nothing special is asked for.

The pull is of four chunks over tcp from one named peer, in another process. From the call of
`mx.pull` to the end of `close` it counts, of mx and its transports:

- the classes of which it constructs instances, without values;
- the values: dataclasses, named tuples and errors;
- the functions that it enters, and the files that they are in. What runs at the import of a module,
  and generated protobuf code, do not count.

    python -m benchmarks.plain_pull [--json | --list]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import mx
import mx_transports

from .checkpoints import write_checkpoint

CHUNKS = 4
#: The most classes and functions of a plain pull.
MOST_CLASSES, MOST_FUNCTIONS = 45, 550

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
            if code.co_name in ("__init__", "__new__") and code.co_argcount:
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
            "most": {"classes": MOST_CLASSES, "functions": MOST_FUNCTIONS},
            "names": names,
        }

    def table(self) -> str:
        """Return a table of the counts and their bars."""
        rows = [
            ("classes", len(self.classes), f"<= {MOST_CLASSES}"),
            ("values", len(self.values), ""),
            ("functions", len(self.functions), f"<= {MOST_FUNCTIONS}"),
            ("files", len(self.files), ""),
        ]
        return "\n".join(f"{what:<10}{count:>6}  {bar}".rstrip() for what, count, bar in rows)


@contextmanager
def _source(folder: Path) -> Iterator[str]:
    """Serve a checkpoint of four chunks in a process of its own; give its endpoint."""
    checkpoint = folder / "model.safetensors"
    shapes = {f"model.layers.{n}.weight": (1 << 10, 1 << 9) for n in range(CHUNKS)}
    write_checkpoint(checkpoint, shapes)
    process = subprocess.Popen(
        [sys.executable, "-m", "mx", "serve", str(checkpoint), "--model", "plain", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            yield json.loads(lines.readline())["endpoint"]
    finally:
        process.terminate()
        process.wait(30)


def count() -> Counts:
    """Run a plain pull, and return what it has made and entered. This process has not pulled."""
    counts = Counts()
    with (
        tempfile.TemporaryDirectory() as folder,
        _source(Path(folder)) as peer,
        counts.counting(),
    ):
        pull = mx.pull("plain", peer=peer, transport="tcp")
        report = pull.wait(60)
        pull.close()
    assert pull.manifest is not None
    assert len(pull.manifest.grid) == CHUNKS
    assert [path.transport for path in report.paths] == ["tcp"]
    return counts


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object, with all names")
    parser.add_argument("--list", action="store_true", help="print all names, too")
    options = parser.parse_args()
    counts = count()
    if options.json:
        print(json.dumps(counts.to_json()))
        return
    if options.list:
        print(*counts.classes, *counts.values, *counts.functions, sep="\n")
    print(counts.table())


if __name__ == "__main__":
    main()
