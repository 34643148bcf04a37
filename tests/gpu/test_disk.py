"""From disk into a GPU's memory: by pinned slots, and by cuFile where that can be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx import api, config
from mx.cuda.device import Device
from mx.testing import spans
from mx.transport import DeviceView
from mx.units import MIB


@pytest.mark.parametrize(("way", "gpudirect"), [("slots", "off"), ("cufile", "always")])
def test_every_byte_is_the_files(gpu: Device, tmp_path: Path, way: str, gpudirect: str) -> None:
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{number}": random.integers(0, 256, size, dtype=np.uint8)
        for number, size in enumerate((9 * MIB, 17, 5_000_011, 16 * MIB + 4))
    }
    path, out = tmp_path / "model.safetensors", tmp_path / "out"
    save_file(tensors, path)
    settings = config.load({"gpudirect": gpudirect})
    with api.pull("m", path=path, out=out, settings=settings) as written:
        pin = written.wait(60).pin
    with api.pull(f"m@{pin}", path=out, device="cuda:0", settings=settings) as pull:
        how = pull.wait(60).paths[0].detail
        view, manifest = pull.device_buffer(), pull.manifest
        assert isinstance(view, DeviceView) and view.device == gpu.key and manifest is not None
        data = spans.peek(view)
    for tensor in manifest.layout.tensors:
        begin = manifest.layout.layers[tensor.layer].arena_offset + tensor.offset
        assert data[begin : begin + tensor.nbytes] == tensors[tensor.name].tobytes()
    if way == "cufile" and not how.startswith("by cufile"):
        pytest.skip(how)
    assert way in how.partition(":")[0]
