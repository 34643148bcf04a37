"""Sets of artefacts between processes: listed, fetched from many sources, by liars, in mid-set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import mx
from mx import config
from mx.artifacts import carry, package
from mx.artifacts.carry import ListedSet, fetch_document, fetched, find
from mx.artifacts.package import ArtifactPackage
from mx.core.artifact_names import listed_name
from mx.errors import ArtifactError, MxError
from tests.support import artifact_sets

pytestmark = pytest.mark.integration

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
CONTENTS = {"inductor/x.py": b"code", "inductor/y.so": b"more code", "triton/x.json": b"code"}


@pytest.fixture
def asked(settings: config.Settings, coordinator: str) -> config.Settings:
    return config.given(settings, coordinator=coordinator)


def _contents(nbytes: int) -> dict[str, bytes]:
    return {f"inductor/{n:03}": os.urandom(nbytes // 16) for n in range(16)}


def _read(package: ArtifactPackage) -> dict[str, bytes]:
    return {each.path: package.read(each.blob) for each in package.document.files}


def test_a_set_is_listed_beside_its_model(
    tmp_path: Path, checkpoint: Path, asked: config.Settings
) -> None:
    path = tmp_path / "set.safetensors"
    signed = artifact_sets.write(path, CONTENTS, KEY, model="llama/8b", environment={"torch": "2"})
    other = artifact_sets.write(tmp_path / "other.safetensors", CONTENTS, KEY, model="llama")
    with (
        mx.serve(checkpoint, model="llama/8b", settings=asked),
        carry.serve(path, settings=asked),
        carry.serve(path, settings=asked),
        carry.serve(tmp_path / "other.safetensors", settings=asked),
    ):
        (found,) = find("llama/8b", settings=asked)
        assert (found.set_id, found.kind, found.sources) == (signed.set_id, "compile-cache", 2)
        assert signed.public_key.hex().startswith(found.signer)
        assert [each.set_id for each in find("llama", settings=asked)] == [other.set_id]
        assert len(find(settings=asked)) == 2
        assert find("8b", settings=asked) == []
        # The model's name stands for its weights alone, as before.
        assert mx.plan("llama/8b", settings=asked).model.variant == "checkpoint"
        document = fetch_document(found, settings=asked)
        assert document.signed == signed
        with fetched(document, tmp_path / "arriving", settings=asked) as arrived:
            assert _read(arrived) == CONTENTS
        assert sorted(os.listdir(tmp_path)) == ["other.safetensors", "set.safetensors"]
    assert find(settings=asked) == []


@contextmanager
def _another_set(tmp_path: Path, settings: config.Settings) -> Iterator[tuple[ListedSet, bytes]]:
    """What is listed is a set, yet another."""
    wanted = artifact_sets.write(tmp_path / "wanted.safetensors", CONTENTS, KEY)
    artifact_sets.write(tmp_path / "other.safetensors", {"inductor/x": b"evil"}, KEY)
    with _listed(tmp_path / "other.safetensors", wanted.set_id, settings) as found:
        yield found, wanted.data


@contextmanager
def _another_model(tmp_path: Path, settings: config.Settings) -> Iterator[tuple[ListedSet, bytes]]:
    """What is listed is for another model than its name says."""
    wanted = artifact_sets.write(tmp_path / "wanted.safetensors", CONTENTS, KEY, model="other")
    with _listed(tmp_path / "wanted.safetensors", wanted.set_id, settings) as found:
        yield found, wanted.data


@contextmanager
def _a_checkpoint(tmp_path: Path, settings: config.Settings) -> Iterator[tuple[ListedSet, bytes]]:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"model.weight": np.ones(4, np.uint8)}, tmp_path / "model.safetensors")
    with _listed(tmp_path / "model.safetensors", 32 * "0", settings) as found:
        yield found, b""


@contextmanager
def _huge(tmp_path: Path, settings: config.Settings) -> Iterator[tuple[ListedSet, bytes]]:
    """Its document has more bytes than any."""
    import numpy as np
    from safetensors.numpy import save_file

    one = np.ones(33 << 20, np.uint8)
    save_file({package.DOCUMENT: one, "set.1.blobs": one[:4]}, tmp_path / "huge.safetensors")
    with _listed(tmp_path / "huge.safetensors", 32 * "0", settings) as found:
        yield found, b""


@contextmanager
def _more_bytes(tmp_path: Path, settings: config.Settings) -> Iterator[tuple[ListedSet, bytes]]:
    """Its document is right, and it has more bytes than that says."""
    import numpy as np
    from safetensors.numpy import save_file

    wanted = artifact_sets.write(tmp_path / "wanted.safetensors", CONTENTS, KEY)
    tensors = {
        package.DOCUMENT: np.frombuffer(wanted.data, np.uint8),
        "set.1.blobs": np.ones(4 << 20, np.uint8),
    }
    save_file(tensors, tmp_path / "more.safetensors")
    with _listed(tmp_path / "more.safetensors", wanted.set_id, settings) as found:
        yield found, wanted.data


@contextmanager
def _listed(path: Path, set_id: str, settings: config.Settings) -> Iterator[ListedSet]:
    variant = mx.ProcessingKey(kind="compile-cache", signer="0" * 16)
    with mx.serve(path, model=listed_name("m", set_id), variant=variant, settings=settings):
        (found,) = find("m", settings=settings)
        yield found


Liar = Callable[[Path, config.Settings], AbstractContextManager[tuple[ListedSet, bytes]]]


@pytest.mark.parametrize("liar", [_another_set, _another_model, _a_checkpoint, _huge, _more_bytes])
def test_what_is_not_the_set_is_refused_by_its_document(
    tmp_path: Path, asked: config.Settings, liar: Liar
) -> None:
    with liar(tmp_path, asked) as (found, _), pytest.raises(MxError) as caught:
        fetch_document(found, settings=asked)
    assert caught.value.exit_code in (2, 4), caught.value  # `only` names no tensor of a checkpoint


def test_other_bytes_than_the_documents_are_refused(tmp_path: Path, asked: config.Settings) -> None:
    """Its document is right, and so is its size."""
    import numpy as np
    from safetensors.numpy import save_file

    wanted = artifact_sets.write(tmp_path / "wanted.safetensors", CONTENTS, KEY)
    with ArtifactPackage(tmp_path / "wanted.safetensors") as good:
        blobs = np.ones(good.document.nbytes, np.uint8)
    tensors = {package.DOCUMENT: np.frombuffer(wanted.data, np.uint8), "set.1.blobs": blobs}
    save_file(tensors, tmp_path / "false.safetensors")
    with pytest.raises(ArtifactError):  # it can't be given by accident
        carry.serve(tmp_path / "false.safetensors", settings=asked)
    with _listed(tmp_path / "false.safetensors", wanted.set_id, asked) as found:
        document = fetch_document(found, settings=asked)
        with (
            fetched(document, tmp_path / "arriving", settings=asked) as arrived,
            pytest.raises(ArtifactError, match="is not what its document says"),
        ):
            arrived.verify()
    assert not (tmp_path / "arriving").exists()
