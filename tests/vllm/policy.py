"""A trainer of a small Llama in processes that shard it by FSDP2, for vLLM's replicas to follow.

The ranks are told what to do as those of `tests.support.trainer`. The first one's client of the
replicas asks the test's process, which has them: a line that begins with `CLIENT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.daemon import ROOT
from tests.support.trainer import free_port

#: What a client asks of the replicas: the name of the method, and its arguments.
Ask = Callable[[str, list[Any]], None]


class Policy:
    """The ranks of a trainer, in processes."""

    def __init__(self, count: int, checkpoint: str, ask: Ask, **changed: str) -> None:
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
        self._ask = ask
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.policy", checkpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **shared, "RANK": str(rank), **changed},
            )
            for rank in range(count)
        ]

    def ask(self, expression: str) -> list[Any]:
        """Have all ranks evaluate an expression, and return what each finds."""
        for each in self.processes:
            self._write(each, expression.replace("\n", " "))
        return [self._answer(each) for each in self.processes]

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("CLIENT "):
                method, arguments = json.loads(line.removeprefix("CLIENT "))
                try:
                    self._ask(method, arguments)
                    self._write(process, "")
                except Exception as error:  # noqa: BLE001 - the trainer's client raises it
                    self._write(process, f"{type(error).__name__}: {error}".replace("\n", " "))
            elif line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError("a rank has ended")

    def close(self) -> None:
        """Kill the ranks."""
        for process in self.processes:
            process.kill()
            with process:
                pass


@contextmanager
def policy(count: int, checkpoint: str, ask: Ask, **changed: str) -> Iterator[Policy]:
    """Yield such ranks, which are killed in the end."""
    made = Policy(count, checkpoint, ask, **changed)
    try:
        yield made
    finally:
        made.close()


# -- in these processes ----------------------------------------------------------------------------


class Client:
    """vLLM's client of the replicas."""

    def __getattr__(self, method: str) -> Any:
        def ask(*arguments: Any, **named: Any) -> None:
            print("CLIENT " + json.dumps([method, [*arguments, *named.values()]]), flush=True)
            if error := sys.stdin.readline().strip():
                raise RuntimeError(error)

        return ask


class Rank:
    """One rank's model and optimizer."""

    def __init__(self, checkpoint: str) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.engine: Any = None

    def begin(self, name: str, coordinator: str, **more: Any) -> str:
        """Serve the weights for replicas."""
        import torch.distributed as dist
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from mx.engines.vllm.trainer import MxTrainerInitInfo

        self.engine = WeightTransferTrainerFactory.trainer_init(
            MxTrainerInitInfo(model=name, coordinator=coordinator, rank=dist.get_rank(), **more),
            client=Client(),
            source=ModuleSource(self.model),
        )
        return type(self.engine).__name__

    def step(self, seed: int) -> float:
        """Train on some tokens, all ranks on the same, and return the loss."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 250, (2, 32), generator=generator)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def send(self) -> str:
        """Have the replicas install the weights, and return their version."""
        self.engine.send_weights()
        return str(self.engine.revision)

    def score(self, tokens: list[int]) -> list[float]:
        """Return the logprob of each token but the first."""
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
        found = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])
        return [float(each) for each in found[:, 0]]

    def digests(self, *names: tuple[str, ...]) -> list[str]:
        """Return digests of parameters, each of several that vLLM has as one."""
        import torch

        from tests.vllm.host import digest

        self.model.reshard()
        found = dict(self.model.named_parameters())
        whole = [[found[name].full_tensor() for name in each] for each in names]
        return [digest(torch.cat(each)) for each in whole]

    def pause_ms(self) -> float:
        """Return how long the replicas could not generate for the last version."""
        return float(self.engine.pause_ms)

    def close(self) -> None:
        """Serve nothing any more."""
        self.engine.shutdown()


def main() -> None:
    """Be a rank."""
    import torch.distributed as dist

    import mx.engines.vllm
    from mx.errors import MxError

    mx.engines.vllm.register()
    dist.init_process_group("gloo")
    scope: dict[str, Any] = {"rank": Rank(sys.argv[1]), "number": dist.get_rank()}
    while line := sys.stdin.readline():
        try:
            answer = eval(line, scope)
        except MxError as error:
            answer = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
