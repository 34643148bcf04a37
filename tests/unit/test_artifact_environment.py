"""What compiled code depends on, by field; read without torch and without starting CUDA."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.artifacts import environment
from mx.artifacts.environment import differences, here, library
from mx.core.variant import Difference
from mx.hardware import gpus


class NVMLError(Exception):
    """NVML's."""


def test_the_fields_of_this_machine() -> None:
    found = here(fields={"configuration": "c0ffee", "tp": "0/2"})
    assert found["configuration"] == "c0ffee"
    assert found["tp"] == "0/2"
    assert found["python"].startswith("CPython 3.")
    assert found["platform"].startswith("linux-")
    assert found["threads"] == str(len(os.sched_getaffinity(0))) or "OMP_NUM_THREADS" in os.environ
    assert all(text and len(text) <= 512 for text in found.values()), found
    assert found["isa"]
    if shutil.which("g++"):
        assert "version" in found["compiler"]


def test_only_what_is_asked_for_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(environment, "read_gpus", never)
    assert list(here(fields={"tp": "0/2"}, names=["python", "isa"])) == ["python", "isa"]


def test_torch_is_neither_imported_nor_cuda_started() -> None:
    torch = pytest.importorskip("torch")
    code = (
        "import sys; from mx.artifacts.environment import here; found = here();"
        "assert 'torch' not in sys.modules; print(found['torch'], found['torch_path'],"
        "found.get('cuda', None), found['torch_build'])"
    )
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    version, path, cuda, build = said.stdout.split()
    assert version == torch.__version__
    assert path == os.path.dirname(torch.__file__)
    assert cuda == str(torch.version.cuda)
    assert len(build) == 16


def package(site: Path, name: str, code: bytes, *, record: bool) -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_bytes(code)
    if record:
        info = site / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "RECORD").write_text(
            f"{name}/__init__.py,sha256={len(code)},1\n"
            f"../../../bin/{name},sha256={site.name},1\n{name}/__pycache__/x.pyc,,\n"
        )


@pytest.mark.parametrize("record", [True, False])
def test_a_build_id_is_of_the_code_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bool
) -> None:
    found = {}
    importlib.invalidate_caches()
    for place, code in (("a", b"x = 1"), ("b", b"x = 1"), ("c", b"x = 20")):
        name = "artifact_sample"
        package(tmp_path / place, name, code, record=record)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place))
            found[place] = library(name)
            importlib.invalidate_caches()
    assert found["a"] == found["b"] != found["c"]
    assert found["a"][0] == ("1.2" if record else "")
    assert library("no_such_package") == ("", "")


def test_an_engine_that_is_not_there_agrees_with_no_set() -> None:
    theirs = {"engine": "no_such_engine", "engine_version": "1"}
    ours = here("no_such_engine", names=theirs)
    assert differences(ours, theirs) == [Difference("engine_version", "", "1")]


def test_a_difference_names_the_field_ours_and_theirs() -> None:
    theirs = {"sm": "sm_90", "torch": "2.13.0", "tp": "0/2"}
    ours = {"sm": "sm_100", "torch": "2.13.0", "driver": "580"}
    assert differences(ours, theirs) == [
        Difference("sm", "sm_100", "sm_90"), Difference("tp", "", "0/2"),
    ]  # fmt: skip
    assert differences({"isa": "avx2 avx512f fma"}, {"isa": "amx_tile avx2 fma"}) == [
        Difference("isa", "avx512f", "amx_tile")
    ]
    assert differences({}, {"isa": "avx2"}) == [Difference("isa", "", "avx2")]


@given(*[st.dictionaries(st.sampled_from("abcde"), st.sampled_from("123"))] * 2)
def test_environments_agree_exactly_if_nothing_differs(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    differ = differences(ours, theirs)
    assert (not differ) == (theirs.items() <= ours.items())
    assert {each.field for each in differ} == {
        name for name in theirs if ours.get(name) != theirs[name]
    }


def test_variables_that_change_the_code_change_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    before = here(names=["isa", "threads", "compiler"])
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    code = "from mx.artifacts.environment import here; print(here(names=['isa', 'threads']))"
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    after = ast.literal_eval(said.stdout)
    assert after["threads"] == "7"
    assert after["isa"] == before["isa"] + " ATEN_CPU_CAPABILITY=avx2"
    assert "compiler" not in here(names=["compiler"])


class Nvml:
    """What `sm_counts` asks of NVML."""

    NVMLError = NVMLError

    def __init__(self, *devices: tuple[tuple[int, int], int | None]) -> None:
        self._devices = devices
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[tuple[int, int], int | None]:
        return self._devices[index]

    def nvmlDeviceGetNumGpuCores(self, handle: tuple[tuple[int, int], int | None]) -> int:
        if handle[1] is None:
            raise NVMLError(3)
        return handle[1]

    def nvmlDeviceGetCudaComputeCapability(
        self, handle: tuple[tuple[int, int], int | None]
    ) -> tuple[int, int]:
        return handle[0]


def test_multiprocessors_of_known_gpus() -> None:
    # T4, A100, H100 SXM, RTX 4090, B200; NVIDIA's data sheets.
    nvml = Nvml(((7, 5), 2560), ((8, 0), 6912), ((9, 0), 16896), ((8, 9), 16384),
                ((10, 0), 18944), ((9, 0), None))  # fmt: skip
    assert gpus.sm_counts(lambda: nvml) == (40, 108, 132, 128, 148, 0)
    assert nvml.open == 0


def test_without_nvml_there_are_no_multiprocessors() -> None:
    def missing() -> None:
        raise ImportError

    assert gpus.sm_counts(missing) == ()


def test_gpus_that_are_hidden_are_no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    from mx.core.topology import Gpu

    one = Gpu(uuid="GPU-1", index=0, name="NVIDIA H100", compute_capability="9.0")
    other = Gpu(uuid="GPU-2", index=1, name="NVIDIA H100", compute_capability="9.0")
    monkeypatch.setattr(
        environment, "read_gpus", lambda: gpus.GpusFound((one, other), driver="580.95.05")
    )
    monkeypatch.setattr(environment, "sm_counts", lambda: (132, 132))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert here(names=environment.GPU_FIELDS) == {
        "gpu": "NVIDIA H100", "sm": "sm_90", "sm_count": "132", "driver": "580.95.05",
    }  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert here(names=environment.GPU_FIELDS) == {}


@pytest.mark.parametrize("engine", ["antigravity_parent.part", "sys", "os", "..", "a/b", "é-"])
def test_what_is_no_package_is_not_imported_or_read(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set names an engine: no code of the name's runs, and the working folder is not read."""
    (tmp_path / "antigravity_parent.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "gone.py").symlink_to("nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert here(engine, names=["engine", "engine_build"]) == {"engine": engine}
