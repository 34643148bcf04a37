"""From disk into a GPU's memory over the stand-in driver: what digests beside the weights describe
is read into slots by O_DIRECT, or by a stand-in for cuFile, copied, and hashed by the GPU; and what
goes wrong on the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx import api, config
from mx.core.packaging import DIGESTS
from mx.units import MIB
from tests.support.commands import free_port
from tests.support.driver.disk_pulls import pulled
from tests.support.driver.logs import copied
from tests.support.driver.programs import each_major, each_major_at_leisure

pytestmark = [pytest.mark.integration]

LAYERS = 4
#: cuFile as with nvidia-fs.
_DIRECT: dict[str, Any] = {"CUFILE": "direct"}
SETTINGS = config.load(environ={"HOME": "/nonexistent"})


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint as a pull has written it, of tensors that begin anywhere, and its pin."""
    random = np.random.default_rng(1)
    sizes = (3 * MIB, 17, 5_000_011, MIB)
    tensors = {
        f"model.layers.{layer}.w{number}": random.integers(0, 256, size, dtype=np.uint8)
        for layer in range(LAYERS)
        for number, size in enumerate(sizes)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    path = tmp_path / "model.safetensors"
    with api.pull("m", path=path, out=out, settings=SETTINGS) as pull:
        return out, pull.wait(60).pin


@each_major
def test_each_layer_is_read_into_slots_and_hashed_by_the_gpu(
    major: int, folder: tuple[Path, str]
) -> None:
    said, log = pulled(major, folder)
    nbytes = said["bytes"]
    assert said["layers_ready"] == list(range(LAYERS))
    # Nothing is hashed by the processor, which reads each window once and copies nothing: what goes
    # up is that, and the table of digests.
    assert said["hashed"] == 0 and nbytes <= said["read"] <= 1.01 * nbytes
    assert nbytes <= copied(log, "cuMemcpyHtoDAsync") <= 1.01 * nbytes
    assert [path["transport"] for path in said["paths"]] == ["disk"]


_CHANGED = """
path = Path(FOLDER) / "model.safetensors"
data = bytearray(path.read_bytes())
data[-100] ^= 1
path.write_bytes(data)
"""
#: After the headers were read and the files opened, before the first window.
_LATER = """
from pathlib import Path
from mx.snapshots.device import DiskSession
begin = DiskSession.__init__
def begun(self, *arguments, **options):
    {body}
    begin(self, *arguments, **options)
DiskSession.__init__ = begun
"""
_TRUNCATED = _LATER.format(body='os.truncate(FOLDER + "/model.safetensors", 20 << 20)')
_REPLACED = _LATER.format(
    body='os.replace(FOLDER + "/other", FOLDER + "/model.safetensors"), '
    'os.truncate(FOLDER + "/model.safetensors", 5)'
)
_EIO = """
import errno
pread = os.preadv
def fails(fd, views, position):
    if position > 20 << 20:
        raise OSError(errno.EIO, "Input/output error")
    return pread(fd, views, position)
os.preadv = fails
"""


@each_major_at_leisure
@pytest.mark.parametrize(
    ("before", "error", "says", "settings"),
    [
        ("from pathlib import Path" + _CHANGED, "DigestError", "the model's identity", {}),
        (_TRUNCATED, "CheckpointError", "truncated", {}),
        (_EIO, "LocalError", "Input/output error", {}),
        ("from pathlib import Path" + _CHANGED, "DigestError", "the model's identity", _DIRECT),
        (_TRUNCATED, "CheckpointError", "truncated", _DIRECT),
        (_EIO, "LocalError", "Input/output error", _DIRECT | {"FAIL": "cuFileRead:-9:1"}),
    ],
    ids=["changed", "truncated", "eio", "changed-gds", "truncated-gds", "eio-gds"],
)
def test_what_the_disk_does_wrong_is_an_error_and_no_wrong_byte(
    major: int,
    folder: tuple[Path, str],
    before: str,
    error: str,
    says: str,
    settings: dict[str, Any],
) -> None:
    said, _ = pulled(major, folder, before, **settings)
    assert said["error"] == error and says in said["message"]


@each_major_at_leisure
def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was_opened(
    major: int, folder: tuple[Path, str]
) -> None:
    (folder[0] / "other").write_bytes(b"other")
    before = _REPLACED + "check = lambda found: None\n"
    assert pulled(major, folder, before)[0]["layers_ready"] == list(range(LAYERS))


@each_major_at_leisure
def test_digests_that_lie_change_nothing(major: int, folder: tuple[Path, str]) -> None:
    file = folder[0] / DIGESTS
    file.write_bytes(file.read_bytes()[:-32] + bytes(32))
    said, _ = pulled(major, folder)
    # The layer whose page lies is hashed by the processor before it is read.
    assert said["layers_ready"] == list(range(LAYERS)) and said["verified"] == "digest"


@each_major_at_leisure
@pytest.mark.parametrize(
    ("call", "settings"), [("cuMemHostAlloc", {}), ("cuStreamCreate", _DIRECT)]
)
def test_a_gpu_without_memory_is_an_error(
    major: int, folder: tuple[Path, str], call: str, settings: dict[str, Any]
) -> None:
    said, _ = pulled(major, folder, FAIL=f"{call}:-1:CUDA_ERROR_OUT_OF_MEMORY", **settings)
    assert "error" in said and said["layers_ready"] == []


# --- by cuFile


@each_major
def test_by_cufile_no_processor_touches_a_byte(major: int, folder: tuple[Path, str]) -> None:
    said, log = pulled(major, folder, **_DIRECT)
    nbytes = said["bytes"]
    assert said["layers_ready"] == list(range(LAYERS))
    assert said["how"] == "by cufile" and said["read"] == said["hashed"] == 0
    # What goes up is the table of digests: 80 bytes a block, and so are its pages.
    assert copied(log, "cuMemcpyHtoDAsync") < nbytes // 1000
    assert copied(log, "cuMemcpyDtoDAsync") == nbytes
    assert nbytes <= copied(log, "cuFileRead") <= 1.02 * nbytes


@each_major_at_leisure
@pytest.mark.parametrize(
    ("settings", "gpudirect", "says"),
    [
        ({}, "auto", "there is no libcufile"),
        ({"CUFILE": "direct"}, "off", "is off"),
        ({"CUFILE": "compat"}, "auto", "compatibility mode"),
        ({"CUFILE": "refused"}, "always", "nvidia-fs driver is not loaded"),
        (_DIRECT | {"FAIL": "cuFileBufRegister:1:5036"}, "auto", "GPU_MEMORY_PINNING_FAILED"),
        (_DIRECT | {"FAIL": "cuFileHandleRegister:1:5008"}, "auto", "IO_NOT_SUPPORTED"),
    ],
    ids=["absent", "off", "compat", "refused", "memory", "file-system"],
)
def test_where_cufile_is_of_no_use_slots_are_and_the_report_says_why(
    major: int,
    folder: tuple[Path, str],
    settings: dict[str, Any],
    gpudirect: str,
    says: str,
) -> None:
    said, log = pulled(major, folder, gpudirect=gpudirect, **settings)
    assert said["how"].startswith("through pinned slots: ") and says in said["how"]
    assert said["layers_ready"] == list(range(LAYERS)) and not copied(log, "cuFileRead")


@each_major_at_leisure
def test_compatibility_mode_is_said_where_it_is_asked_for(
    major: int, folder: tuple[Path, str]
) -> None:
    said, _ = pulled(major, folder, gpudirect="always", CUFILE="compat")
    assert said["how"].startswith("by cufile in compatibility mode") and not said["read"]


@each_major_at_leisure
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cuFileRead:5:5030", "error 5030"),  # cuFile's own
        ("cuFileRead:5:1", "the file system does"),
        ("cuFileRead:5:2", "did not verify"),  # the GPU finds that what is said to be there is not
        ("cuFileRead:1:5030", "error 5030"),
    ],
)
def test_when_cufile_fails_slots_go_on(
    major: int, folder: tuple[Path, str], fault: str, says: str
) -> None:
    said, _ = pulled(major, folder, **_DIRECT, FAIL=fault)
    how = said["how"]
    assert how.startswith("by cufile, then through pinned slots: ") and says in how
    assert said["layers_ready"] == list(range(LAYERS)) and said["read"]
    assert "error" not in said


_INTO = """
from tests.support.driver.arrays import empty
from mx import Shard
want = load_file(FOLDER + "/model.safetensors")
if {slices}:
    want = {{name: values[len(values) // 2 :] for name, values in want.items() if name[-1] in "03"}}
    options = {{"only": list(want), "slices": {{"*": Shard(0, 1, 2)}}}}
else:
    options = {{}}
options["into"] = into = empty({{name: each.shape for name, each in want.items()}}, dtype="|u1")
def check(found):
    for name, values in want.items():
        assert (into[name].get() == values).all(), name
"""


@each_major_at_leisure
@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("settings", [{}, _DIRECT], ids=["slots", "gds"])
def test_into_an_engines_own_memory(
    major: int, folder: tuple[Path, str], settings: dict[str, Any], slices: bool
) -> None:
    done = "\nimport gc\ninto = None\noptions.clear()\ngc.collect()\n"
    before = _INTO.format(slices=slices)
    said, _ = pulled(major, folder, before, after=done, **settings)
    assert said["layers_ready"] == list(range(LAYERS)) and "error" not in said


_INTERRUPTED = """
first = threading.Event()
begin = api.pull
def pulls(*arguments, **options):
    pull = begin(*arguments, **options)
    pull.on_layer(lambda event: first.set())
    def wait(seconds):
        assert first.wait(60)
        raise MxError("interrupted")
    pull.wait = wait
    return pull
api.pull = pulls
"""


@each_major_at_leisure
@pytest.mark.parametrize("settings", [{}, _DIRECT], ids=["slots", "gds"])
def test_a_pull_that_is_interrupted_gives_everything_back(
    major: int, folder: tuple[Path, str], settings: dict[str, Any]
) -> None:
    said, _ = pulled(major, folder, _INTERRUPTED, LATE_US=20_000, **settings)
    assert said["message"] == "interrupted"


_NEXT = (
    _EIO
    + """
settings = config.load({{"object_url": "file://" + FOLDER + "/../copy"}}, environ={{}})
options |= {{"source": "auto", "fallback": FOLDER, "coordinator": "127.0.0.1:{port}"}}
begin = api.pull
api.pull = lambda *arguments, path, **options: begin(*arguments, **options)
"""
)


@each_major_at_leisure
@pytest.mark.parametrize(
    "settings", [{}, _DIRECT | {"FAIL": "cuFileRead:-9:1"}], ids=["slots", "gds"]
)
def test_the_next_store_has_what_the_disk_can_not_read(
    major: int, folder: tuple[Path, str], settings: dict[str, Any]
) -> None:
    shutil.copytree(folder[0], folder[0].parent / "copy")
    said, _ = pulled(major, folder, _NEXT.format(port=free_port()), **settings)
    assert said["layers_ready"] == list(range(LAYERS)), said
    disk, objects = [each for each in said["steps"] if each["bytes"]]
    assert disk["step"] == "disk" and "Input/output error" in disk["reason"]
    assert objects["step"] == "objects" and said["fallback"] == "objects"


_TWICE = """
from concurrent.futures import ThreadPoolExecutor
def one(number):
    how = {"path": FOLDER, "device": f"cuda:{number % 2}", "settings": settings}
    with api.pull("m@" + PIN, **how) as pull:
        assert pull.wait(120).paths[0].detail == "by cufile"
        check(pull)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(one, range(4)))
"""


@each_major_at_leisure
def test_several_pulls_of_a_process_read_by_cufile_at_once(
    major: int, folder: tuple[Path, str]
) -> None:
    said, _ = pulled(major, folder, _TWICE, **_DIRECT)
    assert said["how"] == "by cufile"
