"""The cuda_ipc transport keeps the rules: within a GPU and between two, both kinds of memory."""

import pytest

from mx.testing import conformance
from mx.testing.conformance import Kind
from tests.contract import gpu_rig


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.GPU_VMM])
@pytest.mark.parametrize("here", ["0", "1"], ids=["same GPU", "other GPU"])
@pytest.mark.parametrize("rule", conformance.RULES)
def test_cuda_ipc(rule: str, here: str, kind: Kind) -> None:
    with gpu_rig.gpus() as driver:
        if int(here) >= driver.device_count():
            pytest.skip("one GPU only")
        rig = gpu_rig.harness("cuda_ipc", kind, driver, "0", here, nvlinks=4)
        conformance.check(rule, rig)
