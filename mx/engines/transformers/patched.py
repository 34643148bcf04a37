"""Makes transformers' `from_pretrained` take models from peers and from this host's cache.

What is replaced: how transformers finds files (`cached_files` and its like) and opens safetensors
files (`safe_open`), each for names that the coordinator knows; and
`PreTrainedModel.from_pretrained` itself, to say where a model came from and to try again from disk.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from mx import config
from mx.api.common import transports
from mx.contexts import Undo
from mx.engines.transformers import adapters, pipelines, sentences
from mx.engines.transformers.counters import counts, served
from mx.engines.transformers.loads import LeftToDiskError, ModelLoad, begin, has_peers_files
from mx.engines.transformers.lookup import Lookup, ServedModel, say_why_not
from mx.engines.transformers.tested import warn_if_untested
from mx.errors import ConfigError

__all__ = ["counts", "patch", "unpatch"]

log = logging.getLogger(__name__)

#: What chooses a class by a configuration, which may name code of its own.
_AUTO = (
    ("modeling_auto", "_BaseAutoModelClass"),
    ("configuration_auto", "AutoConfig"),
    ("feature_extraction_auto", "AutoFeatureExtractor"),
    ("image_processing_auto", "AutoImageProcessor"),
    ("processing_auto", "AutoProcessor"),
    ("tokenization_auto", "AutoTokenizer"),
    ("video_processing_auto", "AutoVideoProcessor"),
)
_NEEDED = ("cached_files", "list_repo_templates", "resolve_revision", "has_file")

_lock = threading.RLock()
_patched: Patches | None = None


class _ThreadLoads(threading.local):
    """The loads of this thread."""

    def __init__(self) -> None:
        self.load: ModelLoad | None = None
        #: The weights that were opened for a pipeline or a model of diffusers.
        self.loads: list[ModelLoad] | None = None
        #: Why everything is left to transformers at the moment; "" if it is not.
        self.from_disk = ""


class Patches:
    """The replaced functions, and what they share."""

    def __init__(self, settings: config.Settings, coordinator: str) -> None:
        self.lookup = Lookup(settings, coordinator)
        self.here = _ThreadLoads()
        self._undo: list[Callable[[], None]] = []

    def find(self, name: object, revision: str | None) -> ServedModel | None:
        """Return the served model that a name means on this thread at the moment."""
        if self.here.from_disk or name is None:
            return None
        return self.lookup.find(name, revision)

    def resolved(self, name: object, revision: str | None) -> str | None:
        """Return a revision by which `find` finds the same from now on; None if it finds none."""
        if self.here.from_disk or name is None:
            return None
        return self.lookup.resolved(name, revision)

    def why_not(self, name: object, revision: str | None) -> str:
        """Return why `find` returned None."""
        return self.here.from_disk or self.lookup.why_not(name, revision)

    @contextmanager
    def from_disk(self, why: str) -> Iterator[None]:
        """Leave everything to transformers inside the block, on this thread.

        Args:
            why: The reason, for the note in an error.
        """
        before, self.here.from_disk = self.here.from_disk, why
        try:
            yield
        finally:
            self.here.from_disk = before

    def whole(self, name: object, call: Callable[[], Any], *, code: object = False) -> Any:
        """Call a function that takes several files of a model, all of one revision. If the weights
        have to come from disk, call it again, with all files from disk.

        Args:
            name: What the program has named.
            call: The function.
            code: Whether it may run code that a file names: then no file comes from a peer.

        Returns:
            What `call` returns.
        """
        if code:
            with self.from_disk("`trust_remote_code` was given, and code never comes from peers"):
                return call()
        with self.lookup.one_call() as outermost:
            try:
                return call()
            except LeftToDiskError as error:
                if not outermost:
                    raise
                left = error
        return _from_disk(self, name, call, left.reason, left.__cause__)

    # -- replacing --------------------------------------------------------------------------------

    def replace(self, module: Any, name: str, new: Any) -> None:
        """Replace an attribute of a module, wherever it was imported to."""
        original = vars(module)[name]
        _put(module, original, new)
        self._undo.append(functools.partial(_put_back, module, new, original))

    def replace_method(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a class method by what `make` returns for the original function."""
        original = vars(owner)[name]
        setattr(owner, name, classmethod(make(original.__func__)))
        self._undo.append(functools.partial(setattr, owner, name, original))

    def when_undone(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the replacements are undone."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all replacements."""
        while self._undo:
            self._undo.pop()()
        self.lookup.close()


def _put_back(module: Any, new: Any, original: Any) -> None:
    """Restore a value, also in modules that were imported since and hold the new one."""
    for each in [module, *list(sys.modules.values())]:
        inside = getattr(each, "__dict__", None)
        if isinstance(inside, dict):
            for key in [key for key, value in list(inside.items()) if value is new]:
                setattr(each, key, original)


def _put(module: Any, old: Any, new: Any) -> None:
    """Replace a value in a module, and wherever it was imported to."""
    for name, each in [("", module), *sys.modules.items()]:
        if each is module or name.partition(".")[0] in ("transformers", "diffusers"):
            for key in [key for key, value in list(vars(each).items()) if value is old]:
                setattr(each, key, new)


def patch(
    *, coordinator: str | None = None, settings: config.Settings | None = None
) -> AbstractContextManager[object]:
    """Let `from_pretrained` take models from peers and from this host's cache, in this process.

    A name such as "org/name" is looked up at the coordinator. If it is known, configuration,
    tokenizer and weights come from its sources: attached to this host's cache where there is one
    (`mx serve --cache`), else pulled. Any other name, and any call that a source can't serve, goes
    to transformers' own files. The logger `mx.engines.transformers` says which, and `counts`
    counts.

    Args:
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        A context manager that undoes at its end what this call has replaced: `with patch():`.
        Without `with` it stays until `unpatch`.

    Raises:
        ConfigError: transformers is not installed, or is patched with another coordinator.
    """
    global _patched
    settings = settings or config.load()
    address = coordinator or settings.coordinator
    with _lock:
        if _patched is not None:
            if _patched.lookup.coordinator != address:
                raise ConfigError(
                    f"transformers is patched for the coordinator at {_patched.lookup.coordinator}",
                    hint="call unpatch() first",
                )
            return ExitStack()
        made = Patches(settings, address)
        with Undo(made.undo):
            _install(made)
            _preload()
        _patched = made
    block = ExitStack()
    block.callback(_unpatch, made)
    return block


def _preload() -> None:
    """Import what a pull imports: some 70 ms, when other Python code runs beside it."""
    import encodings.idna  # noqa: F401 - the first look-up of an address needs it

    from mx.memory import extras, tensors  # noqa: F401

    for each in transports().values():
        each.probe()


def unpatch() -> None:
    """Undo `patch`. Models that were loaded stay as they are. Idempotent."""
    with _lock:
        if _patched is not None:
            _unpatch(_patched)


def _unpatch(made: Patches) -> None:
    """Undo what one call of `patch` has replaced, unless it is undone."""
    global _patched
    with _lock:
        if _patched is made:
            _patched = None
            made.undo()


def _install(made: Patches) -> None:
    try:
        import safetensors.torch
        import transformers
        from transformers import modeling_utils, tokenization_utils_base
        from transformers.utils import hub
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"transformers can't be patched: there is no {error.name} here",
            hint="pip install transformers",
        ) from error
    version = str(transformers.__version__)
    warn_if_untested()
    lacking = [name for name in _NEEDED if name not in vars(hub)]
    if lacking or "safe_open" not in vars(modeling_utils):
        log.warning(
            "transformers %s has no %s: everything comes from disk",
            version,
            ", ".join(lacking) or "safe_open",
        )
        return
    for name in _NEEDED:
        made.replace(hub, name, _FILES[name](made, vars(hub)[name]))
    opened = _safe_open(made, safetensors.safe_open)
    made.replace(modeling_utils, "safe_open", opened)
    made.replace(safetensors, "safe_open", opened)
    made.replace(safetensors.torch, "safe_open", opened)
    made.replace(modeling_utils, "get_model_conversion_mapping", _conversions(made, modeling_utils))
    made.replace_method(
        modeling_utils.PreTrainedModel,
        "from_pretrained",
        lambda original: _from_pretrained(made, original, version),
    )
    made.replace_method(
        tokenization_utils_base.PreTrainedTokenizerBase,
        "from_pretrained",
        lambda original: _tokenizer(made, original),
    )
    for name, owner in _AUTO:
        try:
            auto = vars(importlib.import_module(f"transformers.models.auto.{name}"))[owner]
        except (ImportError, KeyError):  # another version, or one that needs what is not here
            continue
        for each in _with_subclasses(auto):
            made.replace_method(each, "from_pretrained", functools.partial(_auto, made))
    pipelines.when_imported(made, "transformers.pipelines", functools.partial(_pipeline, made))
    pipelines.install(made)
    sentences.install(made)
    adapters.install(made)


# -- files -------------------------------------------------------------------------------------


def _cached_files(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cached_files(path_or_repo_id: Any, filenames: Any, *args: Any, **kwargs: Any) -> Any:
        revision, why = kwargs.get("revision"), ""
        if _has_code(filenames):
            why = "code never comes from peers"
        elif args:
            why = "its arguments have no names"
        elif kwargs.get("repo_type") not in (None, "model"):
            why = f"it is a {kwargs['repo_type']}"
        found = None if why else made.find(path_or_repo_id, revision)
        if found is None:
            why = why or made.why_not(path_or_repo_id, revision)
            try:
                return original(path_or_repo_id, filenames, *args, **kwargs)
            except OSError as error:
                say_why_not(error, path_or_repo_id, why)
                raise
        return original(found.folder, filenames, **kwargs)

    return cached_files


def _has_code(filenames: Any) -> bool:
    names = [filenames] if isinstance(filenames, str) else filenames
    return any(str(name).endswith(".py") for name in names)


def _list_repo_templates(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def list_repo_templates(repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        found = made.find(repo_id, kwargs.get("revision"))
        if found is None:
            return original(repo_id, *args, **kwargs)
        folder = found.folder / "additional_chat_templates"
        return [each.stem for each in folder.glob("*.jinja")]

    return list_repo_templates


def _resolve_revision(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve_revision(path_or_repo_id: Any, revision: str | None = None, **kwargs: Any) -> Any:
        found = made.resolved(path_or_repo_id, revision)
        return original(path_or_repo_id, revision, **kwargs) if found is None else found

    return resolve_revision


def _has_file(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def has_file(path_or_repo: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        revision = args[0] if args else kwargs.get("revision")
        found = made.find(path_or_repo, revision)
        if found is None:
            return original(path_or_repo, filename, *args, **kwargs)
        return (found.folder / filename).is_file()

    return has_file


def _auto(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a class method that reads a configuration and the files that belong to it. A model
    whose files name code is none of a peer's (`check_code`), so that `trust_remote_code` trusts
    nothing of theirs."""

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        call = functools.partial(original, cls, *args, **kwargs)
        return made.whole(name, call)

    return from_pretrained


def _pipeline(made: Patches, module: Any) -> None:
    """Replace `transformers.pipeline`, which gives a configuration to the model that it makes."""
    original = module.pipeline

    @functools.wraps(original)
    def pipeline(*args: Any, **kwargs: Any) -> Any:
        name = args[1] if len(args) > 1 else kwargs.get("model")
        return made.whole(name, functools.partial(original, *args, **kwargs))

    made.replace(module, "pipeline", pipeline)


def _with_subclasses(owner: Any) -> set[Any]:
    """Return a class and those derived from it, as far as they define the method themselves."""
    found = set[Any]().union(*map(_with_subclasses, owner.__subclasses__()))
    return found | {owner} if "from_pretrained" in vars(owner) else found


_FILES = {
    "cached_files": _cached_files,
    "list_repo_templates": _list_repo_templates,
    "resolve_revision": _resolve_revision,
    "has_file": _has_file,
}


def _tokenizer(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        with made.lookup.one_call():
            if made.find(name, kwargs.get("revision")) is not None:
                kwargs["local_files_only"] = True  # all of them are here: nothing to ask the hub
            return original(cls, name, *args, **kwargs)

    return from_pretrained


# -- weights -----------------------------------------------------------------------------------


def _safe_open(made: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        found = made.lookup.weights_at(filename)
        if found is None:
            return original(filename, *args, **kwargs)
        load = made.here.load
        model, companion = found
        if load is not None and load.served == model:
            return load.file() if load.companion == companion else load.beside(companion)
        load = ModelLoad(model, made.lookup, companion)
        if made.here.loads is not None:
            made.here.loads.append(load)
        return load.file(owned=True)

    return safe_open


def _conversions(made: Patches, modeling_utils: Any) -> Callable[..., Any]:
    original = modeling_utils.get_model_conversion_mapping

    @functools.wraps(original)
    def get_model_conversion_mapping(*args: Any, **kwargs: Any) -> Any:
        load = made.here.load
        if load is not None and load.converted is not None:
            return []  # the names are the model's own already
        return original(*args, **kwargs)

    return get_model_conversion_mapping


def _from_pretrained(
    made: Patches, original: Callable[..., Any], version: str
) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path
        if made.here.load is not None or made.here.from_disk or name is None:
            return original(cls, name, *args, **kwargs)  # a part of another model
        with made.lookup.one_call() as outermost:
            from_disk = functools.partial(original, cls, name, *args, **kwargs)
            found, reason = begin(made.lookup, cls, name, args, kwargs, version)
            # Else the configuration would be the peers', and the weights another's.
            whole = outermost or kwargs.get("state_dict") is not None
            if found is None:
                if not whole and has_peers_files(made.lookup, name, kwargs):
                    raise LeftToDiskError(reason)
                return _from_disk(made, name, from_disk, reason)
            made.here.load = found
            bound = functools.partial(original, cls)
            try:
                try:
                    with found:
                        return found.run(bound, name, args, kwargs)
                except Exception:
                    if found.failure is None or found.converted is None:
                        raise
                    log.info(
                        "%s: what was converted could not be obtained: %s", name, found.failure
                    )
                    found = made.here.load = found.unconverted()  # the cache may be gone
                    with found:
                        return found.run(bound, name, args, kwargs)
            except Exception as error:
                if found.failure is None:
                    raise
                reason = str(found.failure)
                log.warning("%s: not from peers: %s", name, reason)
                if not whole:
                    raise LeftToDiskError(reason) from error
                made.here.load = None
                return _from_disk(made, name, from_disk, reason, error)
            finally:
                made.here.load = None

    return from_pretrained


def _from_disk(
    made: Patches,
    name: object,
    call: Callable[[], Any],
    reason: str,
    cause: BaseException | None = None,
) -> Any:
    """Load from disk what peers can't serve; `cause` is the error that says so, if any."""
    try:
        with made.from_disk(reason):
            model = call()
    except OSError as missing:
        say_why_not(missing, name, reason)
        if cause is None:
            raise
        raise missing from cause
    served(str(name), "disk", reason=reason)
    return model
