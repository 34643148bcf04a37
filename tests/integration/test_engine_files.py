"""The files that an engine gets from peers: of one document, covered by the pin, without code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import mx
from mx import config
from mx.api.pipelines import serve_pipeline
from mx.engines.transformers import load
from mx.engines.transformers.lookup import Lookup
from mx.engines.vllm import fetch_files
from mx.errors import CheckpointError, ConfigError, MxError
from tests.support import families
from tests.support.daemon import daemon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    families.save(families.FAMILIES["llama"], folder)
    return folder


@pytest.fixture
def settings(coordinator: str) -> config.Settings:
    return config.load(
        {"coordinator": coordinator, "cache_socket": "off"}, environ={"HOME": "/nonexistent"}
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def with_config(small: Path, folder: Path, **fields: Any) -> Path:
    """Return a folder that has a checkpoint's configuration, changed."""
    folder.mkdir(parents=True)
    found = json.loads((small / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(found))
    return folder


def looked_up(lookup: Lookup, name: str, revision: str | None = None) -> Any:
    found = lookup.find(name, revision)
    return None if found is None else json.loads((found.folder / "config.json").read_text())


def test_a_pin_of_weights_alone_brings_no_files(
    coordinator: str, small: Path, tmp_path: Path, settings: config.Settings
) -> None:
    """The weights are right, and the source that gives them has a configuration of its own."""
    theirs = with_config(small, tmp_path / "theirs", rms_norm_eps=0.5)
    lookup = Lookup(settings, coordinator)
    with mx.serve(weights(small), model="m", coordinator=coordinator, files=theirs) as source:
        pinned = f"m@{source.identity_hex}"
        with pytest.raises(ConfigError, match="weights alone.*model_loader_extra"):
            fetch_files(pinned, tmp_path / "files", coordinator=coordinator)
        assert not (tmp_path / "files").exists()
        with pytest.raises(ConfigError, match="weights alone.*`model_config`"):
            load(pinned, coordinator=coordinator, settings=settings)
        assert looked_up(lookup, pinned) is None
        assert "weights alone" in lookup.why_not(pinned, None)
        # A pin that covers the files is another matter, and so is what the user has.
        fetch_files(source.pinned, tmp_path / "files", coordinator=coordinator)
        assert json.loads((tmp_path / "files" / "config.json").read_text())["rms_norm_eps"] == 0.5
        assert looked_up(lookup, source.pinned)["rms_norm_eps"] == 0.5
        own = LlamaConfig.from_pretrained(small)
        model = load(pinned, coordinator=coordinator, settings=settings, model_config=own)
        assert model.config.rms_norm_eps == own.rms_norm_eps
        from mx.engines.transformers import loading

        loading(model).wait()
        loading(model).close()
    lookup.close()


def test_a_pin_is_not_dropped(coordinator: str, small: Path, tmp_path: Path) -> None:
    """The name stands for other weights and files by now."""
    first = with_config(small, tmp_path / "first", bos_token_id=7)
    second = with_config(small, tmp_path / "second", bos_token_id=8)
    one, two = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    with (
        mx.serve(two, model="p", coordinator=coordinator, files=second),
        mx.serve(one, model="p", revision="old", coordinator=coordinator, files=first) as old,
    ):
        fetch_files(old.pinned.replace(":old", ""), tmp_path / "a", coordinator=coordinator)
        assert json.loads((tmp_path / "a" / "config.json").read_text())["bos_token_id"] == 7
        fetch_files("p", tmp_path / "b", coordinator=coordinator)
        assert json.loads((tmp_path / "b" / "config.json").read_text())["bos_token_id"] == 8
        with pytest.raises(MxError):
            fetch_files("p@" + "ab" * 32, tmp_path / "c", coordinator=coordinator)
        assert not (tmp_path / "c").exists()


def test_a_revision_is_honoured(
    coordinator: str, small: Path, tmp_path: Path, settings: config.Settings
) -> None:
    first = with_config(small, tmp_path / "first", bos_token_id=7)
    second = with_config(small, tmp_path / "second", bos_token_id=8)
    lookup = Lookup(settings, coordinator)
    with (
        mx.serve({"w": torch.ones(4)}, model="r", coordinator=coordinator, files=second),
        mx.serve(
            {"w": torch.zeros(4)}, model="r", revision="abc", coordinator=coordinator, files=first
        ),
    ):
        for number, (revision, token) in enumerate([("abc", 7), ("main", 8), ("", 8)]):
            out = tmp_path / str(number)
            fetch_files("r", out, revision=revision, coordinator=coordinator)
            assert json.loads((out / "config.json").read_text())["bos_token_id"] == token
            assert looked_up(lookup, "r", revision or None)["bos_token_id"] == token
        with pytest.raises(MxError, match="r:other|configuration of r"):
            fetch_files("r", tmp_path / "x", revision="other", coordinator=coordinator)
        assert looked_up(lookup, "r", "other") is None
    lookup.close()


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer_config.json", "config.4.0.0.json", "sub/processor_config.json"],
)
@pytest.mark.parametrize(
    "written",
    ['{"auto_map": %s}', '{"a": [{"\\u0061uto_map": %s}]}', '{"custom_pipelines": {"x": %s}}'],
)
def test_code_is_not_taken_from_peers(
    coordinator: str,
    small: Path,
    tmp_path: Path,
    settings: config.Settings,
    file: str,
    written: str,
) -> None:
    theirs = with_config(small, tmp_path / "theirs")
    text = written % '{"AutoConfig": "evil--evil.Evil"}'
    (theirs / file).parent.mkdir(exist_ok=True)
    fields = json.loads((theirs / file).read_text()) if (theirs / file).exists() else {}
    rest = json.dumps(fields)[1:]
    (theirs / file).write_text(text[:-1] + (", " if len(rest) > 1 else "") + rest)
    lookup = Lookup(settings, coordinator)
    with mx.serve(weights(small), model="code", coordinator=coordinator, files=theirs) as source:
        for name in ("code", source.pinned):
            with pytest.raises(ConfigError, match="code of its own.*never"):
                fetch_files(name, tmp_path / "files", coordinator=coordinator)
            assert not (tmp_path / "files").exists()
            assert looked_up(lookup, name) is None
            assert "code of its own" in lookup.why_not(name, None)
    lookup.close()


def test_a_word_of_a_vocabulary_is_no_code(coordinator: str, small: Path, tmp_path: Path) -> None:
    theirs = with_config(small, tmp_path / "theirs")
    (theirs / "vocab.json").write_text('{"auto_map": 5, "\\u0120a": 6}')
    with mx.serve({"w": torch.ones(4)}, model="v", coordinator=coordinator, files=theirs):
        fetch_files("v", tmp_path / "files", coordinator=coordinator)
    assert (tmp_path / "files" / "vocab.json").exists()


def pipeline(folder: Path, factor: float) -> Path:
    """Return a pipeline of two components; the weights of one are multiplied."""
    from safetensors.torch import save_file

    for name in ("unet", "vae"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        tensors = {"w": torch.ones(8) * (factor if name == "unet" else 1)}
        save_file(tensors, str(folder / name / "diffusion_pytorch_model.safetensors"))
    index = {"unet": ["diffusers", "UNet2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_pipelines_of_other_weights_have_other_pins(coordinator: str, tmp_path: Path) -> None:
    one, two = pipeline(tmp_path / "one", 1), pipeline(tmp_path / "two", 2)
    with (
        serve_pipeline(one, model="org/one", coordinator=coordinator) as first,
        serve_pipeline(two, model="org/two", coordinator=coordinator) as second,
    ):
        pins = {each.sources[-1].pinned.rpartition("@")[2] for each in (first, second)}
    assert len(pins) == 2


def test_the_pin_of_a_pipeline_covers_its_components(
    coordinator: str, tmp_path: Path, settings: config.Settings
) -> None:
    """Only one component is updated: NAME means the new one, and the pin the one of then."""
    one, two = pipeline(tmp_path / "one", 1), pipeline(tmp_path / "two", 2)
    lookup = Lookup(settings, coordinator)

    def unet(name: str) -> str:
        lookup._meanings.clear()
        found = lookup.find(name, None)
        assert found is not None and lookup.component(found, "vae") is not None
        component = lookup.component(found, "unet")
        return "" if component is None else component.identity

    with serve_pipeline(one, model="org/sd", coordinator=coordinator) as first:
        pinned = first.sources[-1].pinned
        old = first.sources[0].identity_hex
        assert unet("org/sd") == unet(pinned) == old
        with serve_pipeline(two, model="org/sd", coordinator=coordinator, update=True) as second:
            new = second.sources[0].identity_hex
            assert unet("org/sd") == new != old
            assert unet(pinned) == old
            first.sources[0].close()  # others of the name's revision have other weights
            lookup._models.clear()
            assert unet(pinned) in ("", old)
    lookup.close()


def test_a_fallback_gives_files_and_weights(
    coordinator: str, small: Path, settings: config.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source of other weights, without files, comes after the fallback's files were taken."""
    from mx.engines.transformers import loader, loading

    other = {name: tensor * 2 for name, tensor in weights(small).items()}
    sources: list[mx.Source] = []
    first = loader._first

    def looked(*given: Any, **named: Any) -> Any:
        found = first(*given, **named)
        sources.append(mx.serve(other, model="late", coordinator=coordinator))
        return found

    monkeypatch.setattr(loader, "_first", looked)
    model = load("late", coordinator=coordinator, fallback=small, settings=settings)
    loading(model).wait()
    sources.pop().close()
    assert all(torch.equal(model.state_dict()[n], t) for n, t in weights(small).items())


@pytest.mark.parametrize("pin", ["files", "weights", "other"])
def test_a_fallback_has_what_the_pin_names(
    coordinator: str, small: Path, tmp_path: Path, settings: config.Settings, pin: str
) -> None:
    """`fallback` says that the disk may be used, if it is what was meant."""
    from mx.engines.transformers import loading

    with mx.serve(small, model="m", coordinator=coordinator) as source:
        pins = {"files": source.pinned[-64:], "weights": source.identity_hex, "other": "ab" * 32}
    theirs = with_config(small, tmp_path / "theirs", rms_norm_eps=0.5)
    (theirs / "model.safetensors").symlink_to(small / "model.safetensors")

    def loaded(folder: Path) -> float:
        model = load(
            f"lost@{pins[pin]}", coordinator=coordinator, fallback=folder, settings=settings
        )
        loading(model).wait()
        return float(model.config.rms_norm_eps)

    with pytest.raises(MxError, match="lost"):
        load(f"lost@{pins[pin]}", coordinator=coordinator, settings=settings)
    for folder, epsilon in ((small, 1e-6), (theirs, 0.5)):
        if pin == "weights" or (pin == "files" and folder is small):
            assert loaded(folder) == epsilon
        else:
            with pytest.raises(CheckpointError, match=f"not {pins[pin]}"):
                loaded(folder)
