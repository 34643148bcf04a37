"""The stand-in driver stays small: its lines of C, without comments and blank lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1] / "support/driver"
_FILES = {*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h")}
#: Graphs, and what their kernels need that mx's own do not.
_GRAPHS = {
    *_FOLDER.glob("graph*.[ch]"),
    *(_FOLDER / name for name in ("functions.c", "kernels.h", "warps.h")),
}
#: Host memory.
_HOST = {_FOLDER / "host.c"}
#: libcufile, and what it has of the driver.
_CUFILE = {_FOLDER / "cufile.c", _FOLDER / "dma.c"}


def lines(path: Path) -> int:
    """Return the lines of code of a file."""
    code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return sum(bool(line.strip()) for line in code.splitlines())


@pytest.mark.parametrize(
    ("files", "most"),
    [(_FILES - _GRAPHS - _HOST - _CUFILE, 1800), (_GRAPHS, 1200), (_HOST, 120), (_CUFILE, 240)],
)
def test_the_stand_in_is_bounded(files: set[Path], most: int) -> None:
    counted = sum(map(lines, files))
    assert most // 2 < counted <= most, counted
