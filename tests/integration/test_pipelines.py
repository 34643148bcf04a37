"""diffusers pipelines, component by component, from a cache: the programs know nothing of mx."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.diffusers_pipeline import make_pipeline
from mx import api
from tests.support.caching import ApartCommand, start_cache, unavailable
from tests.support.commands import Run, environment, start_coordinator
from tests.support.daemon import ROOT

_REASON = unavailable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
]

_PROGRAM = """
import json, sys
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline

names = ("unet", "vae", "text_encoder")

def same(first, second):
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(t, two[n]) for n, t in one.items())

reference = DiffusionPipeline.from_pretrained(sys.argv[1])
vae = AutoencoderKL.from_pretrained("org/sd", subfolder="vae")
scheduler = DDIMScheduler.from_pretrained("org/sd", subfolder="scheduler")
other = DiffusionPipeline.from_pretrained("org/sd", vae=vae, scheduler=scheduler)
from mx.engines.transformers import counts
print(json.dumps({
    "same": [same(getattr(other, name), getattr(reference, name)) for name in names],
    "given": other.vae is vae and other.scheduler is scheduler,
    "tokens": other.tokenizer("a cat").input_ids == reference.tokenizer("a cat").input_ids,
    "counts": counts(),
}))
"""


@pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
def test_components_come_from_the_cache(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = make_pipeline(tmp_path)
    coordinator, _ = start_coordinator(run)
    caching = start_cache(run, coordinator, tmp_path, "1GB")
    serving = ApartCommand(
        "serve", str(folder), "--model", "org/sd", "--coordinator", coordinator, "--json"
    )
    try:
        said = serving.json()
        assert said["pipeline"] == "org/sd"
        assert set(said["models"]) == {"org/sd", "org/sd/unet", "org/sd/vae", "org/sd/text_encoder"}
        with api.pull(
            "org/sd", coordinator=coordinator, files_only=True, settings=caching.settings
        ) as pull:
            assert {"model_index.json", "vae/config.json"} <= pull.files().keys()
        script = tmp_path / "program.py"
        script.write_text(_PROGRAM)
        done = subprocess.run(
            [sys.executable, "-m", "mx.engines.transformers", str(script), str(folder)],
            env={**caching.environment, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["same"] == [True, True, True]
        assert found["given"] and found["tokens"]
        assert found["counts"]["cache"] == 3  # the VAE once: the pipeline was given it
        assert set(caching.held()) == {"org/sd/unet", "org/sd/vae", "org/sd/text_encoder"}
    finally:
        serving.end()


#: Its source is killed when the first tensor is asked for.
_LOSING = """
import json, os, signal, sys
import torch
from diffusers import AutoencoderKL
from mx.engines.transformers import counts, weights

source, folder, link = int(sys.argv[1]), sys.argv[2], sys.argv[3]
tensor = weights.Weights.tensor

def killing(self, name):
    os.kill(source, signal.SIGKILL)
    return tensor(self, name)

weights.Weights.tensor = killing
try:
    AutoencoderKL.from_pretrained("org/sd", subfolder="vae")
except OSError as error:
    cause = error.__cause__
weights.Weights.tensor = tensor
os.symlink(folder, link)  # now the hub's cache has it
found = AutoencoderKL.from_pretrained("org/sd", subfolder="vae").state_dict()
expected = AutoencoderKL.from_pretrained(folder, subfolder="vae").state_dict()
same = all(torch.equal(each, found[name]) for name, each in expected.items())
print(json.dumps({
    "cause": [type(cause).__module__, str(cause)], "same": same, "counts": counts()
}))
"""


@pytest.mark.long
@pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
def test_a_model_whose_source_is_lost_comes_from_disk(run: Run, tmp_path: Path) -> None:
    """Outside a pipeline. Where no files are, the error says why there is no source."""
    folder = make_pipeline(tmp_path)
    coordinator, _ = start_coordinator(run)
    hub = tmp_path / "hub" / "models--org--sd"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    script = tmp_path / "program.py"
    script.write_text(_LOSING)
    more = ("--coordinator", coordinator, "--json", "--max-bandwidth", "1MB/s")
    serving = ApartCommand("serve", str(folder), "--model", "org/sd", *more)
    try:
        serving.json()
        link = hub / "snapshots" / ("0" * 40)
        arguments = [str(serving.process.pid), str(folder), str(link)]
        done = subprocess.run(
            [sys.executable, "-m", "mx.engines.transformers", str(script), *arguments],
            env=environment(
                MX_PEER_COORDINATOR=coordinator,
                MX_PEER_CACHE_SOCKET="off",
                HF_HUB_OFFLINE="1",
                HF_HUB_CACHE=str(tmp_path / "hub"),
            ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["cause"][0] == "mx.errors", found
        assert found["same"]
        assert found["counts"] == {"converted": 0, "cache": 0, "host": 0, "peer": 0, "disk": 2}
        assert "org/sd: not from peers: " in done.stderr
    finally:
        serving.end()


@pytest.mark.long
def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "diffusers_pipeline.py")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "serving example/tiny-sd/vae" in done.stdout
    assert "an image of (16, 16, 3)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 80, done.stdout
