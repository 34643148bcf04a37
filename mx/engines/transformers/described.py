"""Reads a model's configuration, class and generation settings from its side files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mx.core.json_bounds import check_json
from mx.engines.transformers.extra import transformers
from mx.errors import ConfigError, ManifestError
from mx.text import plain, shown

CONFIG = "config.json"
GENERATION = "generation_config.json"
#: The most layers that a configuration may ask for: a hostile one would have us build for ever.
MOST_LAYERS = 10_000
#: The files that are needed to build a model.
FILES = (CONFIG, GENERATION)


@dataclass(frozen=True)
class ModelDescription:
    """A model that can be built: `config` and `generation` are transformers' configurations,
    `model_class` is one of its classes, or the caller's."""

    config: Any
    model_class: Any
    generation: Any = None


def describe(
    name: str, files: Mapping[str, bytes], *, config: Any = None, model_class: Any = None
) -> ModelDescription:
    """Return how to build a model, from its side files and what the caller names instead.

    Code that comes with a model is never run.

    Args:
        name: The model's name, for errors.
        files: The side files by path.
        config: The configuration to use instead of the file, if it is given.
        model_class: The class to use instead of the one that the configuration names, if given.

    Raises:
        ConfigError: The model can't be built: it has no configuration, or one that transformers
            does not know; it asks for code of its own; its weights are quantised.
        ManifestError: A file is not a JSON object.
    """
    if config is None:
        config = _config(name, files, own_class=model_class is not None)
    elif not isinstance(config, transformers().PreTrainedConfig):
        raise ConfigError(
            f"`model_config` is a {type(config).__name__}",
            hint="give a transformers.PreTrainedConfig",
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"the weights of {name} are quantised, which `load` does not support in this version",
            hint="serve weights that are not quantised, or use from_pretrained",
        )
    if model_class is None:
        model_class = _model_class(name, config)
    elif not _is_model_class(model_class):
        raise ConfigError(
            f"`model_class` is {model_class!r}", hint="give a subclass of PreTrainedModel"
        )
    generation = None
    if GENERATION in files and model_class.can_generate():
        fields = _read(name, files, GENERATION)
        generation = _parsed(name, GENERATION, transformers().GenerationConfig.from_dict, fields)
    return ModelDescription(config, model_class, generation)


def _config(name: str, files: Mapping[str, bytes], *, own_class: bool) -> Any:
    if CONFIG not in files:
        raise ConfigError(
            f"{name} has no {CONFIG}: its sources serve the weights alone",
            hint="give `model_config`, or serve the checkpoint's folder",
        )
    fields = _read(name, files, CONFIG)
    if fields.get("auto_map") and not own_class:
        raise ConfigError(
            f"the {CONFIG} of {name} asks for code of its own (auto_map), which mx never runs",
            hint="name a class of transformers with `model_class`, if it has one for this model",
        )
    kind = fields.get("model_type")
    known = transformers().CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"transformers {transformers().__version__} knows no model of type "
            f"{shown(str(kind))}, which the {CONFIG} of {name} names",
            hint="another version of transformers may know it, or give `model_config`",
        )
    _check_layers(name, fields)
    return _parsed(name, CONFIG, known[kind].from_dict, fields)


def _check_layers(name: str, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if a configuration, or one in it, asks for more layers than models have."""
    for field, value in fields.items():
        if isinstance(value, dict):
            _check_layers(name, value)
        if not any(word in field for word in ("layer", "depth")):
            continue
        counts = value if isinstance(value, list) else [value]
        most = max((each for each in counts if isinstance(each, int)), default=0)
        if most > MOST_LAYERS:
            raise ConfigError(
                f"the {CONFIG} of {name} asks for {most} layers ({shown(field)})",
                hint=f"a model has {MOST_LAYERS} at most",
            )


def _parsed(name: str, file: str, parse: Any, fields: dict[str, Any]) -> Any:
    """Return what transformers makes of a file; for bad values it may raise anything."""
    try:
        return parse(fields)
    except Exception as error:
        raise ConfigError(
            f"transformers refuses the {file} of {name}: {plain(str(error))[:500]}",
            hint="correct the file where the model is served",
        ) from error


def _read(name: str, files: Mapping[str, bytes], file: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ManifestError."""
    try:
        check_json(files[file])
        found = json.loads(files[file], object_hook=_special_float)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the {file} of {name} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ManifestError(f"the {file} of {name} is not a JSON object")
    return found


def _special_float(fields: dict[str, Any]) -> Any:
    """Return the float that transformers writes as {"__float__": "Infinity"}, or the object."""
    value = fields.get("__float__")
    special = len(fields) == 1 and value in ("NaN", "Infinity", "-Infinity")
    return float(str(value)) if special else fields


def _is_model_class(what: object) -> bool:
    return isinstance(what, type) and issubclass(what, transformers().PreTrainedModel)


def _model_class(name: str, config: Any) -> Any:
    """Return the class that the configuration names."""
    named = getattr(config, "architectures", None) or []
    known = getattr(transformers(), str(named[0]), None) if named else None
    if known is not None and _is_model_class(known):
        return known
    version = transformers().__version__
    raise ConfigError(
        f"the {CONFIG} of {name} names the class {shown(str(named[0]))}, which is not one of "
        f"transformers {version}"
        if named
        else f"the {CONFIG} of {name} names no class (architectures)",
        hint="name the class with `model_class`, for example transformers.LlamaForCausalLM",
    )
