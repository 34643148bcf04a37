"""torch.compile in two processes: the second, in another folder, compiles nothing anew."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mx.artifacts.caches import lay_out, scan, variables
from mx.artifacts.environment import CPU_FIELDS, differences, here
from mx.artifacts.recording import FolderContent, record, recorded
from mx.errors import ArtifactError

pytest.importorskip("torch")
pytestmark = [pytest.mark.integration, pytest.mark.long]

#: Compiles a small model under a watch; prints what it computed, and the report.
CODE = """
import json, os, sys
from pathlib import Path
from mx.artifacts.usage import CacheWatch
root = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
watch = CacheWatch(root)
import torch
if "freeze" in sys.argv:
    import torch._inductor.config
    torch._inductor.config.freezing = True
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((8, 32), float(os.environ.get("SCALE", "1"))))
    def forward(self, x):
        return torch.relu(x * self.scale.exp()).cumsum(1)
with torch.no_grad():
    y = torch.compile(Block())(torch.ones(8, 32))
found = watch.report()
print(json.dumps({"sum": round(float(y.sum()), 2), "state": found.state, "hits": found.hits,
                  "new": found.new_objects, "opened": found.opened, "text": found.text}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderContent, Mapping[str, bytes]]:
    """A recorded cache, whose own folder is gone."""
    folder = tmp_path_factory.mktemp("recording") / "caches"
    assert record(folder, [sys.executable, "-c", CODE]) == 0
    found = recorded(folder)
    data = {file.path: (folder / file.path).read_bytes() for file, _ in found.files}
    folder.rename(folder.parent / "moved")
    return found, data


def run(
    made: tuple[FolderContent, Mapping[str, bytes]], root: Path, python: str = sys.executable,
    **environ: str,
) -> dict[str, Any]:  # fmt: skip
    found, data = made
    files = [file for file, _ in found.files]
    lay_out(files, lambda index: data[files[index].path], root)
    temporary = root.parent / "tmp"  # where Inductor would keep a precompiled header
    temporary.mkdir()
    said = subprocess.run(
        [python, "-c", CODE], check=True, text=True, capture_output=True,
        env={**os.environ, **variables(root), "TMPDIR": str(temporary), **environ},
    ).stdout  # fmt: skip
    left = [path for path in temporary.rglob("*") if path.is_file()]
    report: dict[str, Any] = json.loads(said)
    return {**report, "left": left}


@pytest.mark.timeout(600)
def test_a_second_process_makes_no_new_object(
    made: tuple[FolderContent, Mapping[str, bytes]], tmp_path: Path
) -> None:
    assert differences(here(names=made[0].environment), made[0].environment) == []
    assert any(file.path.endswith(".so") for file, _ in made[0].files)
    found = run(made, tmp_path / "root", SCALE="2")  # a fine-tune's weights
    assert found["state"] == "used", found["text"]
    assert found["hits"] and found["opened"] > 0
    assert found["new"] == found["left"] == []
    assert scan(tmp_path / "root") == [file for file, _ in made[0].files]
    assert found["sum"] == pytest.approx(8 * sum(range(1, 33)) * math.exp(2), rel=1e-4)


@pytest.mark.timeout(600)
def test_hits_where_all_is_compiled_again_are_partly(
    made: tuple[FolderContent, Mapping[str, bytes]], tmp_path: Path
) -> None:
    """Another path of the same torch is in the keys of all objects, and in no hit counter."""
    elsewhere = tmp_path / "venv"
    elsewhere.symlink_to(sys.prefix)
    python = str(elsewhere / Path(sys.executable).relative_to(sys.prefix))
    code = (
        "import json; from mx.artifacts import environment;"
        f"print(json.dumps(environment.here(names={CPU_FIELDS})))"
    )
    ours = json.loads(subprocess.check_output([python, "-c", code]))
    assert [each.field for each in differences(ours, made[0].environment)
            if each.field in CPU_FIELDS] == ["torch_path"]  # fmt: skip
    found = run(made, tmp_path / "root", python)
    assert found["hits"] > 0
    assert found["state"] == "partly"
    assert any(path.endswith(".so") for path in found["new"])


@pytest.mark.timeout(600)
def test_a_cache_with_folded_weights_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="constants of the model's weights"):
        record(tmp_path / "caches", [sys.executable, "-c", CODE, "freeze"])
    assert not (tmp_path / "caches").exists()
