"""A process that runs vLLM engines, one after another, as its standard input says.

Each line is a JSON object with a command; each answer is a line that begins with `ANSWER`. vLLM's
import takes most of an engine's start: one process for many engines saves it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import traceback
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")

PROMPT = [5, 9, 3, 7]
TOKENS = 64


def digest(tensor: Any) -> str:
    """Return a digest of a tensor's form and bytes."""
    import torch

    flat = tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


class Host:
    """One engine at a time, in this process."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.before: dict[str, str] = {}
        self.scaled = ""
        self._record()

    def _record(self) -> None:
        """Have every tensor hashed before vLLM processes it."""
        from vllm.model_executor.model_loader import base_loader

        process = base_loader.process_weights_after_loading

        def hashed(model: Any, *arguments: Any) -> None:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            if self.scaled:
                tensors[self.scaled].data.mul_(1.5)
            self.before = {name: digest(tensor) for name, tensor in tensors.items()}
            process(model, *arguments)

        base_loader.process_weights_after_loading = hashed

    def start(self, model: str, scaled: str = "", **options: Any) -> dict[str, Any]:
        """Start an engine, and return what it computes with, and what it lends."""
        from vllm import LLM

        self.stop()
        self.scaled, self.before = scaled, {}
        ranks = int(options.get("tensor_parallel_size", 1))
        if ranks > 1:  # in processes of their own, on a core each
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        self.llm = LLM(
            model=model,
            **{
                "load_format": "mx-peer",
                "dtype": "bfloat16",
                "enforce_eager": True,
                "max_model_len": 128,
                "kv_cache_memory_bytes": 32 << 20,
                "skip_tokenizer_init": True,
                "seed": 0,
                **options,
            },
        )
        held = self.look() if ranks == 1 else {}
        return held | {"before": self.before, "generated": self.generate()}

    def look(self) -> dict[str, Any]:
        """Return the tensors that the engine holds."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        model = runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {"tensors": {name: digest(tensor) for name, tensor in tensors.items()}}

    def generate(self) -> list[Any]:
        """Return tokens and the logprobs of each, as hexadecimal."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": PROMPT}
        made = self.llm.generate([prompt], parameters, use_tqdm=False)[0].outputs[0]
        return [
            [token, sorted((int(key), each.logprob.hex()) for key, each in logprobs.items())]
            for token, logprobs in zip(made.token_ids, made.logprobs, strict=True)
        ]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of each worker."""
        return self.llm.collective_rpc(method, args=arguments)

    def stop(self) -> None:
        """End the engine."""
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()


def main() -> None:
    """Answer commands until there are no more."""
    host = Host()
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            method = getattr(host, command["do"])
            answer = {"answer": method(*command.get("args", ()), **command.get("options", {}))}
        except Exception as error:  # noqa: BLE001 - the test looks at it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)
    host.stop()


if __name__ == "__main__":
    main()
