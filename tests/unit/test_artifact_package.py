"""A set's file: read as it was written, and refused if any byte of it is another."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mx.artifacts import package, trust
from mx.artifacts.package import ArtifactPackage
from mx.errors import ArtifactError, CheckpointError, ConfigError, IntegrityError
from mx.storage.disk_file import read_tensor_file
from tests.support import artifact_sets

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
CONTENTS = {"inductor/x.py": b"code", "inductor/y.so": b"more code", "triton/x.json": b"code"}


def test_blobs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    signed = artifact_sets.write(path, CONTENTS, KEY, environment={"torch": "2"})
    with ArtifactPackage(path) as found:
        found.verify()
        assert found.signed == signed
        assert len(found.document.blobs) == 2  # two files share one
        assert {f.path: found.read(f.blob) for f in found.document.files} == CONTENTS
    assert os.listdir(tmp_path) == ["set.safetensors"]


def test_many_bytes_are_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    contents = {f"triton/{n}": os.urandom(3_000_000) for n in range(6)}
    artifact_sets.write(path, contents, KEY)
    with ArtifactPackage(path) as found:
        assert {f.path: found.read(f.blob) for f in found.document.files} == contents
    names = [each.spec.name for each in read_tensor_file(path, "").tensors]
    assert names == [package.DOCUMENT, "set.1.blobs", "set.2.blobs", "set.3.blobs"]


def test_no_byte_of_it_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    signed = artifact_sets.write(path, CONTENTS, KEY)
    good = path.read_bytes()
    # The header's names and padding do not say what is in it; what they lead to is checked.
    begin = good.index(signed.data)
    for at in range(0, len(good), 7):  # test_artifact_trust changes every byte of a document
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            with ArtifactPackage(path) as found:
                found.verify()
        except IntegrityError:
            continue
        except ConfigError:  # an unknown dtype
            assert at < begin
            continue
        assert at < begin and found.signed == signed, at
    for cut in range(0, len(good), 35):
        path.write_bytes(good[:cut])
        with pytest.raises(IntegrityError):
            ArtifactPackage(path)
    path.write_bytes(good + b"x")
    with pytest.raises(CheckpointError):
        ArtifactPackage(path)


def test_a_checkpoint_is_no_set(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    one = np.ones(4, np.uint8)
    wrong: list[dict[str, Any]] = [
        {"model.weight": one},
        {package.DOCUMENT: one},
        {package.DOCUMENT: one, "set.1.blobs": one, "more": one},
        {package.DOCUMENT: one, "set.1.blobs": np.ones(4, np.float32)},
        {package.DOCUMENT: one, "set.1.blobs": np.ones((2, 2), np.uint8)},
        {package.DOCUMENT: one, "set.1.blobs": one},
        {package.DOCUMENT: np.zeros(0, np.uint8), "set.1.blobs": one},
        {package.DOCUMENT: one, "set.1.blobs": one, "set.2.blobs": one},
        {package.DOCUMENT: one, "set.2.blobs": one},
    ]
    for tensors in wrong:
        save_file(tensors, path)
        with pytest.raises(ArtifactError):
            ArtifactPackage(path)


def test_a_long_document_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "set.safetensors"
    artifact_sets.write(path, CONTENTS, KEY)
    monkeypatch.setattr(package, "MAX_SIGNED_BYTES", 10)
    with pytest.raises(ArtifactError, match="its document has"):
        ArtifactPackage(path)


def test_a_set_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    described = artifact_sets.document(CONTENTS)
    signed = trust.sign(described, KEY)
    with pytest.raises(ArtifactError, match="changed while it was made"):
        package.write(path, signed, [b"code", b"MORE code"])
    assert os.listdir(tmp_path) == []
    package.write(path, signed, [b"code", b"more code"])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="already"):
        package.write(path, signed, [b"code", b"more code"])
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_what_is_cut_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    artifact_sets.write(path, CONTENTS, KEY)
    with ArtifactPackage(path) as found:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ArtifactError, match="was cut"):
            found.verify()


def test_a_large_blob_is_checked_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    artifact_sets.write(path, {"inductor/x": bytes(4 * package.PART_BYTES)}, KEY)
    with ArtifactPackage(path) as found:
        tracemalloc.start()
        try:
            found.verify()
            assert tracemalloc.get_traced_memory()[1] < 2.5 * package.PART_BYTES
        finally:
            tracemalloc.stop()
