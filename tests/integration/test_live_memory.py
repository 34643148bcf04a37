"""Tensors that are lent where they are, by real processes, and what readers see of them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mx import api, config
from mx.errors import ConfigError, IncompleteError, NoSourceError, PathError
from mx.testing.certificates import certificates
from mx.units import MIB
from tests.integration.lending import (
    equal,
    everything,
    lender,
    net,
    pointers,
    pss_bytes,
    small_tensors,
    tls_coordinator,
    tls_settings,
)
from tests.integration.scripts import ran
from tests.support.commands import Run
from tests.support.outcomes import error_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("torch_is_forked"),
]

#: What mx needs for itself, and may grow by beside the model, which is larger.
OWN_BYTES = 96 * MIB
WIDE, DEEP = 2048, 5


def moved(pull: api.Pull) -> set[str]:
    return {path.transport for path in pull.wait(60).paths}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_module_fills_another_and_neither_is_copied(coordinator: str, transport: str) -> None:
    target = net(2, WIDE, DEEP)
    everything(target)["embed.weight"].zero_()
    with lender(coordinator, wide=WIDE, deep=DEEP) as source:
        nbytes = sum(t.nbytes for t in everything(target).values())
        assert nbytes > 2 * OWN_BYTES
        where, before = pointers(target), pss_bytes()
        with api.pull("m", coordinator=coordinator, into=target, transport=transport) as pull:
            assert moved(pull) == {transport}
            assert pss_bytes() - before < OWN_BYTES
            assert source.said["grown"] < OWN_BYTES
            assert pss_bytes(source.said["pid"]) < nbytes + 4 * OWN_BYTES
            assert all(
                tensor.data_ptr() == where[name] for name, tensor in pull.state_dict().items()
            )
        assert pointers(target) == where
        expected = net(1, WIDE, DEEP)
        for block in (*target.layers, *expected.layers):
            block.rotary.zero_()
        assert equal(target, expected)


def test_over_tls(run: Run, settings: config.Settings, tmp_path: Path) -> None:
    settings = tls_settings(settings, certificates(tmp_path)[0])
    coordinator = tls_coordinator(run, settings)
    target = net(2)
    files = {name: getattr(settings, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    with (
        lender(coordinator, settings=files, non_persistent_buffers=True),
        api.pull(
            "m", coordinator=coordinator, into=target, transport="tcp", settings=settings
        ) as pull,
    ):
        assert moved(pull) == {"tcp"}
        assert equal(target, net(1))


@pytest.mark.parametrize("hold", [False, True])
def test_lent_memory_is_pulled_into_memory_of_mx(coordinator: str, hold: bool) -> None:
    """It can't be attached: it may change."""
    with (
        lender(coordinator, non_persistent_buffers=True),
        api.pull("m", coordinator=coordinator, hold=hold, verify="strong") as pull,
    ):
        assert pull.wait(60).verified == "strong"
        expected = everything(net(1))
        found = pull.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_a_model_that_is_lent_has_the_size_of_its_tensors(coordinator: str) -> None:
    """However far apart they are in the address space."""
    with lender(coordinator), api.pull("m", coordinator=coordinator) as pull:
        nbytes = pull.wait(60).bytes
        (model,) = api.list_models(coordinator=coordinator)
        assert model.nbytes == nbytes


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("count", [5_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_many_small_tensors(coordinator: str, transport: str, count: int) -> None:
    lent, target = small_tensors(1, count), small_tensors(2, count)
    with (
        lender(coordinator, small=count),
        api.pull("m", coordinator=coordinator, into=target, transport=transport) as pull,
    ):
        assert moved(pull) == {transport}
        assert all(torch.equal(target[name], lent[name]) for name in lent)


@pytest.mark.parametrize(
    ("ending", "second"),
    [
        ("killed", False),
        ("stopped", True),
        pytest.param("killed", True, marks=pytest.mark.long),
        pytest.param("stopped", False, marks=pytest.mark.long),
    ],
)
def test_a_lender_that_is_lost_in_mid_pull(
    coordinator: str, settings: config.Settings, ending: str, second: bool
) -> None:
    target = net(2, 768)
    settings = replace(settings, stall_timeout_s=1.0)
    with lender(coordinator, wide=768, max_bandwidth="8MB/s") as first:
        pull = api.pull(
            "m",
            coordinator=coordinator,
            into=target,
            transport="tcp",
            wait_s=20 if second else 0,
            settings=settings,
        )
        with pull:
            next(pull.layers())
            if second:
                with lender(coordinator, wide=768):
                    first.signal(signal.SIGKILL if ending == "killed" else signal.SIGSTOP)
                    pull.wait(60)
                expected = net(1, 768)
                for block in (*target.layers, *expected.layers):
                    block.rotary.zero_()
                assert equal(target, expected)
                return
            first.signal(signal.SIGKILL if ending == "killed" else signal.SIGSTOP)
            error = error_of(pull, 60)
            assert isinstance(error, IncompleteError | NoSourceError | PathError)
            assert "do not use it" in error.hint


def test_memory_that_is_lent_is_not_filled_and_may_be_lent_twice(coordinator: str) -> None:
    module = net(1)
    other = net(2)
    other.head.weight = other.embed.weight = module.embed.weight  # shares one storage
    with (
        api.serve(module, model="m", coordinator=coordinator, copy=False),
        api.serve(module, model="n", coordinator=coordinator, copy=False) as twice,
    ):
        for target in (module, other):
            with api.pull("m", coordinator=coordinator, into=target) as pull:
                error = error_of(pull)
            assert isinstance(error, ConfigError)
            assert "lent" in error.message and "close" in error.hint
            assert "do not use" not in error.hint
        assert twice.stats()
    with (
        lender(coordinator, seed=3),
        api.pull("m", coordinator=coordinator, into=module, revision="") as free,
    ):
        error_or_done = free.wait(60)
        assert error_or_done.bytes


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"a": torch.empty(3, device="meta")}, "to_empty"),
        ({"a": torch.zeros(8)[::2]}, "copy=True"),
        ({"a": [1.0]}, "numpy"),
        ("/models/m", "copy=False"),
    ],
)
def test_what_can_not_be_lent_is_refused(coordinator: str, weights: object, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        api.serve(weights, model="m", coordinator=coordinator, copy=False)
    assert why in f"{caught.value.message} {caught.value.hint}"


def test_a_forked_child_of_a_lender_gets_an_error(coordinator: str) -> None:
    code = """
from tests.integration.lending import net
module = net(1)
source = api.serve(module, model='m', coordinator=coordinator, copy=False)
pid = os.fork()
if not pid:
    signal.alarm(60)
    for call in (lambda: source.update(module.state_dict()), source.drain,
                 lambda: api.pull('m', coordinator=coordinator, into=module)):
        try:
            call()
        except ForkError as error:
            assert 'spawn' in error.hint
        else:
            raise AssertionError('not refused')
    source.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
target = net(2)
with api.pull('m', coordinator=coordinator, into=target, transport='tcp') as pull:
    pull.wait()
assert target.embed.weight.equal(module.embed.weight)
source.close()
"""
    code_, _, err = ran(code, coordinator, imported="torch")
    assert code_ == 0, err


def test_a_lender_has_no_file_descriptor_for_each_tensor(coordinator: str) -> None:
    many = {f"w{i}": torch.zeros(1) for i in range(2000)}
    before = len(os.listdir("/proc/self/fd"))
    with api.serve(many, model="m", coordinator=coordinator, copy=False):
        assert len(os.listdir("/proc/self/fd")) < before + 40


def test_tensors_without_a_byte(coordinator: str) -> None:
    lent, into = ({"a": torch.empty(0, 4), "b": torch.empty(0)} for _ in range(2))
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False),
        api.pull("m", coordinator=coordinator, into=into) as pull,
    ):
        assert pull.wait(60).bytes == 0
