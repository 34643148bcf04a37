"""diffusers pipelines, component by component, from a cache: the programs know nothing of mx."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.diffusers_pipeline import make_pipeline
from mx import api
from tests.integration.conftest import REPOSITORY, Command, Run, environment, start_coordinator
from tests.support.caching import APART, start_cache, unavailable

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


class _Apart(Command):
    def command(self, entry: str) -> list[str]:
        return [*APART, *super().command(entry)]


@pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
def test_components_come_from_the_cache(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = make_pipeline(tmp_path)
    coordinator, _ = start_coordinator(run)
    caching = start_cache(run, coordinator, tmp_path, "1GB")
    serving = _Apart(
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


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "diffusers_pipeline.py")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "serving example/tiny-sd/vae" in done.stdout
    assert "an image of (16, 16, 3)" in done.stdout
