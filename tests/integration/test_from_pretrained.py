"""`from_pretrained` as users call it, served by peers and by this host's cache, in processes of
their own. What each loads is compared, bit for bit, with what transformers reads from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.support import forkserver
from tests.support.caching import Caching, origin, start_cache, unavailable
from tests.support.commands import Command, Run, commands, environment, start_coordinator

_REASON = unavailable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_REASON is not None, reason=_REASON or ""),
]

#: What users' processes see of the hub.
_HUB = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
#: `python -m mx.engines.transformers`, which imports transformers before all else.
_PATCHED = "from mx.engines.transformers.__main__ import main; main()"
#: Ordinary code of a user's: `names` are loaded one after the other. What is printed says how each
#: compares with the folder on disk.
_USER = """
import json, os, sys
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

names, folder, dtype = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
more = {"dtype": getattr(torch, dtype)} if dtype else {}
trust = {"trust_remote_code": True} if "TRUST" in os.environ else {}
said = []
for name in names:
    model = AutoModelForCausalLM.from_pretrained(name, **more, **trust)
    tensors = model.state_dict()
    with torch.no_grad():
        output = model(torch.arange(6)[None]).logits
    reference = AutoModelForCausalLM.from_pretrained(folder, **more)
    expected = reference.state_dict()
    same = list(tensors) == list(expected) and all(
        tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key])
        for key, tensor in tensors.items()
    )
    buffers, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    same = same and all(torch.equal(buffer, theirs[key]) for key, buffer in buffers.items())
    for parameter in reference.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        same = same and torch.equal(output, reference(torch.arange(6)[None]).logits)
    said.append({
        "same": same,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "tokens": AutoTokenizer.from_pretrained(name, **trust)("a b").input_ids,
        "type": AutoConfig.from_pretrained(name, **trust).model_type,
        "name": model.config.name_or_path,
        "writes": True,
    })
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(7)  # its own from then on
from mx.engines.transformers import counts
print(json.dumps({"models": said, "counts": counts()}))
"""


@dataclass(frozen=True)
class Site:
    """A coordinator, the folder of each model, its source's command, and a script of a user's."""

    coordinator: str
    folders: dict[str, Path]
    sources: dict[str, Command]
    script: Path

    def user(
        self, environment: dict[str, str], names: list[str], folder: Path, dtype: str = ""
    ) -> dict[str, Any]:
        """Run the user's script, and return what it printed."""
        return self.ran(environment, json.dumps(names), str(folder), dtype)[0]

    def ran(self, environment: dict[str, str], *arguments: str) -> tuple[dict[str, Any], str]:
        """Run the user's script; return what it printed, and the log."""
        process = forkserver.python(
            _PATCHED,
            str(self.script),
            *arguments,
            env={**environment, **_HUB},
            imported="transformers",
            errors=True,
        )
        with process:
            try:
                out, err = process.communicate(timeout=180)
            finally:
                process.kill()
        assert process.returncode == 0, err
        said = json.loads(out.splitlines()[-1])
        assert isinstance(said, dict)
        return said, err


def save(model: Any, folder: Path, **more: Any) -> Path:
    """Save a model with a tokenizer."""
    model.save_pretrained(folder, **more)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def make_models(root: Path) -> dict[str, Path]:
    """Save a Llama, and a Mixtral whose experts are fused when it is loaded, in several files."""
    torch.manual_seed(1)
    shape: Any = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    llama = LlamaConfig(hidden_size=256, intermediate_size=512, vocab_size=128, **shape)
    mixtral = MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        vocab_size=128,
        num_local_experts=4,
        tie_word_embeddings=True,
        **shape,
    )
    dense: Any = LlamaForCausalLM(llama)
    experts: Any = MixtralForCausalLM(mixtral)
    return {
        "org/llama": save(dense.to(torch.bfloat16), root / "llama"),
        "org/mixtral": save(experts.to(torch.bfloat16), root / "mix", max_shard_size="500KB"),
    }


@pytest.fixture(scope="module", autouse=True)
def transformers_is_forked() -> Iterator[None]:
    """Users' processes are forks of one that has imported what is patched."""
    with forkserver.running(environment(**_HUB), "transformers"):
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("models")
    folders = make_models(root)
    script = root / "user.py"
    script.write_text(_USER)
    with commands() as run:
        coordinator, _ = start_coordinator(run)
        with (
            origin(folders["org/llama"], "org/llama", coordinator) as llama,
            origin(folders["org/mixtral"], "org/mixtral", coordinator) as mixtral,
        ):
            sources = {"org/llama": llama, "org/mixtral": mixtral}
            yield Site(coordinator, folders, sources, script)


@pytest.fixture
def caching(run: Run, site: Site, tmp_path: Path) -> Caching:
    tmp_path.chmod(0o700)
    return start_cache(run, site.coordinator, tmp_path, "1GB")


def test_from_the_cache_offline_and_without_files(site: Site, caching: Caching) -> None:
    folder = site.folders["org/llama"]
    said, log = site.ran(caching.environment, json.dumps(["org/llama"]), str(folder), "")
    (model,) = said["models"]
    assert model == {
        "same": True,
        "tied": False,
        "tokens": [0, 1],
        "type": "llama",
        "name": "org/llama",
        "writes": True,
    }
    assert said["counts"] == {"converted": 0, "cache": 1, "host": 0, "peer": 0, "disk": 1}
    assert "from_pretrained model=org/llama source=cache" in log
    assert 'source=disk reason="it is a path"' in log
    assert caching.held() == ["org/llama"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param("org/llama", "float32", marks=pytest.mark.long), ("org/mixtral", "")],
)
def test_what_is_converted_is_shared(site: Site, caching: Caching, name: str, dtype: str) -> None:
    folder = site.folders[name]
    for place in ("cache", "converted"):
        said = site.user(caching.environment, [name], folder, dtype)
        assert said["counts"][place] == 1, said
        assert said["models"][0]["same"]
        assert said["models"][0]["tied"] == (name == "org/mixtral")
    models = caching.status().models
    assert [each.offered for each in models] == [False, True]
    assert "engine=transformers" in models[1].model.variant
    # Another dtype is another variant.
    said = site.user(caching.environment, [name], folder, "float16")
    assert said["counts"]["converted"] == 0
    assert said["models"][0]["same"]


def test_a_cache_that_dies_before_it_gives_what_was_converted(
    site: Site, run: Run, tmp_path: Path
) -> None:
    """The checkpoint's own weights are pulled then, and converted again."""
    tmp_path.chmod(0o700)
    started: list[Command] = []

    def start(*arguments: str, **more: Any) -> Command:
        started.append(run(*arguments, **more))
        return started[-1]

    caching = start_cache(start, site.coordinator, tmp_path, "1GB")
    folder = site.folders["org/mixtral"]
    site.user(caching.environment, ["org/mixtral"], folder)
    assert [each.offered for each in caching.status().models] == [False, True]
    script = tmp_path / "user.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from mx.engines.transformers import loads\n"
        "asked = loads.ask_offered\n"
        "def killing(*args):\n"
        "    held = asked(*args)\n"
        "    assert held is not None\n"
        "    os.kill(int(sys.argv.pop()), signal.SIGKILL)\n"
        "    loads.ask_offered = asked\n"
        "    return held\n"
        "loads.ask_offered = killing\n" + _USER
    )
    dying = Site(site.coordinator, {}, {}, script)
    arguments = json.dumps(["org/mixtral"]), str(folder), "", str(started[0].process.pid)
    said, log = dying.ran(caching.environment, *arguments)
    assert said["models"][0]["same"]
    assert said["counts"] == {"converted": 0, "cache": 0, "host": 0, "peer": 1, "disk": 1}
    assert "org/mixtral: what was converted could not be obtained" in log


def test_without_a_cache_from_a_peer(site: Site, caching: Caching) -> None:
    """Also where code is trusted: no file of the model names any."""
    environment = {**caching.environment, "MX_PEER_CACHE_SOCKET": "off", "TRUST": "1"}
    said = site.user(environment, ["org/mixtral"], site.folders["org/mixtral"])
    assert said["counts"] == {"converted": 0, "cache": 0, "host": 0, "peer": 1, "disk": 1}
    assert said["models"][0]["same"]


def test_unknown_names_come_from_disk(site: Site, caching: Caching, tmp_path: Path) -> None:
    script = tmp_path / "unknown.py"
    script.write_text(
        "import json\n"
        "from transformers import AutoModelForCausalLM\n"
        "try:\n"
        "    AutoModelForCausalLM.from_pretrained('org/unknown')\n"
        "except OSError as error:\n"
        "    print(json.dumps({'error': str(error)[:500]}))\n"
    )
    unknown = Site(site.coordinator, {}, {}, script)
    said, _ = unknown.ran(caching.environment)
    assert "couldn't find them in the cached files" in said["error"]
    away = {**caching.environment, "MX_PEER_COORDINATOR": "127.0.0.1:9"}
    said, _ = unknown.ran(away)
    assert "couldn't find them in the cached files" in said["error"]


def test_a_source_that_is_lost_midway_is_replaced_by_the_disk(
    run: Run, site: Site, tmp_path: Path
) -> None:
    """The name is that of a folder in the working directory of no model: the hub's cache has it."""
    tmp_path.chmod(0o700)
    hub = tmp_path / "hub" / "models--org--slow"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / ("0" * 40)).symlink_to(site.folders["org/llama"])
    script = tmp_path / "user.py"
    script.write_text(
        "import json, os, signal, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from mx.engines.transformers import counts, weights\n"
        "tensor = weights.Weights.tensor\n"
        "def killing(self, name):\n"
        "    os.kill(int(sys.argv[1]), signal.SIGKILL)\n"
        "    return tensor(self, name)\n"
        "weights.Weights.tensor = killing\n"
        "model = AutoModelForCausalLM.from_pretrained('org/slow')\n"
        "expected = AutoModelForCausalLM.from_pretrained(sys.argv[2]).state_dict()\n"
        "same = all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())\n"
        "print(json.dumps({'same': same, 'counts': counts()}))\n"
    )
    coordinator, _ = start_coordinator(run)
    caching = Caching(coordinator, tmp_path / "cache.sock", run)
    folder = site.folders["org/llama"]
    with origin(folder, "org/slow", coordinator, "--max-bandwidth", "1MB/s") as source:
        environment = {**caching.environment, "HF_HUB_CACHE": str(tmp_path / "hub")}
        lost = Site(coordinator, {}, {}, script)
        said, log = lost.ran(environment, str(source.process.pid), str(folder))
    assert said == {
        "same": True,
        "counts": {"converted": 0, "cache": 0, "host": 0, "peer": 0, "disk": 2},
    }
    assert "not from peers" in log


def test_processes_share_one_copy(site: Site, caching: Caching, tmp_path: Path) -> None:
    """Each maps the cache's pages, and none has copies of its own."""
    script = tmp_path / "user.py"
    script.write_text(
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('org/llama')\n"
        "for tensor in model.state_dict().values():\n"
        "    tensor.view(-1).view(torch.uint8)[::4096].max()\n"
        "name, own, shared = '', 0, 0\n"
        "for line in Path('/proc/self/smaps').read_text().splitlines():\n"
        "    fields = line.split()\n"
        "    if not fields[0].endswith(':'):\n"
        "        name = line\n"
        "    elif '/memfd:mx' in name and fields[0] == 'Anonymous:':\n"
        "        own += int(fields[1]) * 1024\n"
        "    elif '/memfd:mx' in name and fields[0] == 'Rss:':\n"
        "        shared += int(fields[1]) * 1024\n"
        "nbytes = sum(p.nbytes for p in model.parameters())\n"
        "print(json.dumps({'own': own, 'shared': shared, 'nbytes': nbytes}))\n"
    )
    for _ in range(2):
        said, _ = Site(site.coordinator, {}, {}, script).ran(caching.environment)
        assert said["shared"] >= said["nbytes"]
        assert said["own"] == 0
