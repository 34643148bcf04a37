"""Inputs for a model of any type: of its forward's signature, its configuration, and its errors.

A forward says what it lacks, and which size it expects, in the error that it raises: each attempt
takes the last one's error into account.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

#: For how long inputs are looked for, and how often a set of them is corrected.
SEARCH_S = 30.0
CORRECTIONS = 6
MOST_CORRECTED = 20

#: What is not an input of a plain forward.
_NEVER = re.compile(
    r"(.*_)?labels?|.*past_key_values?|cache_position|.*cache.*|return_.*|output_.*|use_.*|interpolate_.*|mm_.*|logits_to_keep"
    r"|kwargs|self|.*inputs_embeds|.*_embeddings|.*head_mask|encoder_outputs|decoder_attention_mask|.*_loss"
)


def described(config: Any, *names: str) -> int | None:
    """Return the first number that a configuration, or one in it, has for one of the names."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[-1]
        elif isinstance(value, dict):
            value = value.get("height")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    for part in vars(config).values():
        if isinstance(part, transformers.PreTrainedConfig):
            found = described(part, *names)
            if found is not None:
                return found
    return None


class _Maker:
    """Makes tensors for the parameters of one model's forward."""

    def __init__(self, model: Any) -> None:
        self._generator = torch.Generator().manual_seed(2)
        config = model.config
        self.config = config
        self.dtype = model.dtype
        self.size = described(config, "image_size", "input_size", "crop_size") or 64
        self.channels = described(config, "num_channels", "in_channels", "in_chans") or 3
        self.mels = (
            described(
                config, "num_mel_bins", "n_mels", "mel_bins", "input_feat_size", "feature_size"
            )
            or 80
        )
        self.frames = 2 * (described(config, "max_source_positions") or 64)
        self.hidden = described(config, "hidden_size", "d_model", "n_embd", "dim") or 64
        self.tokens = min(100, described(config, "vocab_size") or 100)
        self.patch = described(config, "patch_size") or 16
        self.history = self._history()

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator).to(self.dtype)

    def whole(self, most: int, *shape: int) -> torch.Tensor:
        low = min(4, most - 1)
        return torch.randint(low, max(most, low + 1), shape, generator=self._generator)

    def _history(self) -> int:
        """Return how many values of the past a model of time series wants."""
        length = described(self.config, "context_length", "prediction_length") or 8
        return length + int(max(getattr(self.config, "lags_sequence", None) or [0]))

    def options(self, name: str) -> list[Any]:
        """Return what a parameter may be, the likeliest first; nothing if that is not known."""
        for pattern, make in _MAKERS:
            if re.fullmatch(pattern, name):
                return make(self)
        return []


def _images(make: _Maker) -> list[torch.Tensor]:
    size, channels = make.size, make.channels
    return [
        make.floats(1, channels, size, size),
        make.floats(1, 1, channels, size, size),
        make.floats(16, channels * make.patch**2),
        make.floats(16, channels * 2 * make.patch**2),
        make.floats(1, 16, channels * make.patch**2),
        make.floats(1, 8, channels, size, size),
        make.floats(16, channels, make.patch, make.patch),
        make.floats(1, 2, channels, size, size),
    ]


def _videos(make: _Maker) -> list[torch.Tensor]:
    return [make.floats(1, 8, make.channels, make.size, make.size)]


def _waves(make: _Maker) -> list[torch.Tensor]:
    return [
        make.floats(1, 4000),
        make.floats(1, 1, 4000),
        make.floats(1, 1024, 128),
        make.floats(1, make.frames, make.mels),
        make.whole(make.tokens, 1, 12),
    ]


def _features(make: _Maker) -> list[torch.Tensor]:
    return [
        make.floats(1, make.mels, make.frames),
        make.floats(1, make.frames, make.mels),
        make.floats(1, 1, make.frames, make.mels),
        make.floats(1, 4000),
    ]


def _ids(make: _Maker) -> list[torch.Tensor]:
    books = described(
        make.config, "num_codebooks", "n_codes_total", "num_quantizers", "audio_channels"
    )
    ids = [make.whole(make.tokens, 1, 12)]
    if books:
        ids += [make.whole(make.tokens, 1, 12, books), make.whole(make.tokens, 1, books, 12)]
    return ids


def _boxes(make: _Maker) -> list[torch.Tensor]:
    corners = torch.tensor([2, 3, 20, 30])
    return [corners.expand(1, 12, 4).clone(), torch.rand(1, 12, 8), torch.rand(1, 12, 4)]


def _time(make: _Maker) -> list[torch.Tensor]:
    fields = getattr(make.config, "num_time_features", None) or 1
    return [make.floats(1, make.history, fields)]


def _future_time(make: _Maker) -> list[torch.Tensor]:
    fields = getattr(make.config, "num_time_features", None) or 1
    return [make.floats(1, described(make.config, "prediction_length") or 8, fields)]


def _past(make: _Maker) -> list[torch.Tensor]:
    channels = described(make.config, "num_input_channels") or 1
    return [make.floats(1, make.history), make.floats(1, make.history, channels)]


#: What makes the values of a parameter, the first pattern that matches its name.
_MAKERS: list[tuple[str, Callable[[_Maker], list[Any]]]] = [
    (r"decoder_input_ids|decoder_ids|labels_ids", lambda m: [each[:, :4] for each in _ids(m)]),
    (r"(input|text|prompt|query|candidate|qformer_input|entity)_?(ids)?|.*input_ids|codes?", _ids),
    (r"inputs", lambda m: [m.whole(m.tokens, 1, 64), m.floats(1, 64, m.hidden), *_images(m)]),
    (r"pixel_values_videos?|video_values|videos", _videos),
    (r"prompt_pixel_values|image|images|pixel_values.*|.*pixel_values", _images),
    (r"bool_masked_pos", lambda m: [torch.arange((m.size // m.patch) ** 2)[None] % 2 == 0]),
    (r"input_features|audio_features|features|.*spectrogram.*|mel.*", _features),
    (r"(audio|input|speech|target)_?values?|audio|waveform|raw_.*", _waves),
    (r"bbox|.*boxes", _boxes),
    (r"(image|video)_grid_thw|grid_thw", lambda m: [torch.tensor([[1, 4, 4]])]),
    (r"grid_hw|spatial_shapes|tgt_sizes|target_sizes", lambda m: [torch.tensor([[4, 4]])]),
    (r"(image_|original_)?sizes", lambda m: [torch.tensor([[m.size, m.size]])]),
    (r"(image|pixel)_position_ids", lambda m: [_positions(4)]),
    (r"pixel_(attention_)?mask", lambda m: [torch.ones(1, m.size, m.size).long()]),
    (r"(input_features|feature|audio)_(attention_)?mask", lambda m: [_ones(m.frames)]),
    (r".*attention_mask|.*_mask|mask", lambda m: [_ones(12)]),
    (r"token_type_ids", lambda m: [torch.zeros(1, 12).long(), torch.zeros(1, 12, 7).long()]),
    (r"position_ids|timesteps?", lambda m: [torch.arange(12)[None]]),
    (r"feature_lens|audio_(feature_)?lens|.*lengths?", lambda m: [torch.tensor([m.frames])]),
    (r"visual_feats|visual_embeds", lambda m: [
        m.floats(1, 5, described(m.config, "visual_feat_dim", "visual_embedding_dim") or 2048)]),
    (r"visual_pos", lambda m: [m.floats(1, 5, 4)]),
    (r"past_values", _past),
    (r"past_time_features", _time),
    (r"future_time_features", _future_time),
    (r"future_values", lambda m: [m.floats(1, described(m.config, "prediction_length") or 8)]),
    (r"past_observed_mask", lambda m: [torch.ones(1, m.history)]),
    (r"static_categorical_features", lambda m: [torch.zeros(1, 1).long()]),
    (r"static_real_features", lambda m: [m.floats(1, 1)]),
    (r"states", lambda m: [m.floats(1, 6, described(m.config, "state_dim") or 17)]),
    (r"actions", lambda m: [m.floats(1, 6, described(m.config, "act_dim") or 4)]),
    (r"rewards|returns_to_go", lambda m: [m.floats(1, 6, 1)]),
    (r"is_longer", lambda m: [torch.tensor([[False]])]),
    (r"flattened_patches", lambda m: [
        m.floats(1, 16, 2 + (described(m.config, "patch_embed_hidden_size") or 768))]),
    (r"task_inputs", lambda m: [m.whole(m.tokens, 1, 77)]),
    (r"state", lambda m: [m.floats(1, described(m.config, "max_state_dim") or 32)]),
    (r"language", lambda m: [torch.zeros(1).long()]),
    (r"latents", lambda m: [m.floats(1, 12, m.hidden), m.floats(1, m.hidden, 12)]),
    (r"(encoder_)?hidden_states?|.*_embeds?|.*_states", lambda m: [m.floats(1, 12, m.hidden)]),
]  # fmt: skip


def _ones(length: int) -> torch.Tensor:
    return torch.ones(1, length, dtype=torch.long)


def _positions(side: int) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(side), torch.arange(side))[None]


#: What models are about, and what stands for an image in their texts.
_MAINS = ("input_ids", "pixel_values", "input_features", "input_values", "inputs")
_IMAGE_TOKENS = ("image_token_id", "image_token_index")


def attempts(model: Any) -> Iterator[dict[str, Any]]:
    """Yield sets of inputs to begin with, the likeliest first."""
    make = _Maker(model)
    parameters = inspect.signature(model.forward).parameters
    accepted = [name for name in parameters if not _NEVER.fullmatch(name)]
    needed = [
        name
        for name in parameters
        if parameters[name].default is inspect.Parameter.empty
        and parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name
    mains = [main] if main in accepted else []
    firsts = [*mains, *(name for name in _MAINS if name in accepted)]
    for first in dict.fromkeys([*firsts, *needed, *accepted]):
        for value in make.options(first):
            given = {first: value}
            for name in needed:
                options = make.options(name)
                if name not in given and options:
                    given[name] = options[0]
            if "decoder_input_ids" in accepted and "decoder_input_ids" not in given:
                yield {**given, "decoder_input_ids": make.options("decoder_input_ids")[0]}
            yield given
    everything = {name: make.options(name)[:1] for name in accepted}
    yield {name: value[0] for name, value in everything.items() if value}


def corrections(model: Any, given: dict[str, Any], error: Exception) -> Iterator[dict[str, Any]]:
    """Yield inputs without what an error complains about; none if it does not say."""
    text = str(error)
    make = _Maker(model)
    accepted = inspect.signature(model.forward).parameters
    for name in re.findall(r"[a-z][a-z_0-9]{3,}", text):
        if name in accepted and name not in given and not _NEVER.fullmatch(name):
            for value in make.options(name):
                yield {**given, name: value}
    if "None" in text or "specify" in text:
        for name in _MAINS:
            if name in accepted and name not in given:
                for value in make.options(name):
                    yield {**given, name: value}
    if found := re.search(r"match.*tokens:? (\d+).*features:? (\d+)", text):
        # An image stands in a text for so many tokens.
        image = torch.full((1, int(found[2])), described(model.config, *_IMAGE_TOKENS) or 3)
        yield {**given, "input_ids": torch.cat([image, make.whole(make.tokens, 1, 8)], 1)}
    if found := re.search(r"\((\d+)\*(\d+)\) doesn't match model \((\d+)\*(\d+)\)", text):
        yield {**given, "pixel_values": make.floats(1, make.channels, int(found[3]), int(found[4]))}
    if found := re.search(r"length \d+ is not a multiple of (\d+)", text):
        yield {**given, "input_values": make.floats(1, 4 * int(found[1]))}
    images = given.get("pixel_values")
    if (
        re.search("index k out of range|too small", text)
        and images is not None
        and images.shape[-1] <= 256
    ):
        yield {**given, "pixel_values": make.floats(1, make.channels, 512, 512)}
    # A layer of another width; another image, or another number of channels, than it is built for.
    for pattern, swap in (
        (r"cannot be multiplied \(\d+x(?P<here>\d+) and (?P<there>\d+)x\d+\)", -1),
        (r"to have (?P<there>\d+) channels, but got (?P<here>\d+) channels", None),
        (r"normalized_shape=\[(?P<there>\d+)\].*input of size\[.*?(?P<here>\d+)\]", -1),
        (r"[Ii]nput .*size \(?(?P<here>\d+)\D+\d+\)? doesn't match model \(?(?P<there>\d+)", None),
        (r"[Ee]xpected (?P<there>\d+) .*(but )?got (?P<here>\d+)", None),
        (r"length (?P<there>\d+), but found (?P<here>\d+)", None),
        (r"tensor a \((?P<here>\d+)\) must match .* b \((?P<there>\d+)\)", None),
        (r"tensor a \((?P<there>\d+)\) must match .* b \((?P<here>\d+)\)", None),
    ):
        found = re.search(pattern, text, re.DOTALL)
        if found and int(found["there"]) <= 8192:
            changed = _resized(make, given, int(found["here"]), int(found["there"]), swap)
            if changed is not None:
                yield changed


def _resized(
    make: _Maker, given: dict[str, Any], here: int, there: int, axis: int | None
) -> dict[str, Any] | None:
    """Return inputs in which one has another size along one dimension, or all of that size."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or here not in value.shape[1:]:
            continue
        if axis is not None and value.shape[axis] != here:
            continue
        shape = list(value.shape)
        for i in range(1, len(shape)):
            if shape[i] == here and (axis is None or i == len(shape) - 1):
                shape[i] = there
        if not 0 < torch.Size(shape).numel() < 20_000_000 or shape == list(value.shape):
            continue
        new = (
            make.floats(*shape) if value.is_floating_point() else torch.ones(shape).to(value.dtype)
        )
        return {**given, name: new}
    return None


def computed(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """Return all floating-point tensors that a forward returns."""
    torch.manual_seed(5)
    with torch.no_grad():
        found = model(**given)
    leaves = torch.utils._pytree.tree_leaves(dict(found) if isinstance(found, dict) else found)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def find(model: Any) -> tuple[dict[str, Any] | None, str]:
    """Find inputs of a model, for which it computes the same each time.

    Returns:
        The inputs, or None and why not.
    """
    first = ""
    until_s = time.monotonic() + SEARCH_S
    for attempt in attempts(model):
        left = [(attempt, 0)]
        tried = 0
        while left and tried < MOST_CORRECTED and time.monotonic() < until_s:
            given, depth = left.pop()
            tried += 1
            try:
                found = computed(model, given)
                again = computed(model, given)
            except Exception as error:  # noqa: BLE001 - not an input of this model
                first = first or f"{type(error).__name__}: {' '.join(str(error).split())}"
                if depth < CORRECTIONS:
                    left += [
                        (each, depth + 1) for each in reversed([*corrections(model, given, error)])
                    ]
                continue
            if len(found) == len(again) and all(map(torch.equal, found, again)) and found:
                return given, ""
            first = "it computes something else each time"
    return None, first or "no parameter of its forward is known"
