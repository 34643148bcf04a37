"""An engine without torch uses each layer as it comes: `LayerEvent.views`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mx
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx import config
from mx.views import host_view
from tests.support.commands import Run, environment, serve

pytestmark = pytest.mark.integration

#: In a process that has neither torch nor numpy. It reports each layer when it is there, and all
#: of them again after the pull was closed.
ENGINE = """
import hashlib, json, sys
import mx


def seen(layers):
    return {
        name: [each.dtype, each.shape, each.stride, hashlib.sha256(each.view).hexdigest()]
        for views in layers
        for name, each in views.items()
    }


with mx.pull("m", coordinator=sys.argv[1], transport=sys.argv[2] or None) as pull:
    layers = pull.layers()
    first = next(layers)
    kept = [first.views()]
    used = seen(kept)
    early = pull.report is None
    sys.stdin.readline() if early else None
    kept += [layer.views() for layer in layers] if sys.argv[3] == "all" else []
    assert all(each.view.readonly for views in kept for each in views.values())
gone = ""
try:
    first.views()
except mx.errors.ClosedError as error:
    gone = str(error)
print(json.dumps({"early": early, "first": used, "all": seen(kept), "gone": gone}))
"""


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "no-torch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
    )
    env = environment()
    return env | {"PYTHONPATH": f"{folder}{os.pathsep}{env['PYTHONPATH']}"}


def engine(coordinator: str, env: dict[str, str], transport: str, how: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, coordinator, transport, how],
        env=env,
        input="\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_the_file(path: Path) -> dict[str, list[Any]]:
    """What an engine should see of each tensor."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in about["data_offsets"])
            shape = about["shape"]
            stride = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
            digest = hashlib.sha256(data[first:last]).hexdigest()
            found[name] = [about["dtype"], shape, stride, digest]
    return found


@pytest.mark.parametrize("transport", ["", "tcp"], ids=["attached", "tcp"])
def test_without_torch_each_layer_has_its_bytes(
    run: Run, coordinator: str, tmp_path: Path, without_torch: dict[str, str], transport: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, llama_shapes(3, 64, 128, 300))
    serve(run, path, "m", coordinator)
    found = engine(coordinator, without_torch, transport, "all")
    right = in_the_file(path)
    assert found["all"] == right
    assert found["first"] == {"model.embed_tokens.weight": right["model.embed_tokens.weight"]}
    assert "closed" in found["gone"]


def test_without_torch_a_layer_is_used_before_the_pull_ends(
    run: Run, coordinator: str, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    path = tmp_path / "model.safetensors"
    write_checkpoint(path, llama_shapes(4, 1024, 2048, 1024))  # 80 MB: a minute and more
    serve(run, path, "m", coordinator, "--max-bandwidth", "1MB/s")
    found = engine(coordinator, without_torch, "tcp", "first")
    name = "model.embed_tokens.weight"
    assert found["early"] is True
    assert found["first"] == found["all"] == {name: in_the_file(path)[name]}


def test_views_of_memory_of_the_callers_are_that_memory(
    run: Run, coordinator: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(1)
    save_file({f"layers.{i}.w": rng.random((9, i + 3), np.float32) for i in range(3)}, path)
    serve(run, path, "m", coordinator)
    right = load_file(path)
    into = {name: np.zeros_like(each) for name, each in right.items()}
    settings = config.load({"streams": 2})
    with mx.pull("m", into=into, coordinator=coordinator, settings=settings) as pull:
        views = {name: each for layer in pull.layers() for name, each in layer.views().items()}
        pull.wait()
    for name, each in views.items():
        found = np.frombuffer(host_view(each.view), np.float32).reshape(each.shape)
        assert np.array_equal(found, right[name]) and np.shares_memory(found, into[name])
