"""A GRPO run whose rollouts come from vLLM, which follows the trainer by mx's weight transfer.

    python examples/grpo.py MODEL [--steps 5] [--ranks 2] [--replicas 1]

It starts a coordinator, vLLM's replicas, and the trainer's ranks, which shard the model by FSDP2.
In each step the replicas complete prompts, the ranks reward and train on what they wrote, and
`send_weights` has all replicas compute with the new weights. The reward is a toy: how many of the
tokens are even. MODEL is a folder or a name on the Hub of a causal language model; vLLM and
transformers are needed, and a CPU is enough for a small one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TOKENS = 4, 4, 16
NAME = "policy"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read() or b"null")


class Replicas:
    """vLLM's client of several servers, each with its own process."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls

    def _all(self, route: str, body: dict[str, Any]) -> None:
        for url in self.urls:
            post(f"{url}/{route}", body)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._all("pause?mode=keep", {})  # running requests go on with the new weights
        self._all("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", {"weight_version": weight_version})
        self._all("reset_prefix_cache", {})  # its KV blocks are of the weights before
        self._all("resume", {})

    def complete(self, prompts: list[list[int]], number: int) -> list[list[int]]:
        """Return how prompts go on, as tokens, by one of the replicas."""
        body = {
            "model": NAME,
            "prompt": prompts,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        found = post(f"{self.urls[number % len(self.urls)]}/v1/completions", body)
        return [choice["token_ids"] for choice in found["choices"]]


def train(given: argparse.Namespace) -> None:
    """Be one rank of the trainer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    import mx.engines.vllm
    from mx.engines.vllm.trainer import MxTrainerInitInfo

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, foreach=False)
    replicas = Replicas(given.urls)

    mx.engines.vllm.register()
    engine = WeightTransferTrainerFactory.trainer_init(
        MxTrainerInitInfo(model=NAME, coordinator=given.coordinator, rank=rank),
        client=replicas,
        source=ModuleSource(model),
    )
    rng = random.Random(0)  # the same prompts on all ranks
    for step in range(1, given.steps + 1):
        prompts = [[rng.randrange(3, given.vocabulary) for _ in range(8)] for _ in range(PROMPTS)]
        asked = [prompt for prompt in prompts for _ in range(GROUP)]
        # Each rank trains on all of them here; one with more data would take its share.
        made: list[Any] = [replicas.complete(asked, step) if rank == 0 else None]
        dist.broadcast_object_list(made, 0)
        tokens = torch.tensor([p + c for p, c in zip(asked, made[0], strict=True)])
        rewards = (tokens[:, 8:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
        advantages = rewards - rewards.mean(1, keepdim=True)
        advantages = (advantages / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logits = model(input_ids=tokens).logits[:, 7:-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[:, 8:, None])[..., 0]
        # One step of the optimizer for each rollout: the ratio to the old policy is 1.
        loss = -(advantages * torch.exp(chosen - chosen.detach())).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights()
        if rank == 0:
            print(
                f"step {step}: reward {float(rewards.mean()):.3f}, weights {engine.revision}, "
                f"replicas paused {engine.pause_ms:.0f} ms",
                flush=True,
            )
    engine.shutdown()
    dist.destroy_process_group()


def serve(given: argparse.Namespace, coordinator: str, port: int, log: Any) -> Any:
    """Start a replica."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.model]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "128", "--enforce-eager", "--max-num-seqs", "16"]
    command += ["--load-format", "mx-peer", "--skip-tokenizer-init"]
    command += ["--weight-transfer-config", '{"backend": "mx"}']
    more = {"VLLM_SERVER_DEV_MODE": "1", "MX_PEER_COORDINATOR": coordinator}
    more |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.Popen(command, env={**os.environ, **more}, stdout=log, stderr=log)


def wait_until_up(url: str, process: Any) -> None:
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit("a replica has ended: see replicas.log") from None
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--urls", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.urls:
        train(given)
        return

    from transformers import AutoConfig

    children = []
    with open("replicas.log", "wb") as log:
        try:
            coordinator = f"127.0.0.1:{free_port()}"
            daemon = Path(sys.executable).with_name("mx-coordinator")
            command = [str(daemon), "--listen", coordinator]
            children.append(subprocess.Popen(command, stdout=log, stderr=log))
            ports = [free_port() for _ in range(given.replicas)]
            replicas = [serve(given, coordinator, port, log) for port in ports]
            children += replicas
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            for url, process in zip(urls, replicas, strict=True):
                wait_until_up(url, process)
            size = AutoConfig.from_pretrained(given.model).vocab_size
            command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", coordinator]
            command += ["--vocabulary", str(size), "--urls", *urls]
            shared = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1"}
            shared |= {"MASTER_PORT": str(free_port())}
            ranks = [
                subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)})
                for rank in range(given.ranks)
            ]
            children += ranks
            if any(rank.wait() for rank in ranks):
                raise SystemExit("a rank of the trainer has failed")
        finally:
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait()


if __name__ == "__main__":
    main()
