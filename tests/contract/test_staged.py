"""Staging into a GPU keeps every rule of the transport beneath it."""

from __future__ import annotations

import dataclasses
import gc

import pytest

from mx.cuda import driver as cuda
from mx.cuda.device import device_key
from mx.testing import conformance
from mx.testing.bench import HERE
from tests.support.fake_cuda import FakeDriver, fake_uuid

#: What a held sink holds up is its slots: the source has long sent what is in them.
RULES = [rule for rule in conformance.RULES if rule != "counts_readers"]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str, eager: bool) -> None:
    fake = FakeDriver(gpus=1, eager=eager)
    here = dataclasses.replace(HERE, device=device_key(fake_uuid(0)))
    with cuda.installed(fake):
        harness = conformance.Harness("tests.contract.staged_rig:StagedTcp", here=here)
        conformance.check(rule, harness)
    gc.collect()  # a sink may be in a cycle with what it looks at
    assert fake.live() == []
