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

_MAKE = """
import sys
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers

folder, dense = sys.argv[1:]
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
first = modules.Transformer(folder + "-bert")
made = [first, modules.Pooling(32, pooling_mode="max")]
if dense:
    made.append(modules.Dense(32, 16))
SentenceTransformer(modules=made).save(folder)
"""

_USE = """
import json, sys
from mx.engines.transformers import counts
from sentence_transformers import SentenceTransformer

name, folder = sys.argv[1:]
expected = SentenceTransformer(folder).encode(["hello world", "hello"])
try:
    found = SentenceTransformer(name).encode(["hello world", "hello"])
except Exception as error:
    print(json.dumps(str(error)))
else:
    same = found.shape == expected.shape and bool((found == expected).all())
    print(json.dumps({"same": same, "host": counts()["host"]}))
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


@pytest.mark.parametrize("dense", ["", "dense"])
def test_vectors_are_those_of_the_folder_or_refused(tmp_path: Path, dense: str) -> None:
    """Its modules and its pooling are found. One whose module has weights of its own, which no
    source gives, is refused: it is not made without that module."""
    folder, script = tmp_path / "st", tmp_path / "use.py"
    run(tmp_path, "-c", _MAKE, str(folder), dense)
    script.write_text(_USE)
    with (
        daemon() as (_, address),
        mx.serve(folder, model="org/st", coordinator=address),
    ):
        command = "-m", "mx.engines.transformers", str(script), "org/st", str(folder)
        said = json.loads(run(tmp_path, *command, MX_PEER_COORDINATOR=address).splitlines()[-1])
    if dense:
        assert "2_Dense/model.safetensors" in said
    else:
        assert said == {"same": True, "host": 1}


_MIX = """
import json, sys
from sentence_transformers import SentenceTransformer

folder, more = sys.argv[1], json.loads(sys.argv[2])
texts = ["hello world", "hello"]
expected = SentenceTransformer(folder).encode(texts)
found = SentenceTransformer("org/st", local_files_only=True, **more).encode(texts)
print(json.dumps(bool((found == expected).all())))
"""


@pytest.mark.parametrize(
    "more", [{"trust_remote_code": True}, {"model_kwargs": {"offload_folder": "/nonexistent"}}]
)
def test_modules_of_peers_get_no_weights_of_the_hub(
    tmp_path: Path, more: dict[str, object]
) -> None:
    """The hub's cache has another model of the name: where its weights are loaded, its own modules
    are, with its own pooling."""
    served, script = tmp_path / "st", tmp_path / "mix.py"
    run(tmp_path, "-c", _MAKE, str(served), "")
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
    assert said is True
