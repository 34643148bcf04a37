"""The pcie_p2p transport keeps the rules: between host and GPU both ways, and between GPUs."""

from collections.abc import Iterator

import pytest

from mx.testing.conformance import Harness, Kind, TransportSuite
from tests.support import gpu_rig

pytestmark = pytest.mark.long

#: Transport, memory, the source's device, the reader's.
PATHS = {
    "memfd to GPU": ("pcie_p2p", Kind.SEALED, "cpu", "0"),
    "process to GPU": ("pcie_p2p", Kind.ANONYMOUS, "cpu", "0"),
    "GPU to host": ("pcie_p2p", Kind.GPU, "0", "cpu"),
    "peer to peer": ("pcie_p2p", Kind.GPU_VMM, "0", "1"),
    "staged": ("pcie_without_peers", Kind.GPU, "0", "1"),
}


class TestPcieP2p(TransportSuite):
    @pytest.fixture(params=PATHS)
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        name, kind, there, here = PATHS[request.param]
        with gpu_rig.gpus(peers=name != "pcie_without_peers") as driver:
            if driver.device_count() < 2 and {here, there} == {"0", "1"}:
                pytest.skip("one GPU only")
            yield gpu_rig.harness(name, kind, driver, there, here)
