"""A decode step of transformers' that a publisher captures and a replica launches, over the
stand-in driver; and replicas that can't use it, which decode as always."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mx.artifacts import publish
from mx.artifacts.recording import record
from mx.artifacts.trust import make_key
from mx.graphs.message import decode, encode
from tests.support.commands import Run
from tests.support.driver import build, step_kernels, step_model
from tests.support.driver.logs import calls
from tests.support.driver.programs import each_major_at_leisure
from tests.support.libraries import fatbin, library

pytestmark = [pytest.mark.integration, each_major_at_leisure]

POSITIONS, SCRATCH_NBYTES = 16, 64 << 20
_BOOT = """
import sys
from tests.support.driver.step_model import StandInCuda
cuda = StandInCuda({library!r})
"""
_CAPTURE = """
from mx.engines.transformers.graphs import main
main()
"""
#: Records a graph.
_RECORD = """
import sys
from pathlib import Path
from mx import graphs
graphs.record(graphs.Package(Path(sys.argv[1]).read_bytes(), {}, {}, sys.argv[2]), sys.argv[3])
"""
_REPLICA = """
import gc, logging
import torch
import mx.graphs
from mx.cuda.device import DeviceMemory
from mx.engines.transformers import Decode, decoding, load
from mx.memory.device import _SPARE_BYTES
from tests.support.driver.step_model import weights

said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("mx").addHandler(Said(logging.WARNING))

def loaded(name="m", positions=16, **more):
    given = dict(device="cuda:1", attn_implementation="eager", trust={trust!r}) | more
    return load(name, coordinator={address!r}, graphs=Decode(1, positions), **given)

def generated(model, *prompt, count=6):
    cache = decoding(model).cache()
    given = dict(past_key_values=cache, do_sample=False, disable_compile=True)
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, **given).tolist()[0]

def tries(name, model):
    print(name, generated(model, 5, 6, 7), len(said), decoding(model).reason, sep="|", flush=True)
    said.clear()
"""
_USES = """
model = loaded()
tries("graph", model)
with torch.no_grad():  # the same bits as without a graph
    def logits(cache):
        for token in (5, 6, 7, 50):
            given = model.prepare_inputs_for_generation(
                torch.tensor([[token]]), past_key_values=cache, use_cache=True,
                attention_mask=torch.ones(1, int(cache.get_seq_length()) + 1, dtype=torch.long),
            )
            found = model(**given).logits
        return found
    cache = decoding(model).cache()
    one = logits(cache)
    other = logits(type(cache)(config=model.config, max_cache_len=16))
    print("bits", torch.equal(one, other), one.abs().sum() > 0, mx.graphs.counts())
kept = model.head.weight
del model, cache, one, other
gc.collect()
tries("kept", loaded())  # what is left of a model keeps the addresses
print("head", torch.equal(kept, weights()["head.weight"]))
del kept
said.clear()
gc.collect()
model = loaded()
tries("again", model)
model.head.weight = torch.nn.Parameter(cuda.gpu.moved(model.head.weight.data))
tries("changed", model)
del model
gc.collect()
"""
_REFUSALS = """
tries("no trust", loaded(trust=None))
tries("no set", loaded("none"))
tries("size", loaded(positions=32))
tries("signer", loaded(trust={stranger!r}))
tries("pin", loaded("pin"))
tries("environment", loaded(attn_implementation="sdpa"))
with mx.graphs.region(1 << 20, device=1):
    tries("occupied", loaded())
gpu = cuda.gpu.device
gc.collect()
memory = DeviceMemory(gpu, gpu.memory_info()[0] - _SPARE_BYTES - (50 << 20))  # a region has 64
tries("memory", loaded())
memory.close()
tries("golden", loaded("golden"))
"""
#: What is said of each try of `_USES` and `_REFUSALS` that has no graph.
_REASONS = {
    "kept": "occupied: ",
    "changed": "the model was changed",
    "no trust": "no trust file is named",
    "no set": "no set of the kind cuda-graph is listed for none",
    "size": "has no graph decode.1x32",
    "signer": "which the trust file does not name",
    "pin": "it is for the weights ",
    "environment": "environment: configuration: 'class=StepModel",
    "occupied": "occupied: ",
    "memory": "memory: ",
    "golden": "golden: a replay gives other bytes of the output ",
}


def _trust(folder: Path, name: str, key: str) -> str:
    path = folder / name
    path.write_text(f"[[signer]]\nname = 'farm'\nkey = '{key}'\nmodels = ['*']\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_decode_step_travels(major: int, tmp_path: Path, run: Run, coordinator: str) -> None:
    images = [replace(each, cubin=fatbin(each.cubin)) for each in step_kernels.images()]
    path = library(
        tmp_path / "libtorch_cuda.so", "0xabcd", bytes(8).join(each.cubin for each in images)
    )
    sized = [struct.pack("<Q", len(each.cubin)) + each.cubin for each in images]
    path.with_suffix(".images").write_bytes(b"".join(sized))
    settings: dict[str, object] = {"HOST_ACCESS": True, "REUSE_ADDRESSES": True}
    settings["KERNELS"] = build.kernels_library(90, tuple(images))
    env = build.environment(major, settings) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    step_model.save(tmp_path / "m")
    at = ("--json", "--coordinator", coordinator)
    step_model.save(tmp_path / "other", seed=4)
    for name, folder in (("m", "m"), ("none", "m"), ("golden", "m"), ("pin", "other")):
        run("serve", str(tmp_path / folder), "--model", name, *at).json()

    boot = _BOOT.format(library=str(path))
    asked = ["m", "batch=1", f"positions={POSITIONS}", f"scratch_nbytes={SCRATCH_NBYTES}"]
    asked += ["device=cuda:1", "attn_implementation=eager", f"coordinator={coordinator}"]
    command = [sys.executable, "-c", boot + _CAPTURE, *asked]
    with mock.patch.dict("os.environ", env):
        assert record(tmp_path / "recorded", command) == 0
    (graph_file,) = (tmp_path / "recorded").rglob("decode.1x16")
    (graph,) = decode(graph_file.read_bytes())
    assert {each.name for each in graph.kernels} == {"attend", "advance", "matvec"}
    assert all(each.fatbin is not None for each in graph.kernels) and not graph.images
    wrong = replace(graph.outputs[0], digest=bytes(32))
    changed = encode(replace(graph, outputs=(wrong, *graph.outputs[1:])))
    (tmp_path / "changed").write_bytes(changed)
    command = [sys.executable, "-c", _RECORD, str(tmp_path / "changed"), graph.pin, "decode.1x16"]
    with mock.patch.dict("os.environ", env):
        assert record(tmp_path / "changed graphs", command) == 0
    key = make_key(tmp_path / "key")
    sets = {"m": "recorded", "pin": "recorded", "golden": "changed graphs"}
    for name, recorded in sets.items():
        out = tmp_path / f"{name}.safetensors"
        publish(tmp_path / recorded, model=name, key=tmp_path / "key", out=out, graphs=True)
        run("serve", "--artifacts", str(out), *at).json()

    trust = _trust(tmp_path, "trust.toml", key)
    stranger = _trust(tmp_path, "stranger.toml", make_key(tmp_path / "another key"))
    names = {"trust": trust, "stranger": stranger, "address": coordinator}
    log = tmp_path / "log"
    log.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", boot + (_REPLICA + _USES + _REFUSALS).format(**names)],
        env=env | {"MX_STANDIN_LOG": str(log)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told = {line.split("|")[0]: line.split("|")[1:] for line in ended.stdout.splitlines()}
    assert told.pop("head True") == []
    (bits,) = (line for line in told if line.startswith("bits"))
    told.pop(bits)
    assert bits.startswith("bits True tensor(True) {'restored': 1, 'proved': 1, 'launched': 1}")
    assert told["pin"][0] == str(step_model.greedy((5, 6, 7), 6, seed=4))
    right = str(step_model.greedy((5, 6, 7), 6))
    assert all(each[0] == right for name, each in told.items() if name != "pin")
    used = [name for name, (_, warned, reason) in told.items() if (warned, reason) == ("0", "")]
    assert used == ["graph", "again"]
    refused = {name: each[1:] for name, each in told.items() if name not in used}
    assert all(warned == "1" for warned, _ in refused.values()), refused  # one line says why
    for name, says in _REASONS.items():
        assert says in refused.pop(name)[1], name
    assert refused == {}
    # Two for each proof, five for the tokens after the first, four of `logits`; one that differs.
    assert [name for name, _ in calls(log)].count("cuGraphLaunch") == 2 * (2 + 5) + 4 + 1
