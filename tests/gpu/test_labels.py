"""What a source's process says that it holds: the memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mx.cuda.bindings import Driver
from mx.testing.bench import Bench
from mx.testing.child import GRANT_ID
from mx.testing.memory import Kind
from mx.units import MIB
from tests.gpu.rig import Spy
from tests.support import gpu_rig
from tests.support.labels import OTHERS, OURS, LabelRules, process, refusal


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
class TestCudaIpc(LabelRules):
    @pytest.fixture
    def bench(self, driver: Driver, kind: Kind) -> Iterator[Bench]:
        with Bench(gpu_rig.harness("cuda_ipc", kind, driver, "0", "0")) as found:
            yield found

    def test_nothing_is_opened_of_a_source_that_is_refused(self, spy: Spy, bench: Bench) -> None:
        def opened() -> int:
            return spy.calls["cuIpcOpenMemHandle"] + spy.calls["cuMemImportFromShareableHandle"]

        with process(bench, OTHERS) as child:
            refusal(bench, child.ticket, OURS)
            assert opened() == 0
            bench.open_ticket(GRANT_ID, child.ticket, [MIB], tls=None, content=OTHERS)
            assert opened() == 1
