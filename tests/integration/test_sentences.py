"""sentence-transformers, its code unchanged: a served model gives the vectors of its folder."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mx
from tests.support.daemon import ROOT, daemon

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("sentence_transformers") is None,
        reason="sentence-transformers is not installed: pip install sentence-transformers",
    ),
]

#: Makes a model, and one with a module that has weights of its own.
_MAKE = """
import sys
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers

folder = sys.argv[1]
sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)
config = transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=64)
transformers.BertModel(config).save_pretrained(folder + "-bert")
words = {"[UNK]": 0, "[PAD]": 1, "hello": 2, "world": 3, "[CLS]": 4, "[SEP]": 5, "[MASK]": 6}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
).save_pretrained(folder + "-bert")
made = [modules.Transformer(folder + "-bert"), modules.Pooling(32, pooling_mode="max")]
SentenceTransformer(modules=made).save(folder)
SentenceTransformer(modules=[*made, modules.Dense(32, 16)]).save(folder + "-dense")
"""

_USE = """
import json, sys
from mx.engines.transformers import counts
from sentence_transformers import SentenceTransformer

said = []
for name, folder in json.loads(sys.argv[1]):
    expected = SentenceTransformer(folder).encode(["hello world", "hello"])
    try:
        found = SentenceTransformer(name).encode(["hello world", "hello"])
    except Exception as error:
        said.append(str(error))
    else:
        same = found.shape == expected.shape and bool((found == expected).all())
        said.append({"same": same, "host": counts()["host"]})
print(json.dumps(said))
"""


def run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a model, and of one with a module that has weights of its own."""
    root = tmp_path_factory.mktemp("sentences")
    run(root, "-c", _MAKE, str(root / "st"))
    return root / "st", root / "st-dense"


def test_vectors_are_those_of_the_folder_or_refused(
    tmp_path: Path, made: tuple[Path, Path]
) -> None:
    """Its modules and its pooling are found, and the weights of a module of its own. One whose
    module has weights that no source gives is refused: it is not made without that module."""
    script, names = tmp_path / "use.py", ("org/st", "org/dense", "org/pickled")
    pickled = tmp_path / "pickled"
    shutil.copytree(made[1], pickled)
    dense = pickled / "2_Dense"
    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()
    folders = (*made, pickled)
    script.write_text(_USE)
    with (
        daemon() as (_, address),
        mx.serve(made[0], model=names[0], coordinator=address),
        mx.serve(made[1], model=names[1], coordinator=address),
        mx.serve(pickled, model=names[2], coordinator=address),
    ):
        asked = json.dumps([*zip(names, map(str, folders), strict=True)])
        command = "-m", "mx.engines.transformers", str(script), asked
        said = json.loads(run(tmp_path, *command, MX_PEER_COORDINATOR=address).splitlines()[-1])
    assert said[0] == {"same": True, "host": 1}
    assert said[1] == {"same": True, "host": 2}
    assert "2_Dense/" in said[2]


_MIX = """
import json, sys
from sentence_transformers import SentenceTransformer

folder, more = sys.argv[1], json.loads(sys.argv[2])
texts = ["hello world", "hello"]
expected = SentenceTransformer(folder).encode(texts)
same = []
for each in more:
    found = SentenceTransformer("org/st", local_files_only=True, **each).encode(texts)
    same.append(bool((found == expected).all()))
print(json.dumps(same))
"""


def test_modules_of_peers_get_no_weights_of_the_hub(
    tmp_path: Path, made: tuple[Path, Path]
) -> None:
    """The hub's cache has another model of the name: where its weights are loaded, its own modules
    are, with its own pooling."""
    script, served = tmp_path / "mix.py", made[0]
    more = {"trust_remote_code": True}, {"model_kwargs": {"offload_folder": "/nonexistent"}}
    cached = tmp_path / "hub" / "models--org--st"
    own = cached / "snapshots" / ("a" * 40)
    shutil.copytree(served, own)
    pooling = own / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('"max"', '"mean"'))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    script.write_text(_MIX)
    with daemon() as (_, address), mx.serve(served, model="org/st", coordinator=address):
        command = "-m", "mx.engines.transformers", str(script), str(own), json.dumps(more)
        said = json.loads(run(tmp_path, *command, MX_PEER_COORDINATOR=address).splitlines()[-1])
    assert said == [True, True]
