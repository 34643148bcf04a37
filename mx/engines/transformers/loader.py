"""`load`: a model that is returned at once, and computes while its layers arrive."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mx import artifacts, config
from mx.api.common import check_type, torch_device
from mx.api.pulling import pull
from mx.api.target import Pull
from mx.core.reference import parse_reference, pinned_name
from mx.core.types import Manifest, ModelKey
from mx.core.variant import ProcessingKey
from mx.engines.compiling import CompileCaches
from mx.engines.replica.keys import short
from mx.engines.side_files import check_covered
from mx.engines.transformers.arrival import Loading
from mx.engines.transformers.described import FILES, describe
from mx.engines.transformers.skeleton import build
from mx.errors import ConfigError, LocalError, MxError

if TYPE_CHECKING:
    from mx.engines.transformers.graphs import Decode

_loadings: weakref.WeakKeyDictionary[Any, Loading] = weakref.WeakKeyDictionary()


def load(
    name: str,
    *,
    peer: str | None = None,
    path: str | Path | None = None,
    fallback: str | Path | None = None,
    revision: str = "",
    variant: str | ProcessingKey = "",
    device: str = "cpu",
    coordinator: str | None = None,
    transport: str | None = None,
    verify: str = "chunks",
    attach: bool = True,
    wait_s: float | None = None,
    settings: config.Settings | None = None,
    model_config: Any = None,
    model_class: Any = None,
    dtype: Any = "auto",
    strict: bool = True,
    compile: bool = False,
    graphs: Decode | None = None,
    trust: str | Path | None = None,
    **options: Any,
) -> Any:
    """Return a model of transformers at once; it computes while its layers arrive.

    `forward` and `generate` wait for each layer when they come to it. Outputs equal those of
    `from_pretrained`, which builds the model here too: of tensors that are not here yet. What asks
    for shapes, dtypes or devices does not wait; what needs all values (`state_dict`, `to` with
    another dtype, `save_pretrained`) waits for all. Each parameter becomes a plain
    `torch.nn.Parameter` as soon as its layer is verified, in memory of the pull, which it keeps
    alive; nothing else stays behind. `loading(model)` waits for the end, shows how far it is, and
    closes.

    Nothing of the weights is moved before the model is built and its names and shapes agree. From
    `path`, the model is built when the checkpoint was read.

    Args:
        name: NAME, NAME:REVISION or NAME@PIN.
        peer, path, fallback, revision, variant, coordinator, transport, verify, attach, wait_s,
            settings: As for `mx.pull`. With `wait_s` a forward waits so long for a new source when
            all were lost.
        device: Where the model is: "cpu", or "cuda:N" for a GPU, whose memory the weights come to
            without a copy in host memory. There nothing is attached, since a model may be trained.
        model_config: The configuration, where the model's `config.json` is not to be used, or its
            sources serve the weights alone.
        model_class: The class, if not the one that the configuration names.
        dtype: As for `from_pretrained`: "auto" is the configuration's.
        strict: Refuse weights that lack some of the model's tensors or have others; otherwise do as
            `from_pretrained` does: initialise the missing ones, ignore the others.
        compile: Compile the model's forward by `torch.compile` at its first call, which waits for
            all weights. Where a trust file is named, with the compile caches that its signers have
            published for this model and environment (docs/artifacts.md); whatever is wrong with
            those, it compiles as always.
        graphs: Decode by a CUDA graph of this step, which the trust file's signers have published
            for these weights and this environment (docs/graphs.md): `decoding(model)` has the cache
            to generate with. Whatever is wrong with those, the model decodes as always.
        trust: The trust file; None takes the one in the settings.
        options: More arguments of `from_pretrained`, such as `attn_implementation`.

    Returns:
        The model, in evaluation mode. It raises the pull's error, which is an `MxError`, where it
        is used and the weights can't come.

    Raises:
        ConfigError: An argument is wrong; transformers is not installed; the model asks for code
            of its own, is quantised, of an unknown type or class; or the weights do not fit it,
            with all differences.
        MxError: No source has the model, or served its files, see `mx.pull`.
    """
    _check_options(options)
    if compile and graphs is not None:
        raise ConfigError("a compiled model has no step to launch", hint="leave out `compile`")
    options.pop("trust_remote_code", None)  # no files that name code are taken
    where: dict[str, Any] = {
        "peer": peer,
        "path": path,
        "fallback": fallback,
        "coordinator": coordinator,
        "transport": transport,
        "wait_s": wait_s,
        # A cache would have the whole model before it served a layer. One that has it is a source.
        "settings": config.given(
            settings or config.load(),
            cache_socket="off",
            trust=None if trust is None else str(trust),
        ),
    }
    which: dict[str, Any] = {"revision": revision, "variant": variant}
    here = torch_device(device)
    how: dict[str, Any] = {"verify": verify, "attach": attach and here == "cpu", "device": here}
    check_type("name", name, str, "it is NAME, NAME:REVISION or NAME@PIN")
    running: Pull | None = None
    files: Mapping[str, bytes] = {}
    manifest: Manifest | None = None
    pinned = name
    if path is None:
        pin = parse_reference(name).pin
        key: ModelKey | None = None
        try:
            files, manifest, key = _first(name, _wanted(model_config), **where, **which)
        except (ConfigError, LocalError):
            raise
        except MxError:
            # What a pin stands for is known of a fallback once its weights were compared.
            if fallback is None or not pin:
                raise
        if manifest is not None:
            assert key is not None
            if pin and model_config is not None and manifest.ref.weights_alone(pin):
                files = {}  # what generates is `model_config`'s, then
            else:
                check_covered(name, pin, manifest.ref, "give `model_config`")
            pinned, which = pinned_name(key, manifest.ref), {}
        else:  # no source has the files: they are the fallback's, and so are the weights
            where |= {"path": fallback, "peer": None, "fallback": None}
    try:
        if manifest is None:
            running = pull(name, **where, **which, **how)
            files = running.files()
        description = describe(name, files, config=model_config, model_class=model_class)
        if manifest is None:
            assert running is not None
            manifest = running.wait_manifest()
        model, values = build(
            name,
            description,
            manifest,
            strict=strict,
            options={"dtype": dtype, **options},
            device=here,
        )
        asked = config.given(where["settings"], coordinator=coordinator)
        if graphs is not None:
            described = manifest if running is None else None
            how["into"] = graphs.begin(model).find(name, described, here, asked) or None
        if running is None:
            running = pull(pinned, **where, **which, **how)
        arrival = _loadings[model] = Loading(running, model, values)
        if compile:
            compile_forward(model, arrival, parse_reference(name).name, asked)
    except BaseException:
        if running is not None:
            running.close()
        raise
    return model


def loading(model: Any) -> Loading:
    """Return the arrival of a model's weights, also after its end.

    Args:
        model: What `load` returned.

    Raises:
        ConfigError: It is something else.
    """
    try:
        return _loadings[model]
    except (KeyError, TypeError):
        raise ConfigError(
            f"this {type(model).__name__} was not returned by `load`",
            hint="give the model itself, not a copy or a wrapper",
        ) from None


#: Arguments of `from_pretrained` that make no sense here, and why.
_REFUSED = {
    "quantization_config": "this version loads weights as they are",
    "device_map": "a model is on one device: give `device`",
    "state_dict": "the weights are pulled",
    "config": "it is called `model_config` here",
    "gguf_file": "the weights are pulled",
    "tp_plan": "this version loads whole models",
    "distributed_config": "this version loads whole models",
    "output_loading_info": "weights that do not fit are refused, with all differences",
}


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of `from_pretrained` that `load` can't have."""
    for name, why in _REFUSED.items():
        if options.get(name):
            raise ConfigError(f"`load` can't have `{name}`", hint=why)


def _wanted(model_config: Any) -> Collection[str]:
    """Return the names of the side files to get."""
    return FILES if model_config is None else FILES[1:]


def _first(
    name: str, wanted: Collection[str], **arguments: Any
) -> tuple[Mapping[str, bytes], Manifest | None, ModelKey]:
    """Get side files and the manifest, and no weights. A fallback on disk has no manifest yet."""
    with pull(name, files_only=wanted, **arguments) as first:
        files, report = first.files(), first.wait()
        manifest = None if report.fallback else first.wait_manifest()
        return files, manifest, first.model


# -- compiles a model's forward, with compile caches from peers, once its weights have arrived -----

log = logging.getLogger(__name__)


def configuration_of(model: Any) -> str:
    """Return the properties of a model that shape its compiled code, as words "part=value"."""
    said = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        said.pop(name, None)
    attention = getattr(model.config, "_attn_implementation", None)
    device = model.device.type
    return (
        f"class={type(model).__name__} config={short(said)} dtype={model.dtype} "
        f"attention={attention} device={device}"
    )


def compile_forward(model: Any, loading: Loading, name: str, settings: config.Settings) -> None:
    """Replace a model's forward by one that is compiled at its first call, which waits for all
    weights.

    Args:
        model: The model, of which the forward is replaced.
        loading: The arrival of its weights.
        name: The model's name, for which sets of compile caches are looked for.
        settings: Settings of mx; without `trust` there are no caches.
    """
    fields = {"engine": "transformers", "configuration": configuration_of(model)}
    caches: CompileCaches | None = None
    if config.recording() is not None:
        artifacts.note(fields)
    elif settings.trust:
        caches = CompileCaches("transformers", log, name, settings, fields)
        weakref.finalize(model, caches.close)
    # Of the class, and the model by a weak reference: it goes with its last user.
    reference, plain = weakref.ref(model), type(model).forward
    compiled: Any = torch.compile(plain, options=None if caches is None else caches.options)
    waits: list[Loading] = [loading]

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        if waits:
            waits[0].wait()
        found = compiled(reference(), *given, **named)
        if waits:
            waits.clear()
            if caches is not None:
                caches.compiled()
        return found

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    model.forward = forward
