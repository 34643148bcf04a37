"""Reads a vLLM's sources, without running them, for what mx uses of them.

    python -m tests.vllm.seams FOLDER        a folder that has `vllm`, such as an unpacked wheel

Prints what is missing, and the fields of vLLM's key of cached weights that mx's keys do not have.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: vLLM's fields, and the field of mx's keys that differs where they do. `checkpoint` and `revision`
#: are the identity that a state is made of; `config` digests the model's configuration, `kernels`
#: vLLM's of its kernels; a draft model is left to vLLM's ordinary loader.
COVERED = {
    "checkpoint": "checkpoint",
    "model_arch": "arch",
    "tp_size": "tp",
    "tp_rank": "tp",
    "pp_size": "pp",
    "pp_rank": "pp",
    "dp_size": "dp",
    "dp_rank": "dp",
    "dtype": "dtype",
    "quantization": "quantization",
    "quant_config_hash": "quant_config",
    "revision": "checkpoint",
    "vllm_version": "version",
    "is_draft": "",
    # Since 0.33:
    "rope_parameters_hash": "config",
    "kv_cache_dtype": "cache",
    "kv_cache_dtype_skip_layers": "cache",
    "enable_expert_parallel": "experts",
    "expert_placement_strategy": "experts",
    "moe_backend": "kernels",
    "linear_backend": "kernels",
    "linear_backend_per_quant": "kernels",
}

#: What mx imports, replaces or calls: a module's path, and names in it (a method after its class).
SEAMS = {
    "distributed/parallel_state.py": ["get_tp_group", "get_pp_group"],
    "distributed/utils.py": ["get_pp_indices"],
    "engine/arg_utils.py": ["EngineArgs.create_engine_config", "get_model_path"],
    "model_executor/model_loader/__init__.py": [
        "_LOAD_FORMAT_TO_MODEL_LOADER",
        "register_model_loader",
    ],
    "model_executor/model_loader/base_loader.py": [
        "BaseModelLoader.create_model",
        "BaseModelLoader.load_model",
        "process_weights_after_loading",
    ],
    "model_executor/model_loader/default_loader.py": [
        "DefaultModelLoader.download_model",
        "DefaultModelLoader.get_all_weights",
        "DefaultModelLoader.load_weights",
    ],
    "model_executor/model_loader/utils.py": [
        "device_loading_context",
        "get_model_architecture",
        "initialize_model",
        "process_weights_after_loading",
    ],
    "model_executor/layers/linear.py": ["LinearBase"],
    "model_executor/layers/quantization/base_config.py": [
        "QuantizeMethodBase.process_weights_after_loading",
        "QuantizeMethodBase.supports_pre_processed_weights",
    ],
    "model_executor/layers/utils.py": ["dispatch_cpu_unquantized_gemm"],
    "model_executor/utils.py": ["weights_already_processed"],
    "utils/torch_utils.py": ["set_default_torch_dtype"],
    "v1/worker/gpu_worker.py": [
        f"Worker.{name}"
        for name in (
            "compile_or_warm_up_model",
            "discard",
            "finish_weight_update",
            "load_model",
            "reload_weights",
            "reset_weights",
            "shutdown",
            "sleep",
            "start_draft_weight_update",
            "start_weight_update",
            "update_weights",
            "wake_up",
        )
    ],
}
_KEY = "model_executor/model_loader/weight_cache/protocol.py"


def missing(vllm: Path) -> list[str]:
    """Return what mx uses, and a vLLM does not have.

    Args:
        vllm: Its folder.
    """
    return [
        f"{path}: {name}"
        for path, names in SEAMS.items()
        for name in sorted({*names} - set(_names(ast.parse((vllm / path).read_bytes()))))
    ]


def uncovered(vllm: Path) -> list[str]:
    """Return the fields of vLLM's key of cached weights that nothing in mx's keys stands for.

    Args:
        vllm: Its folder.
    """
    (key,) = (
        each
        for each in ast.parse((vllm / _KEY).read_bytes()).body
        if isinstance(each, ast.ClassDef) and each.name == "WeightCacheKey"
    )
    fields = [
        each.target.id
        for each in key.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    assert fields, "vLLM's key has no fields"
    return [name for name in fields if name not in COVERED]


def _names(found: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Yield the names that a module or a class defines or imports, with those in its classes."""
    for each in found.body:
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + each.name
            case ast.ClassDef():
                yield prefix + each.name
                yield from _names(each, f"{prefix}{each.name}.")
            case ast.Import() | ast.ImportFrom():
                yield from (prefix + (name.asname or name.name) for name in each.names)
            case ast.Assign():
                yield from (prefix + t.id for t in each.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def main() -> int:
    """Print what is missing, and return 1 if anything is."""
    vllm = Path(sys.argv[1]) / "vllm"
    found = [*missing(vllm), *(f"the key lacks {name}" for name in uncovered(vllm))]
    print("\n".join(found) or "nothing is missing")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
