"""One call of `from_pretrained` whose weights come from peers or this host's cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from mx.api.pulling import pull
from mx.api.target import Pull
from mx.core.variant import ProcessingKey
from mx.engines.transformers import converted
from mx.engines.transformers.counters import served
from mx.engines.transformers.lookup import Lookup, ServedModel
from mx.engines.transformers.weights import Weights, WeightsFile
from mx.errors import ConfigError, MxError, UnknownModelError
from mx.fetching.report import PullReport
from mx.fleet import ask_offered, offer, pull_offered
from mx.log import event
from mx.wire.cache import CachedModelAddress

log = logging.getLogger(__name__)
#: transformers' own: it shows what was taken to users who ask it to say more.
_engine_log = logging.getLogger("transformers.mx_peer")

#: Arguments with which transformers reads something else than the weights that peers serve, and why
#: such a call is left to it.
_LEFT_TO_DISK = {
    "state_dict": "`state_dict` was given",
    "gguf_file": "`gguf_file` was given",
    "force_download": "`force_download` asks for the hub",
    "disable_mmap": "`disable_mmap` reads files whole",
    "offload_folder": "`offload_folder` reads files again later",
    "local_checkpoint": "a checkpoint was named",
}
_ON_DISK = "`device_map` leaves a part on disk, where it is read again later"


class LeftToDiskError(BaseException):
    """Ends a call that has taken a configuration from peers, but whose weights have to come from
    disk, for `reason`: the whole call begins again, from disk. It is not an Exception, so that no
    library in between handles it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def begin(
    lookup: Lookup,
    cls: Any,
    name: object,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    version: str,
) -> tuple[ModelLoad | None, str]:
    """Return the load of a model that peers serve; None, and why, if it is to come from disk.

    Args:
        lookup: Where models are looked up.
        cls: The model's class.
        name: What was given to `from_pretrained`.
        args: Its other positional arguments.
        kwargs: Its arguments by name.
        version: The version of transformers.
    """
    for argument, why in _LEFT_TO_DISK.items():
        if kwargs.get(argument):
            return None, why
    if _names_disk(kwargs.get("device_map")):
        return None, _ON_DISK
    if kwargs.get("use_safetensors") is False:
        return None, "`use_safetensors=False` asks for pickled files"
    revision = kwargs.get("revision")
    subfolder = str(kwargs.get("subfolder") or "")
    found = lookup.of_path(Path(str(name)) / subfolder / "config.json")
    if found is None:
        found = lookup.find(name, revision)
        if found is None:
            return None, lookup.why_not(name, revision)
        if subfolder:
            found = lookup.component(found, subfolder)
            if found is None:
                return None, f"no source has the weights in {subfolder}"
    variant = kwargs.get("variant")
    try:
        companion = found.companion_of_variant(str(variant)) if variant else ""
    except UnknownModelError as error:
        return None, error.message
    load = ModelLoad(found, lookup, companion)
    load.key = converted.key_of(cls, found, args, kwargs, version)
    if load.key is not None:
        load.converted = ask_offered(found.key, load.key, lookup.settings)
    try:
        load.start()
    except MxError as error:
        return None, str(error)
    return load, ""


def has_peers_files(lookup: Lookup, name: object, kwargs: Mapping[str, Any]) -> bool:
    """Return True if the configuration of a model comes from peers.

    Args:
        lookup: Where models are looked up.
        name: What was given to `from_pretrained`.
        kwargs: Its arguments by name.
    """
    folder = Path(str(name)) / str(kwargs.get("subfolder") or "")
    if lookup.of_path(folder / "config.json") is not None:
        return True
    return lookup.find(name, kwargs.get("revision")) is not None


def _names_disk(device_map: object) -> bool:
    return isinstance(device_map, Mapping) and "disk" in map(str, device_map.values())


class ModelLoad:
    """The weights of one model while it is loaded. A context manager that closes them."""

    def __init__(self, found: ServedModel, lookup: Lookup, companion: str = "") -> None:
        """
        Args:
            found: The model.
            lookup: Where it was looked up.
            companion: The path of the companion that is loaded in place of its main weights.
        """
        self.served = found
        self.companion = companion
        #: Names what transformers makes of the weights; None if others are not to share it.
        self.key: ProcessingKey | None = None
        #: Where the cache holds that; None if it does not.
        self.converted: CachedModelAddress | None = None
        self._lookup = lookup
        self._pull: Pull | None = None
        self._failure: MxError | None = None
        self._weights: Weights | None = None
        self._beside: list[ModelLoad] = []

    @property
    def failure(self) -> MxError | None:
        """The error of the pull, or of one of those beside it, if it failed."""
        own = self._failure if self._weights is None else self._weights.failure
        return own or next((each.failure for each in self._beside if each.failure), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._beside:
            each.__exit__()
        if self._pull is not None:
            self._pull.close()

    def start(self) -> None:
        """Start the pull, so that it goes on while transformers builds the model."""
        if self._pull is None:
            self._pull = self._begin()

    def unconverted(self) -> ModelLoad:
        """Return a load of the same model, not converted."""
        load = ModelLoad(self.served, self._lookup, self.companion)
        load.key = self.key
        return load

    def beside(self, companion: str) -> WeightsFile:
        """Return other weights of the model that belong to the same call, such as those of a head
        in a file of its own.

        Args:
            companion: The companion; "" for the main weights.

        Raises:
            MxError: There is no source.
        """
        load = ModelLoad(self.served, self._lookup, companion)
        self._beside.append(load)
        return load.file()

    def file(self, *, owned: bool = False) -> WeightsFile:
        """Return the weights as a safetensors file.

        Args:
            owned: Whether closing the file ends the load.

        Raises:
            MxError: There is no source.
        """
        if self._weights is None:
            try:
                self.start()
                assert self._pull is not None
                self._weights = Weights(self._pull)
            except MxError as error:
                self._failure = error
                raise
        return WeightsFile(self._weights, self._finished if owned else None)

    def _finished(self) -> None:
        """Close the weights, once all have arrived that were read as a file alone."""
        weights = self._weights
        assert weights is not None
        if weights.failure is None:
            weights.ready()
            self._tell(self.served.key.name, weights)
        weights.close()

    def _begin(self) -> Pull:
        if self.converted is not None:
            return pull_offered(self.converted, self._lookup.settings)
        key = self.served.key
        return pull(
            self.served.pinned,
            revision=key.revision,
            variant=key.variant,
            companion=self.companion,
            coordinator=self._lookup.coordinator,
            settings=self._lookup.settings,
        )

    def run(
        self,
        original: Callable[..., Any],
        name: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Load the model, and lend what was converted to the cache.

        Args:
            original: transformers' own `from_pretrained`, bound to the class.
            name: Its arguments, with `args` and `kwargs`.

        Returns:
            What it returns.
        """
        wants_info = kwargs.get("output_loading_info", False)
        model, info = original(name, *args, **{**kwargs, "output_loading_info": True})
        if _names_disk(getattr(model, "hf_device_map", None)):  # of a map that was computed
            self._failure, self._weights = ConfigError(_ON_DISK), None
            raise self._failure
        for each in self._beside:
            each._finished()
        weights = self._weights
        if weights is not None:
            weights.ready()
            self._tell(self.served.key.name, weights)
            if self.converted is not None:
                # It was loaded under the model's own names: saving it restores the checkpoint's, as
                # of a model that was not loaded.
                vars(model).pop("_weight_conversions", None)
            elif self.key is not None:
                self._share(model, info, weights)
        return (model, info) if wants_info else model

    def _tell(self, name: str, weights: Weights) -> None:
        report = weights.pull.report
        assert report is not None
        more: dict[str, Any] = {"companion": self.companion} if self.companion else {}
        event(
            _engine_log,
            "from_pretrained.taken",
            model=name,
            revision=self.served.key.revision,
            pin=self.served.pinned.rpartition("@")[2],
            **more,
        )
        served(
            name,
            self._place(report, weights),
            pin=self.served.pinned.rpartition("@")[2][:16],
            nbytes=report.bytes,
            seconds=report.seconds,
            **more,
        )

    def _place(self, report: PullReport, weights: Weights) -> str:
        if self.converted is not None:
            return "converted"
        if not any(path.attached for path in report.paths):
            return "peer"
        at = weights.pull.cached_at
        return "cache" if any(path.source == at for path in report.paths) else "host"

    def _share(self, model: Any, info: Mapping[str, Any], weights: Weights) -> None:
        """Lend the converted tensors to the cache, and use the cache's copy from now on."""
        assert self.key is not None
        why_not = converted.why_not(model, info, weights.memory())
        if why_not:
            event(log, "converted.kept", level=logging.DEBUG, reason=why_not)
            return
        try:
            held = offer(model.state_dict(), self.served.key, self.key, self._lookup.settings)
            if held is not None:
                converted.adopt(model, held, self._lookup.settings)
        except MxError as error:
            log.debug("%s is not shared with other processes: %s", self.key, error)
