"""What `mx doctor --disk` measures, within its bounds, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from mx.core.read_depth import MOST_READS
from mx.errors import MxError
from mx.operations.doctor import disk, examine
from mx.units import MIB
from tests.support.crafted import crafted
from tests.support.daemon import ROOT


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(crafted([("model.layers.0.w", "U8", [64 * MIB], bytes(64 * MIB))]))
    (folder / "config.json").write_text("{}")
    return folder


def test_it_reads_no_more_than_its_bounds(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 16 * MIB)
    rates = disk.measure(checkpoint)
    assert [each.reads for each in rates] == [1, MOST_READS, None]
    assert [each.bytes for each in rates[:2]] == [16 * MIB] * 2
    assert 16 * MIB <= rates[2].bytes < 64 * MIB
    assert all(each.gb_per_s > 0 for each in rates)
    monkeypatch.setattr(disk, "MOST_S", 0.0)
    assert [each.bytes for each in disk.measure(checkpoint)] == [0, 0, 0]


def test_a_file_that_is_no_checkpoint_is_measured_bare(checkpoint: Path) -> None:
    other = checkpoint / "model.safetensors"
    other = other.rename(checkpoint / "blob.bin")
    assert [each.reads for each in disk.measure(other)] == [1, MOST_READS]
    found = examine(disk=other)
    assert [each.level.value for each in found.findings] == ["ok", "ok", "note"]
    assert found.ok


def test_the_command_prints_what_its_schema_says(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "mx", "doctor", "--disk", str(checkpoint), "--json"]
    told = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    jsonschema.validate(told, json.loads((ROOT / "docs/doctor.schema.json").read_text()))
    assert [each["reads"] for each in told["disk"]] == [1, MOST_READS, None]


@pytest.mark.parametrize("what", ["gone", "pipe", "device", "empty", "small"])
def test_other_things_are_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    match what:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "empty":
            path.mkdir()
        case "small":
            path.write_bytes(b"few")
    with pytest.raises(MxError) as caught:
        disk.measure(path)
    assert str(path) in caught.value.message
