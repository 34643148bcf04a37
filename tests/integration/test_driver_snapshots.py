"""Snapshots into a GPU's memory over the stand-in driver: an engine's state is thawed as a
checkpoint is read from disk, by slots or by cuFile, hashed by the GPU, into memory of mx's or into
the engine's own pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mx
from mx import config
from mx.snapshots.container import SECTOR_BYTES, WEIGHTS
from mx.units import MIB
from tests.support.driver.disk_pulls import pulled
from tests.support.driver.logs import copied
from tests.support.driver.programs import each_major, each_major_at_leisure

pytestmark = [pytest.mark.integration]

LAYERS = 3
KEY = mx.ProcessingKey(engine="vllm", version="0.32.0", dtype="bf16", state="processed")
DIRECT: dict[str, Any] = {"CUFILE": "direct"}


@pytest.fixture
def frozen(tmp_path: Path) -> tuple[Path, str]:
    """A snapshot of what an engine may hold, of shared and permuted tensors, and its pin."""
    torch.manual_seed(1)
    state = {"embed": torch.randint(0, 256, (MIB,), dtype=torch.uint8)}
    for layer in range(LAYERS):
        for name, shape in (("whole", (1024, 1024)), ("odd", (17,)), ("turned", (1000, 1001))):
            values = torch.randint(0, 256, shape, dtype=torch.uint8)
            state[f"model.layers.{layer}.{name}"] = values.t() if name == "turned" else values
    state["lm_head"] = state["embed"]
    settings = config.load(environ={"HOME": str(tmp_path), "MX_PEER_NAME_KEY": str(tmp_path / "k")})
    report = mx.freeze(state, tmp_path / "s", model="m", variant=KEY, settings=settings)
    return tmp_path / "s", report.pins[0]


#: What a pull is to do with a snapshot, and how its tensors are compared with the file.
_THAWS = """
stored = load_file(FOLDER + "/rank0/weights.safetensors")
options["source"] = "snapshot"
def check(found):
    view, manifest = found.device_buffer(), found.manifest
    host = tensors.state_dict(memoryview(bytearray(spans.peek(view))), manifest.layout)
    assert host.keys() - stored.keys() in ({"lm_head"}, {"embed"}), host.keys()
    assert host["lm_head"].data_ptr() == host["embed"].data_ptr()
    for name, values in stored.items():
        wanted = values.T if name.endswith("turned") else values
        assert (host[name].numpy() == wanted).all(), name
"""


@each_major
@pytest.mark.parametrize("settings", [{}, DIRECT], ids=["slots", "gds"])
def test_a_rank_is_read_and_hashed_as_a_disk_is(
    major: int, frozen: tuple[Path, str], settings: dict[str, Any]
) -> None:
    said, log = pulled(major, frozen, _THAWS, **settings)
    nbytes, direct = said["bytes"], bool(settings)
    assert said["model"] == f"m[{KEY}]" and said["verified"] == "digest"
    assert said["layers_ready"] == list(range(LAYERS + 1))
    assert [path["transport"] for path in said["paths"]] == ["snapshot"]
    # Nothing is hashed by the processor; it reads each window once, or with cuFile none.
    assert said["hashed"] == 0
    if direct:
        assert said["how"] == "by cufile" and said["read"] == 0
        assert copied(log, "cuMemcpyHtoDAsync") < nbytes // 1000
        assert nbytes <= copied(log, "cuFileRead") <= 1.02 * nbytes
    else:
        assert nbytes <= said["read"] <= 1.01 * nbytes
        assert nbytes <= copied(log, "cuMemcpyHtoDAsync") <= 1.01 * nbytes


#: Tensors of an engine's, in memory that sleeps: no other process can map it, and each is filled
#: where it is, with the strides that it has there.
_POOL = """
from tests.support.driver.arrays import DeviceArray, empty
class Strided(DeviceArray):
    @property
    def __cuda_array_interface__(self):
        return super().__cuda_array_interface__ | {"strides": self.strides}
shapes = {name: values.shape for name, values in stored.items()}
options["into"] = into = empty(shapes, kind="pool", dtype="|u1")
for name, array in into.items():
    if name.endswith("turned"):
        array.__class__, array.strides = Strided, (1, array.shape[1])
        array.shape = array.shape[::-1]
(missing,) = {"lm_head", "embed"} - into.keys()
into[missing] = into[next(iter({"lm_head", "embed"} & stored.keys()))]
def check(found):
    for name, values in stored.items():
        assert (into[name].get().reshape(values.shape) == values).all(), name
"""
_DONE = "\nimport gc\ninto = array = None\noptions.clear()\ngc.collect()\n"


@each_major
@pytest.mark.parametrize("settings", [{}, DIRECT], ids=["slots", "gds"])
def test_into_an_engines_pool(
    major: int, frozen: tuple[Path, str], settings: dict[str, Any]
) -> None:
    said, log = pulled(major, frozen, _THAWS + _POOL, after=_DONE, **settings)
    assert "error" not in said and said["layers_ready"] == list(range(LAYERS + 1))
    assert said["hashed"] == 0
    if settings:
        assert said["how"] == "by cufile" and said["read"] == 0
    else:
        assert said["bytes"] <= copied(log, "cuMemcpyHtoDAsync") <= 1.01 * said["bytes"]


@each_major_at_leisure
@pytest.mark.parametrize("settings", [{}, DIRECT], ids=["slots", "gds"])
def test_a_wrong_byte_is_found_by_the_gpu(
    major: int, frozen: tuple[Path, str], settings: dict[str, Any]
) -> None:
    path = frozen[0] / "rank0" / WEIGHTS
    data = bytearray(path.read_bytes())
    data[3 * SECTOR_BYTES] ^= 1
    path.write_bytes(data)
    said, _ = pulled(major, frozen, _THAWS, **settings)
    assert said["error"] == "DigestError" and said["exit"] == 4
