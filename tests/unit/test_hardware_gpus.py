"""What is said of GPUs where NVML is not; tests/gpu/test_nvml.py reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from mx.hardware import gpus
from mx.hardware.gpus import GpusFound, read_gpus


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with NVIDIA's driver."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path


def test_without_a_driver_the_reason_is_that(tmp_path: Path) -> None:
    if any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/proc/driver/nvidia")):
        pytest.skip("this machine has NVIDIA's driver")

    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    for found in (read_gpus(load, tmp_path), read_gpus(root=tmp_path)):
        assert found == GpusFound(reason="there is no NVIDIA driver on this machine")


def test_without_the_package_the_reason_says_what_to_install(root: Path) -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    assert "pip install '.[cuda13]'" in read_gpus(load, root).reason


def test_the_real_nvml_of_a_machine_without_its_library(root: Path) -> None:
    if any(Path(sign).exists() for sign in ("/dev/nvidiactl", "/proc/driver/nvidia")):
        pytest.skip("this machine has NVIDIA's driver")
    assert read_gpus(root=root).reason.startswith("NVML does not start: ")


def test_what_is_used_of_nvml_is_there() -> None:
    """The names, in the installed nvidia-ml-py."""
    source = Path(gpus.__file__).read_text()
    used = {part.split("(")[0].split(",")[0].split(")")[0].split()[0]
            for part in source.split("nvml.")[1:]}  # fmt: skip
    used = {name.rstrip(":") for name in used if name.startswith(("nvml", "NVML"))}
    assert len(used) > 15
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []
