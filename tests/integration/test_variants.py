"""`from_pretrained(name, variant=...)`: copies of the main weights come from peers where they are
served. What each process loads is compared with what transformers reads from the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import families, forkserver
from tests.support.caching import Caching, origin, start_cache, unavailable
from tests.support.commands import Run, environment, start_coordinator

_REASON = unavailable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_REASON is not None, reason=_REASON or ""),
]

_HUB = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
_PATCHED = "from mx.engines.transformers.__main__ import main; main()"
#: Loads each of the calls, and says how it compares with the folder.
_USER = """
import json, sys
import torch
import transformers
from mx.engines.transformers import counts

folder, said = sys.argv[1], []
for owner, name, more in json.loads(sys.argv[2]):
    owner = getattr(transformers, owner)
    try:
        model = owner.from_pretrained(name, **more)
    except OSError as error:
        said.append([str(error), *getattr(error, "__notes__", ())])
        continue
    before = counts()
    expected = owner.from_pretrained(folder, **more).state_dict()
    found = model.state_dict()
    said.append(found.keys() == expected.keys() and all(
        each.dtype == expected[key].dtype and torch.equal(each, expected[key])
        for key, each in found.items()
    ))
print(json.dumps({"said": said, "disk": before["disk"] if said[-1] is True else None}))
"""
#: The same, with weights of a head in a file that the configuration's class names.
_HEAD = """
import transformers
transformers.LlamaConfig.extra_files = ("head.safetensors",)
"""
_FP16 = {"variant": "fp16"}


@pytest.fixture(scope="module", autouse=True)
def transformers_is_forked() -> Iterator[None]:
    """Users' processes are forks of one that has imported what is patched."""
    with forkserver.running(environment(**_HUB), "transformers"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with variants of other values: fp16 in one file, old in several."""
    made = tmp_path_factory.mktemp("variants") / "model"
    families.save(families.FAMILIES["llama"], made)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(made)
    for seed, (variant, size) in enumerate((("fp16", "1GB"), ("old", "100KB"))):
        families.scramble(model, seed=20 + seed)
        model.to(torch.float16).save_pretrained(made, variant=variant, max_shard_size=size)
    assert (made / "model.old-00002-of-00003.safetensors").exists()
    return made


def load(
    caching: Caching, folder: Path, calls: list[Any], before: str = "", **more: str
) -> tuple[Any, str]:
    """Make the calls in a process of a user's, which runs `before` first; return what it says, and
    its log."""
    script = caching.socket.parent / "user.py"
    script.write_text(before + _USER)
    given = str(script), str(folder), json.dumps(calls)
    process = forkserver.python(
        _PATCHED,
        *given,
        env={**caching.environment, **_HUB, **more},
        imported="transformers",
        errors=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


@pytest.fixture
def caching(run: Run, tmp_path: Path) -> Caching:
    tmp_path.chmod(0o700)
    return start_cache(run, start_coordinator(run)[0], tmp_path, "1GB")


@pytest.mark.parametrize("cached", [True, False])
def test_a_variant_comes_from_peers(caching: Caching, folder: Path, cached: bool) -> None:
    calls = [
        ("AutoModelForCausalLM", "org/m", _FP16),
        ("AutoModelForCausalLM", "org/m", {}),  # the main weights are other ones
        ("LlamaForCausalLM", "org/m", {**_FP16, "dtype": "float32"}),
    ]
    more = {} if cached else {"MX_PEER_CACHE_SOCKET": "off"}
    with origin(folder, "org/m", caching.coordinator, "--weights", "*.fp16.*"):
        said, log = load(caching, folder, calls, **more)
    assert said["said"] == [True, True, True], log
    lines = [line for line in log.splitlines() if "from_pretrained model=org/m" in line]
    assert ["companion=model.fp16.safetensors" in line for line in lines] == [True, False, True]
    assert not any("source=disk" in line for line in lines)


def test_a_folder_that_has_nothing_but_a_variant(
    caching: Caching, folder: Path, tmp_path: Path
) -> None:
    """It is the main weights, whether in one file or in several."""
    for variant in ("fp16", "old"):
        alone = tmp_path / variant
        alone.mkdir()
        for path in folder.glob("*.json"):
            (alone / path.name).write_bytes(path.read_bytes())
        for path in folder.glob(f"model.{variant}*"):
            (alone / path.name).write_bytes(path.read_bytes())
        with origin(alone, f"org/{variant}", caching.coordinator):
            call = ("AutoModelForCausalLM", f"org/{variant}", {"variant": variant})
            said, log = load(caching, alone, [call])
        assert said == {"said": [True], "disk": 0}, log


@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedConfig, "extra_files"), reason="it knows no further files"
)
def test_further_files_that_a_class_names_come_from_peers(
    caching: Caching, folder: Path, tmp_path: Path
) -> None:
    headed = tmp_path / "headed"
    headed.mkdir()
    (headed / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    save_file(tensors, headed / "model.safetensors", metadata={"format": "pt"})
    save_file(head, headed / "head.safetensors", metadata={"format": "pt"})
    with origin(headed, "org/headed", caching.coordinator):
        calls: list[Any] = [("LlamaForCausalLM", "org/headed", {})]
        said, log = load(caching, headed, calls, _HEAD)
    assert said == {"said": [True], "disk": 0}, log
    assert "companion=head.safetensors" in log


@pytest.mark.parametrize(
    ("variant", "served", "why"),
    [
        ("fp16", (), "asks for model.fp16.safetensors, which its sources do not serve"),
        ("old", ("--weights", "*.old*"), "is in several files"),
    ],
)
def test_the_ordinary_loader_has_the_others(
    caching: Caching, folder: Path, tmp_path: Path, variant: str, served: tuple[str], why: str
) -> None:
    """It finds them in the hub's cache, or says that it doesn't."""
    hub = tmp_path / "hub" / "models--org--m"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / ("0" * 40)).symlink_to(folder)
    calls = [("AutoModelForCausalLM", "org/m", {"variant": variant})]
    with origin(folder, "org/m", caching.coordinator, *served):
        said, log = load(caching, folder, calls, HF_HUB_CACHE=str(tmp_path / "hub"))
        assert said == {"said": [True], "disk": 1}
        (line,) = [line for line in log.splitlines() if "model=org/m source=disk" in line]
        assert why in line
        said, log = load(caching, folder, calls)
    assert any(why in each for each in said["said"][0]), said
