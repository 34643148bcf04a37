"""The files of models that programs name, when their sources mean no good."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mx import config
from mx.core.types import ManifestRef, ModelKey, Packaging
from mx.engines.transformers import lookup as lookups
from mx.engines.transformers.lookup import Lookup
from mx.errors import UnknownModelError

REF = ManifestRef(bytes(32), bytes(32), bytes(32), (1, 1, 1))


class Known(Lookup):
    """A lookup at a coordinator that knows some names, each with its files."""

    def __init__(self, models: dict[str, dict[str, bytes]]) -> None:
        super().__init__(config.load(environ={"HOME": "/nonexistent"}), "127.0.0.1:9")
        self.models = models

    def _resolve(self, name: str, revision: str) -> tuple[ModelKey, ManifestRef]:
        name = name.removesuffix("@" + REF.pin.hex())
        if name not in self.models:
            raise UnknownModelError(name)
        return key_of(name), REF


def key_of(name: str) -> ModelKey:
    return ModelKey(name, "main", "checkpoint")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    made = Known({})

    @contextmanager
    def pull(name: str, **_: Any) -> Iterator[Any]:
        if name not in made.models:
            raise UnknownModelError(name)
        manifest = SimpleNamespace(ref=REF, packaging=Packaging())
        yield SimpleNamespace(
            files=lambda: made.models[name], model=key_of(name), wait_manifest=lambda: manifest
        )

    monkeypatch.setattr(lookups, "pull", pull)
    yield made
    made.close()


def test_two_names_of_the_same_weights(known: Known) -> None:
    known.models = {"org/a": {"config.json": b"{}"}, "org/b": {"config.json": b"{}"}}
    one, other = known.find("org/a", None), known.find("org/b", None)
    assert one is not None and other is not None
    assert one.folder != other.folder
    for each in (one, other):
        assert known.of_path(each.folder / "model.safetensors") == each


def test_files_that_cannot_be_there_together(known: Known) -> None:
    known.models = {"org/a": {"a.json": b"", "a.json/b.json": b"", "config.json": b"{}"}}
    for _ in range(2):
        assert known.find("org/a", None) is None
        assert "can't be written" in known.why_not("org/a", None)
        known._meanings.clear()


@pytest.mark.parametrize("index", [b"[]", b"{", b"[" * 10_000])
def test_an_index_that_is_none(known: Known, index: bytes) -> None:
    known.models = {"org/sd": {"model_index.json": index}}
    assert known.find("org/sd", None) is None
    assert "model_index.json" in known.why_not("org/sd", None)


def test_components_stay_in_the_folder(known: Known, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    names = ["unet", str(tmp_path), "../x", "..", ".", "", "unet/../unet"]
    kind = ["diffusers", "UNet2DConditionModel"]
    index = json.dumps(dict.fromkeys(names, kind)).encode()
    pins = json.dumps(dict.fromkeys(names, REF.pin.hex())).encode()
    files = {
        "model_index.json": index, "mx_components.json": pins, "config.json": b"{}",
        "unet/config.json": b"{}",
    }  # fmt: skip
    known.models = {"org/sd": files, **{f"org/sd/{name}": files for name in names}}
    found = known.find("org/sd", None)
    assert found is not None
    assert known.component(found, "unet") is not None
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    placeholders = [each.parent for each in found.folder.rglob("*.safetensors")]
    assert placeholders == [found.folder / "unet"]


def test_pipelines_that_have_a_component_in_common(known: Known) -> None:
    index = json.dumps({"vae": ["diffusers", "AutoencoderKL"]}).encode()
    pins = json.dumps({"vae": REF.pin.hex()}).encode()
    files = {"model_index.json": index, "mx_components.json": pins, "vae/config.json": b"{}"}
    known.models = {"org/a": files, "org/a/vae": {"config.json": b"{}"}}
    alone = known.find("org/a/vae", None)
    whole = known.find("org/a", None)
    assert alone is not None and whole is not None
    assert known.of_path(alone.folder / "model.safetensors") == alone
    part = known.component(whole, "vae")
    assert part is not None and part.folder == whole.folder / "vae"
