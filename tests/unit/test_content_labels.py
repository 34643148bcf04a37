"""What a source's process says that it holds: shared memory, and what has no need of labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from mx.testing.bench import Bench
from mx.testing.harness import Harness
from mx.testing.memory import Kind, Memory
from mx.transport import ExposedRegion, ExposeOptions, Grant, Vouching
from mx.units import MIB
from mx_transports.shm import ShmTransport
from mx_transports.toolkit import local
from tests.support.labels import OTHERS, OURS, LabelRules, copied, refusal


def shm(kind: Kind) -> Bench:
    return Bench(Harness("mx_transports.shm:ShmTransport", kind=kind, stall_timeout_s=30.0))


@pytest.mark.parametrize("kind", [Kind.SEALED, Kind.ANONYMOUS], ids=["attached", "copied"])
class TestShm(LabelRules):
    @pytest.fixture
    def bench(self, kind: Kind) -> Iterator[Bench]:
        with shm(kind) as found:
            yield found


def test_not_a_byte_is_read_of_a_source_that_is_refused() -> None:
    with shm(Kind.ANONYMOUS) as bench, closing(Memory(MIB, 1, Kind.ANONYMOUS)) as memory:
        region = memory.region(0)
        # Where nothing is mapped: to read there is an error of its own.
        exposure = ShmTransport().expose(
            [ExposedRegion(0, region.view, 4096)], ExposeOptions(content=OTHERS)
        )
        del region
        try:
            assert "can't be read" in str(refusal(bench, exposure.grant("g"), OTHERS, 0))
            assert "serves other weights" in str(refusal(bench, exposure.grant("g"), OURS, 0))
        finally:
            exposure.close()
            assert exposure.join(10)


def test_a_label_has_a_size() -> None:
    longest = bytes(64)
    assert (
        ExposeOptions(content=longest).content
        == Grant("g", b"", 1, (), "p", content=longest).content
    )
    with pytest.raises(ValueError, match="64 bytes"):
        ExposeOptions(content=bytes(65))
    with pytest.raises(ValueError, match="64 bytes"):
        Grant("g", b"", 1, (), "p", content=bytes(65))


def test_a_label_longer_than_itself_is_malformed() -> None:
    with shm(Kind.SEALED) as bench:
        source = bench.source(MIB, content=OURS)
        exposure = source.exposure
        assert isinstance(exposure, local.LocalExposure)
        exposure._content = bytes(200)
        assert "malformed" in str(refusal(bench, source.grant()[1], OURS))


def test_transports_whose_bytes_are_verified_ignore_labels() -> None:
    with Bench(Harness("mx_transports.tcp:TcpTransport")) as bench:
        source = bench.source(MIB, content=OTHERS, block_digests=bytes(16))
        session = bench.open(source, content=OURS)
        assert copied(bench, session) == source.memories[0].expected
        assert not isinstance(session, Vouching)
