"""A diffusers pipeline from this host's cache, component by component, its code unchanged.

    python examples/diffusers_pipeline.py

Makes a tiny Stable Diffusion pipeline with random weights, serves it, starts a cache, and loads the
pipeline twice in processes that have none of its files: whole, and with a VAE of its own. Needs
diffusers and transformers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "example/tiny-sd"

#: What a user's program is: nothing in it knows mx.
PROGRAM = """
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar

disable_progress_bar()
pipeline = DiffusionPipeline.from_pretrained("example/tiny-sd")
vae = AutoencoderKL.from_pretrained("example/tiny-sd", subfolder="vae")
other = DiffusionPipeline.from_pretrained("example/tiny-sd", vae=vae)
assert other.vae is vae
for name in ("unet", "vae", "text_encoder"):
    first, second = (getattr(each, name).state_dict() for each in (pipeline, other))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
other.set_progress_bar_config(disable=True)
picture = other("a cat", num_inference_steps=2, height=16, width=16, output_type="np").images
print("an image of", picture.shape[1:], "from", type(other).__name__)
"""


#: What diffusers and transformers say of themselves is not a part of the story.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def make_pipeline(folder: Path) -> Path:
    """Save a Stable Diffusion pipeline of 7 MB."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    words = folder / "words"
    words.mkdir(parents=True)
    vocabulary = ["<|startoftext|>", "!", "<|endoftext|>", "a</w>", "cat</w>"]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    (words / "vocab.json").write_text(json.dumps(numbers))
    (words / "merges.txt").write_text("#version: 0.2\n")
    tokenizer: Any = CLIPTokenizer
    text = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    pipeline = StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
        ),
        vae=AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer(
            str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=16
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def free_address() -> str:
    """Return a free port of this machine, as HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def serving(*arguments: str, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Run `mx serve`, and yield what it says once it serves."""
    import children  # beside this file, which then runs as a script

    process = subprocess.Popen(
        children.command(sys.executable, "-m", "mx", "serve", *arguments, "--json", "--wait", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdout is not None
    with process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def main() -> int:
    """Serve a pipeline, and load it as a user does."""
    import children

    children.end_on_signals()
    os.environ.update(QUIET)  # before they are imported
    with tempfile.TemporaryDirectory(prefix="mx-example-") as folder:
        root = Path(folder)
        pipeline = make_pipeline(root)
        (root / "program.py").write_text(PROGRAM)
        environment = {
            **os.environ,
            "MX_PEER_COORDINATOR": free_address(),
            "MX_PEER_CACHE_SOCKET": str(root / "cache.sock"),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(root / "empty"),
            **QUIET,
        }
        coordinator = subprocess.Popen(
            children.command(
                sys.executable, "-c", "from mx.cli import coordinator_main; coordinator_main()",
                "--listen", environment["MX_PEER_COORDINATOR"],
            ),
            stderr=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        with coordinator:
            try:
                with (
                    serving(str(pipeline), "--model", NAME, environment=environment) as served,
                    serving("--cache", "--memory", "1GB", environment=environment),
                ):
                    for model, nbytes in served["models"].items():
                        what = "files of the pipeline" if model == NAME else "component"
                        print(f"serving {model}: {what}, {nbytes:,} bytes", flush=True)
                    print(
                        "a process without any of these files loads the pipeline twice,\n"
                        "the second time with a VAE of its own:",
                        flush=True,
                    )
                    command = [sys.executable, "-m", "mx.engines.transformers"]
                    done = subprocess.run(
                        children.command(*command, root / "program.py"),
                        env=environment,
                        check=False,
                    )
                    return done.returncode
            finally:
                coordinator.terminate()


if __name__ == "__main__":
    sys.exit(main())
