"""The pcie_p2p transport keeps the rules: between host and GPU both ways, and between GPUs."""

import pytest

from mx.cuda.bindings import Driver
from mx.testing.conformance import Harness, Kind, TransportSuite
from tests.support import gpu_rig

#: Memory, the source's device, the reader's, NVLinks: beside those it goes through the host.
PATHS = {
    "memfd to GPU": (Kind.SEALED, "cpu", "0", 0),
    "process to GPU": (Kind.ANONYMOUS, "cpu", "0", 0),
    "GPU to host": (Kind.GPU, "0", "cpu", 0),
    "peer to peer": (Kind.GPU_VMM, "0", "1", 0),
    "staged": (Kind.GPU, "0", "1", 4),
}


class TestPcieP2p(TransportSuite):
    @pytest.fixture(params=PATHS)
    def harness(self, driver: Driver, request: pytest.FixtureRequest) -> Harness:
        kind, there, here, nvlinks = PATHS[request.param]
        if driver.device_count() < 2 and {here, there} == {"0", "1"}:
            pytest.skip("one GPU only")
        return gpu_rig.harness("pcie_p2p", kind, driver, there, here, nvlinks=nvlinks)
