"""The kernel can be read: it does not grow by what belongs beside it."""

from __future__ import annotations

from benchmarks.code_lines import code_lines, code_lines_of
from tests.support.kernel import kernel

#: Lines of code. What is added to the kernel takes the place of something. GPUs and links took 575
#: (allocations opened as they are needed, several links, memory that the driver makes, digests at
#: the source, connections as many as help, with a ring that grows with them); the disk path took
#: 429 (reads in order, as many as help, into place; stages; hooks of snapshots and GPUs), of which
#: the hub's downloads gave 210 back.
MOST_CODE_LINES = 46_491


def test_the_kernel_is_no_larger_than_it_was() -> None:
    assert code_lines_of(kernel()) <= MOST_CODE_LINES


def test_what_counts_as_code() -> None:
    source = '"""Text."""\n\n# why\ndef f():\n    """Text,\n\n    more."""\n    return """a\nb"""\n'
    assert code_lines(source) == 3
