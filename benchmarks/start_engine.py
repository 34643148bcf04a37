"""Starts one engine of vLLM, and prints how long each part of its start took; see `start`.

The argument is JSON: `model`, `options` of vLLM's `LLM`, `tokens` to generate, whether to `stay`
until standard input ends, and whether to `watch` a pull, for which mx is imported early.
MX_BENCH_EXEC_S is when the process was started, on the monotonic clock.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from typing import Any

#: Methods of vLLM's worker by the part of a start that they are. For a CPU the second compiles.
_WORKER = {
    "init_device": "device",
    "load_model": "model",
    "determine_available_memory": "compile",
    "initialize_from_config": "kv",
    "compile_or_warm_up_model": "compile",
}


class Spans:
    """The seconds that parts of a start took, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last_s = float(os.environ["MX_BENCH_EXEC_S"])
        self._last_layer_s: float | None = None

    def passed(self, name: str) -> None:
        """Note all since the last call."""
        now_s = time.monotonic()
        self.add(name, now_s - self.last_s)
        self.last_s = now_s

    def add(self, name: str, seconds: float) -> None:
        """Note some seconds more."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def until_processed(self, layers: Any) -> Any:
        """Wrap a function that yields layers: note the time from its last one until `processed` is
        called, less that of vLLM's two collections of garbage, as "after the last byte"."""

        @functools.wraps(layers)
        def watched(pull: Any) -> Any:
            for layer in layers(pull):
                self._last_layer_s = time.monotonic() - self.seconds.get("garbage", 0.0)
                yield layer

        return watched

    def processed(self) -> None:
        """See `until_processed`."""
        if self._last_layer_s is not None:
            now_s = time.monotonic() - self.seconds.get("garbage", 0.0)
            self.seconds["after the last byte"] = now_s - self._last_layer_s

    def around(self, owner: Any, method: str, name: str) -> None:
        """Note how long each call of a function of `owner`, a module or a class, takes."""
        original = getattr(owner, method, None)
        if original is None:
            return

        @functools.wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return original(*arguments, **named)
            finally:
                self.add(name, time.monotonic() - begin_s)
                if name == "processing":
                    self.processed()

        setattr(owner, method, timed)


def main() -> None:
    """Start the engine, and print the spans and its first tokens as a line of JSON."""
    asked, spans = json.loads(sys.argv[1]), Spans()
    spans.passed("interpreter")
    import torch

    # See docs/vllm.md: vLLM 0.32 uses AMX without having asked the kernel for it.
    torch.cpu._init_amx()
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, default_loader, utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    spans.passed("imports")
    spans.around(EngineArgs, "create_engine_config", "configuration")
    for module in (base_loader, utils):
        spans.around(module, "process_weights_after_loading", "processing")
    spans.around(default_loader.DefaultModelLoader, "load_weights", "reading")
    spans.around(gc, "collect", "garbage")
    if asked.get("watch"):
        from mx.api import Pull

        Pull.layers = spans.until_processed(Pull.layers)  # type: ignore[method-assign]
    for method, name in _WORKER.items():
        spans.around(Worker, method, name)
    engine = LLM(model=asked["model"], **asked["options"])
    spans.passed("engine")
    prompt: Any = {"prompt_token_ids": [5, 9, 3, 7]}

    def generate(count: int) -> list[int]:
        given = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        made = engine.generate([prompt], given, use_tqdm=False)
        return list(made[0].outputs[0].token_ids)

    generate(1)
    spans.passed("first token")
    tokens = generate(asked["tokens"])
    status = []
    if asked["options"]["load_format"] == "mx-peer":
        status = engine.collective_rpc("mx_peer_status")
    print(json.dumps({"spans": spans.seconds, "tokens": tokens, "status": status}), flush=True)
    if asked.get("stay"):
        sys.stdin.read()


if __name__ == "__main__":
    main()
