"""A process that runs vLLM engines, one after another, as its standard input says.

Each line is a JSON object with a command; each answer is a line that begins with `ANSWER`. vLLM's
import takes most of an engine's start: one process for many engines saves it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")

PROMPT = [5, 9, 3, 7]
TOKENS = 64


def digest(tensor: Any) -> str:
    """Return a digest of a tensor's form and bytes."""
    import torch

    flat = tensor.detach().as_subclass(torch.Tensor).contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


class FakeGpu:
    """A platform of vLLM's that says what CUDA's says of an H100, and computes on the CPU."""

    device_type = device_name = "cuda"

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def get_device_capability(self, device_id: int = 0) -> Any:
        from vllm.platforms.interface import DeviceCapability

        return DeviceCapability(major=9, minor=0)


def on_fake_gpu() -> contextlib.ExitStack:
    """Have vLLM's loaders and linear layers believe that they are on a GPU until it is closed."""
    from vllm import platforms
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from mx.engines.vllm.loader import MxPeerLoader

    fake, stack = FakeGpu(platforms.current_platform), contextlib.ExitStack()
    for module in (linear, utils, vocab_parallel_embedding):
        stack.enter_context(mock.patch.object(module, "current_platform", fake))
    for loader in (DefaultModelLoader, MxPeerLoader):
        original = loader.load_model

        def load_model(*given: Any, original: Any = original, **named: Any) -> Any:
            with mock.patch.object(platforms, "current_platform", fake, create=True):
                return original(*given, **named)

        stack.enter_context(mock.patch.object(loader, "load_model", load_model))
    return stack


def in_device_memory(gpu: Any) -> contextlib.ExitStack:
    """Have vLLM build its models in the memory of a stand-in GPU, until it is closed."""
    from vllm.model_executor.model_loader import base_loader, utils

    from mx.engines.vllm.loader import MxPeerLoader
    from tests.support.driver.torch_gpu import DEVICE

    create = base_loader.BaseModelLoader.create_model

    def create_model(*given: Any, **named: Any) -> Any:
        model = create(*given, **named)
        for each in (*model.parameters(), *model.buffers()):
            each.data = gpu.moved(each.data)
        return model

    stack = contextlib.ExitStack()
    for owner, name, new in (
        (base_loader.BaseModelLoader, "create_model", create_model),
        (MxPeerLoader, "_target", lambda *_: DEVICE),
        # It would move tensors that say to vLLM that they are a CPU's, and back.
        (utils, "device_loading_context", lambda *_: contextlib.nullcontext()),
    ):
        stack.enter_context(mock.patch.object(owner, name, new))
    return stack


def install_sleep(gpu: Any) -> None:
    """Have vLLM's worker for CPUs load into, and sleep by, vLLM's own allocator on a stand-in GPU:
    the methods are those of its worker for GPUs, which this one overrides or skips."""
    import vllm.device_allocator as allocators
    from vllm.v1.worker import cpu_worker, gpu_worker

    from tests.support.driver import memory_pool

    memory_pool.install(gpu)
    fake = FakeGpu(allocators.current_platform)
    allocators.current_platform = fake
    cpu: Any = cpu_worker.CPUWorker
    real: Any = gpu_worker.Worker
    for name in ("sleep", "wake_up", "discard"):
        setattr(cpu, name, getattr(real, name))
    use_pool = real._maybe_get_memory_pool_context

    def pool(worker: Any, tag: str) -> Any:
        config = worker.vllm_config.model_config
        with (
            mock.patch.object(gpu_worker, "current_platform", fake),
            mock.patch.object(config, "enable_cumem_allocator", True),
        ):
            return use_pool(worker, tag)

    cpu._maybe_get_memory_pool_context = pool


class Host:
    """One engine at a time, in this process."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.before: dict[str, str] = {}
        #: The classes of the modules that were processed before the last weights were there.
        self.early: list[str] = []
        self.scaled = ""
        self.platform = contextlib.ExitStack()
        self.device: Any = None
        if "MX_STANDIN_HOST_ACCESS" in os.environ:
            from tests.support.driver.torch_gpu import Gpu

            self.device = Gpu()
            self.device.install()
            if "MX_TEST_SLEEP" in os.environ:
                install_sleep(self.device)
        self._record()

    def _record(self) -> None:
        """Have every tensor hashed before vLLM processes it."""
        from vllm.model_executor.model_loader import base_loader

        from mx.engines.vllm.progressive import EarlyProcessing

        process, process_early = base_loader.process_weights_after_loading, EarlyProcessing._process

        def hashed(model: Any, *arguments: Any) -> None:
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            self._hash({name: t for name, t in tensors.items() if name not in self.before})
            process(model, *arguments)

        def hashed_early(early: Any, module: Any) -> None:
            slots = {n: slot for n, slot in early._slots.items() if slot.module is module}
            self._hash({name: slot.get() for name, slot in slots.items()})
            self.early.append(type(module).__name__)
            process_early(early, module)

        base_loader.process_weights_after_loading = hashed
        EarlyProcessing._process = hashed_early  # type: ignore[assignment,method-assign]

    def _hash(self, tensors: dict[str, Any]) -> None:
        if self.scaled in tensors:
            tensors[self.scaled].data.mul_(1.5)
        self.before |= {name: digest(tensor) for name, tensor in tensors.items()}

    def start(
        self, model: str, scaled: str = "", gpu: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Start an engine, and return what it computes with, and what it lends."""
        from vllm import LLM

        self.stop()
        if gpu:
            self.platform = on_fake_gpu()
            if self.device is not None:
                self.platform.enter_context(in_device_memory(self.device))
        self.scaled, self.before, self.early = scaled, {}, []
        ranks = int(options.get("tensor_parallel_size", 1))
        ranks *= int(options.get("pipeline_parallel_size", 1))
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
        made = self.embed() if options.get("runner") == "pooling" else self.generate()
        return held | {"before": self.before, "generated": made, "early": self.early}

    def cache_key(self, model: str, **options: Any) -> str:
        """Return vLLM's key of an engine's compiled code."""
        from vllm.engine.arg_utils import EngineArgs

        given = {"load_format": "mx-peer", "skip_tokenizer_init": True, "max_model_len": 128}
        arguments = EngineArgs(model=model, **{**given, **options})
        return str(arguments.create_engine_config().compute_hash())

    def processing_key(self, model: str, stages: int = 1, partition: str = "", **given: Any) -> str:
        """Return mx's key of what the first rank of an engine holds before processing."""
        from vllm.engine.arg_utils import EngineArgs

        from mx.engines.vllm.keys import key_of

        options = {"skip_tokenizer_init": True, "max_model_len": 128, **given}
        made = EngineArgs(model=model, **options).create_engine_config()
        ranks = {"tp": (0, 1), "pp": (0, stages), "dp": (0, 1)}
        with mock.patch.dict(
            os.environ, {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}
        ):
            return str(key_of(made, ranks, "loaded"))

    def lack(self) -> None:
        """Make this vLLM one that does not say which methods take processed weights."""
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        of_all = [QuantizeMethodBase]
        for each in of_all:
            of_all += each.__subclasses__()
            if "supports_pre_processed_weights" in vars(each):
                del each.supports_pre_processed_weights

    def last_before(self) -> dict[str, str]:
        """Return the tensors before processing of the last engine, which may have failed then."""
        return self.before

    def look(self) -> dict[str, Any]:
        """Return the tensors that the engine holds."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        model = runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {"tensors": {name: digest(tensor) for name, tensor in tensors.items()}}

    def host_copies(self) -> list[str]:
        """Return how mx has copied weights of the stand-in GPU to the host, and forget it."""
        found, self.device.host_copies = self.device.host_copies, []
        return list(found)

    def used_bytes(self) -> int:
        """Return how much of the stand-in GPU's memory this process has."""
        free, total = self.device.device.memory_info()
        return int(total - free)

    def sleep(self, level: int) -> int:
        """Put the engine to sleep as its user does, and return what `used_bytes` does then."""
        self.llm.sleep(level=level)
        return self.used_bytes()

    def wake(self) -> bool:
        """Wake the engine as its user does, and return whether it takes requests."""
        return bool(self.llm.wake_up())

    def is_sleeping(self) -> bool:
        """Return whether the engine takes no requests."""
        return bool(self.llm.llm_engine.is_sleeping())

    def embed(self) -> list[str]:
        """Return the embedding of a prompt, as hexadecimal."""
        prompt: Any = {"prompt_token_ids": PROMPT}
        (made,) = self.llm.embed([prompt], use_tqdm=False)
        return [float(each).hex() for each in made.outputs.embedding]

    def generate(self, adapter: str = "", audio: str = "") -> list[Any]:
        """Return tokens and the logprobs of each, as hexadecimal.

        Args:
            adapter: The folder of an adapter (LoRA) to compute with; "" for none.
            audio: A prompt in words to which a second of sound belongs; "" for none.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        parameters = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": PROMPT}
        if audio:
            import numpy

            sound = numpy.sin(numpy.arange(16_000, dtype=numpy.float32) / 10)
            prompt = {"prompt": audio, "multi_modal_data": {"audio": (sound, 16_000)}}
        request = LoRARequest("adapter", 1, adapter) if adapter else None
        made = self.llm.generate([prompt], parameters, use_tqdm=False, lora_request=request)[
            0
        ].outputs[0]
        return [
            [token, sorted((int(key), each.logprob.hex()) for key, each in logprobs.items())]
            for token, logprobs in zip(made.token_ids, made.logprobs, strict=True)
        ]

    def complete(
        self, prompt: list[int], tokens: int = 8, salt: str = "", **transfer: Any
    ) -> dict[str, Any]:
        """Return how a prompt goes on: tokens with the logprob of each, as hexadecimal, how many of
        the prompt's tokens were not computed, and what the KV connector passes on.

        Args:
            prompt: Its tokens.
            tokens: How many more.
            salt: The request's cache salt; "" for none.
            transfer: What the KV connector gets with the request.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        asked: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        (made,) = self.llm.generate([asked], parameters, use_tqdm=False)
        logprobs = [
            next(each.logprob.hex() for key, each in found.items() if key == token)
            for token, found in zip(
                made.outputs[0].token_ids, made.outputs[0].logprobs, strict=True
            )
        ]
        return {
            "tokens": list(made.outputs[0].token_ids),
            "logprobs": logprobs,
            "cached": made.num_cached_tokens,
            "transfer": made.kv_transfer_params,
        }

    def forget(self) -> bool:
        """Have the engine and its connector forget what is cached."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def kv(self) -> dict[str, Any]:
        """Return what the KV connector has counted, once what it has stored is listed; and its
        pool's counts."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        saver, counts = connector._half._saver, dict(connector.counts)
        more: dict[str, Any] = {}
        if saver is not None:
            until_s = time.monotonic() + 30
            while time.monotonic() < until_s:
                more = {**saver.pool.counts(), "slots": saver.pool.memory.slots}
                if more["listed"] + more["free"] + more["leaving"] == more["slots"]:
                    break
                time.sleep(0.01)
            more["wrong"] = saver.pool.wrong
        return (
            counts | more | {"peers": connector._half._reader and connector._half._reader.peers()}
        )

    def blocks(self) -> dict[str, str]:
        """Return the blocks that the KV connector lists, with a digest of what each slot holds."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        pool = get_kv_transfer_group()._half._saver.pool
        found = {block: pool.entry_of(block) for block in pool.newest()}
        return {
            block.hex(): hashlib.sha256(pool.memory.digests(entry.slot)).hexdigest()
            for block, entry in found.items()
            if entry is not None
        }

    def complete_changing(self, prompt: list[int], method: str, arguments: list[Any]) -> int:
        """Complete a prompt; after two steps, call a method of each worker. Return how many tokens
        there are."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        engine.add_request(
            f"changing-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, parameters
        )
        made: list[Any] = []
        steps = 0
        while engine.has_unfinished_requests():
            made = engine.step() or made
            steps += 1
            if steps == 2:
                self.call(method, *arguments)
        return len(made[0].outputs[0].token_ids)

    def abort(self, prompt: list[int], steps: int, **transfer: Any) -> int:
        """Add a request and abort it after so many steps; return how many more the engine takes
        until nothing is left of it."""
        from vllm import SamplingParams

        engine, name = self.llm.llm_engine, f"aborted-{time.monotonic_ns()}"
        parameters = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        for _ in range(steps):
            engine.step()
        engine.abort_request([name])
        more = 0
        while engine.has_unfinished_requests():
            engine.step()
            more += 1
        return more

    def complete_all(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return how prompts go on that are computed together, and how often one of them was
        preempted."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.scheduler import Scheduler

        preempted = []
        preempt = Scheduler._preempt_request

        def counting(scheduler: Any, request: Any, *more: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(scheduler, request, *more, **named)

        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked: Any = [{"prompt_token_ids": each} for each in prompts]
        with mock.patch.object(Scheduler, "_preempt_request", counting):
            made = self.llm.generate(asked, parameters, use_tqdm=False)
        tokens_of = [list(each.outputs[0].token_ids) for each in made]
        return {"tokens": tokens_of, "preempted": len(preempted)}

    def spoil(self) -> None:
        """Change a byte of each block that the KV connector lists."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for kept in get_kv_transfer_group()._half._saver._kept:
            kept[:, 0, 0, 0] += 1

    def transfer(self, method: str, *arguments: Any) -> None:
        """Call one of the engine's methods of weight transfer, as vLLM's clients do."""
        if method == "init_weight_transfer_engine":
            arguments = ({"init_info": arguments[0]},)
        elif method == "update_weights":
            arguments = ({"update_info": arguments[0]},)
        getattr(self.llm, method)(*arguments)
        if method == "finish_weight_update":
            self.llm.reset_prefix_cache()

    def fail_once(self) -> None:
        """Have vLLM fail while it processes the fourth module of the next update."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        process, calls = UnquantizedLinearMethod.process_weights_after_loading, [0]

        def failing(method: Any, layer: Any) -> None:
            calls[0] += 1
            if calls[0] == 4:
                UnquantizedLinearMethod.process_weights_after_loading = process
                raise RuntimeError("no memory for it")
            process(method, layer)

        UnquantizedLinearMethod.process_weights_after_loading = failing

    def look_at_values(self) -> None:
        """Have the model's `load_weights` look at what it loads, from now on."""
        model = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        load = model.load_weights

        def looking(pairs: Any) -> Any:
            return load((name, each) for name, each in pairs if each.float().sum().item() or 1)

        model.load_weights = looking

    def digests(self, *names: str) -> list[str]:
        """Return digests of parameters that the first worker computes with."""
        model = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        return [digest(model.get_parameter(name)) for name in names]

    def version(self) -> str:
        """Return vLLM's name of the weights."""
        return str(self.llm.get_weight_version())

    def score(self, tokens: list[int]) -> list[float]:
        """Return the logprob of each token of a prompt but the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (made,) = self.llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        return [
            float(each[token].logprob)
            for token, each in zip(tokens[1:], made.prompt_logprobs[1:], strict=True)
        ]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of each worker."""
        return self.llm.collective_rpc(method, args=arguments)

    def stop(self) -> None:
        """End the engine."""
        self.platform.close()
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        if "MX_TEST_SLEEP" in os.environ:  # vLLM's allocator has one model in a process
            from vllm.device_allocator.cumem import CuMemAllocator
            from vllm.model_executor.layers import rotary_embedding

            rotary_embedding._ROPE_DICT.clear()
            gc.collect()
            CuMemAllocator.get_instance().release_pools()  # as a GPU's worker does at its end
        gc.collect()


def prepare() -> None:
    """Make this a process in which vLLM's engines run."""
    import torch
    from vllm import ModelRegistry

    # vLLM 0.32 computes attention with AMX where the CPU has it, and asks the kernel for its
    # registers nowhere: SIGILL, unless something else in the process has asked.
    torch.cpu._init_amx()
    ModelRegistry.register_model("LlamaWithTensor", "tests.vllm.with_tensor:LlamaWithTensor")


def main() -> None:
    """Answer commands until there are no more."""
    # The first `cos` of a process may be wrong by 1.5e-4 where two threads compute it: on a Xeon
    # with AMX in 1 of 600 processes that do nothing else, with torch 2.13 alone. vLLM's tables of
    # positions are made so, and with them all of its keys. One element takes one thread.
    import torch

    torch.zeros(1).cos()
    prepare()
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
