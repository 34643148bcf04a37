"""A model of transformers that is compiled as soon as it is here, with caches from a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import transformers

import mx
from mx import artifacts
from mx.artifacts.trust import make_key
from tests.support import families
from tests.support.daemon import ROOT, daemon

pytestmark = [pytest.mark.integration, pytest.mark.long]

NAME = "compiled"
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
#: Loads the model, computes twice, and prints what came of it.
REPLICA = """
import json, logging, sys
import torch
from mx.engines.transformers import compile_counts, load
logging.basicConfig(level="INFO")
model = load("compiled", compile=True, **json.loads(sys.argv[1]))
with torch.no_grad():
    sums = [float(model(torch.arange(n)[None], use_cache=False).logits.sum()) for n in (8, 8)]
    plain = float(type(model).forward(model, torch.arange(8)[None], use_cache=False).logits.sum())
print(json.dumps({"sums": sums, "plain": plain, "counts": compile_counts()}))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with daemon() as (_, found):
        yield found


@pytest.fixture(scope="module")
def environ(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a replica: caches of its own, in which there is nothing."""
    folder = tmp_path_factory.mktemp("own")
    return {
        **os.environ,
        "MX_PEER_COORDINATOR": address,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder),
    }


@pytest.fixture(scope="module")
def key(
    address: str, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The public key of a set that is listed beside its model."""
    folder = tmp_path_factory.mktemp("published")
    config = transformers.LlamaConfig(**SMALL)
    families.save(lambda: transformers.LlamaForCausalLM(config), folder / "checkpoint")
    with mx.serve(folder / "checkpoint", model=NAME, coordinator=address):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MX_PEER_COORDINATOR", address)
            command = [sys.executable, "-c", REPLICA, "{}"]
            assert artifacts.record(folder / "caches", command) == 0
        public = make_key(folder / "key")
        package = folder / "caches.safetensors"
        artifacts.publish(folder / "caches", model=NAME, key=folder / "key", out=package)
        with artifacts.serve(package, coordinator=address):
            yield public


def replica(environ: dict[str, str], **options: Any) -> tuple[dict[str, Any], str]:
    """Return what a replica prints, and what it logs."""
    ran = subprocess.run(
        [sys.executable, "-c", REPLICA, json.dumps(options)],
        env=environ, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert found["sums"] == pytest.approx([found["plain"]] * 2, rel=1e-3)
    return found, ran.stderr


@pytest.mark.slow  # tests/vllm has a compile cache that travels, too
@pytest.mark.timeout(900)
def test_what_one_process_compiled_another_uses(
    key: str, environ: dict[str, str], tmp_path: Path
) -> None:
    trust = tmp_path / "trust.toml"
    trust.write_text(f'[[signer]]\nname = "us"\nkey = "{key}"\nmodels = ["comp*"]\n')
    trust.chmod(0o600)
    found, said = replica(environ, trust=str(trust))
    assert found["counts"] == {"used": 1, "partly": 0, "unused": 0, "none": 0}, said[-3000:]
    own = Path(environ["TORCHINDUCTOR_CACHE_DIR"])
    assert not list(own.rglob("*.so"))

    # With other kernels of attention it is another environment: it compiles as always.
    found, said = replica(environ, trust=str(trust), attn_implementation="eager")
    assert found["counts"] == {"used": 0, "partly": 0, "unused": 0, "none": 1}
    assert "configuration is attention=eager here, attention=sdpa there" in said
    assert list(own.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_as_its_line_in_the_readme_runs_it(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "examples/compile_cache.py"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "x; the shipped caches: used" in ran.stdout
