"""The table that `python -m tests.gpu` ends with, and the wheels that it names."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.claims import CLAIMS, claim_of, table
from tests.gpu.wheels import wheels

HERE = Path(__file__).parents[1] / "gpu"


def test_each_test_of_gpus_is_of_a_claim_and_each_claim_has_tests() -> None:
    files = [file.name for file in HERE.glob("test_*.py")]
    assert not [name for name in files if claim_of(f"{name}::test_it") == "others"]
    for beginnings in CLAIMS.values():
        for beginning in beginnings:
            file, _, test = beginning.partition("::")
            assert f"def {test}" in (HERE / file).read_text() or not test


def test_the_table_counts_how_the_tests_of_a_claim_end() -> None:
    lines = table(
        [
            ("test_transports.py::test_torch_allocations[True]", "skipped"),
            ("test_transports.py::test_host_to_device", "passed"),
            ("test_ends.py::test_reach", "failed"),
            ("test_new.py::test_something", "passed"),
        ]
    )
    found = {line[:20].strip(): line.split()[-3:] for line in lines}
    assert found["torch's own allocati"] == ["0", "0", "1"]
    assert found["attach and copy betw"] == ["1", "1", "0"]
    assert found["others"] == ["1", "0", "0"]


def test_the_wheels_are_what_mx_needs_and_nothing_of_torch() -> None:
    names = [each.partition("==")[0] for each in wheels()]
    assert names.count("cuda-bindings") == 2
    assert {"grpcio", "numpy", "pytest", "cffi"} <= {*names}
    assert not {"torch", "triton", "vllm"} & {*names}
