"""The cuda_ipc transport keeps the rules: within a GPU and between two, both kinds of memory."""

import pytest

from mx.cuda.bindings import Driver
from mx.testing.conformance import Harness, Kind, TransportSuite
from tests.support import gpu_rig


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
@pytest.mark.parametrize("here", ["0", "1"], ids=["same GPU", "other GPU"])
class TestCudaIpc(TransportSuite):
    @pytest.fixture
    def harness(self, driver: Driver, here: str, kind: Kind) -> Harness:
        if int(here) >= driver.device_count():
            pytest.skip("one GPU only")
        return gpu_rig.harness("cuda_ipc", kind, driver, "0", here, nvlinks=4)
