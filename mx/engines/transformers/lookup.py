"""Finds models by the names that programs give to `from_pretrained`, and puts their small files
where transformers can open them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx import config
from mx.api.listing import ask
from mx.api.pipelines import COMPONENTS
from mx.api.pulling import pull
from mx.core.json_bounds import check_json
from mx.core.packaging import ADAPTER, ADAPTER_WEIGHTS, TENSOR_SUFFIX
from mx.core.reference import parse_reference, pinned_name
from mx.core.types import CHECKPOINT, ManifestRef, ModelKey
from mx.engines.side_files import check_code, check_covered
from mx.errors import CoordinatorError, ManifestError, MxError, NoSourceError, UnknownModelError
from mx.text import plain, shown

log = logging.getLogger(__name__)

#: How long the meaning of a name is not asked for again outside of a call (see `one_call`), and how
#: long the coordinator is not asked for one that does not come from peers.
FRESH_S = 5.0
#: What stands in the folder for the weights: opening it as a file fails, since it is empty.
WEIGHTS = "model.safetensors"
PIPELINE_WEIGHTS = "diffusion_pytorch_model.safetensors"
#: The file that a diffusers pipeline has.
PIPELINE = "model_index.json"
#: One of these is in the folder of each model that can be loaded.
_DESCRIBED = ("config.json", PIPELINE, ADAPTER)


@dataclass(frozen=True)
class ServedModel:
    """A model that peers serve: its pin, and the folder that has its files.

    `folder` has placeholders for the weights. `main` is the name of the main weights at the source,
    without the numbers of shards; "" if there is no such name. `companions` are the paths of
    further tensor files, which come when they are asked for (`Lookup.fetch`).
    """

    key: ModelKey
    pinned: str
    identity: str
    folder: Path
    main: str = ""
    companions: tuple[str, ...] = ()

    def companion_of_variant(self, variant: str) -> str:
        """Return the companion that is a variant of the weights, as transformers names it; "" if
        the main weights are this variant.

        Args:
            variant: What was given as `variant`.

        Raises:
            UnknownModelError: The variant has to come from disk; the message says why.
        """
        wanted = f"model.{variant}{TENSOR_SUFFIX}"
        if wanted in self.companions and "/" not in wanted:
            return wanted
        if wanted == self.main:
            return ""
        given = f"`variant={shown(variant)}`"
        if wanted in map(_without_number, self.companions):
            raise UnknownModelError(
                f"{given} is in several files, and of the variants beside the main weights only "
                "those in one file come from peers"
            )
        raise UnknownModelError(
            f"{given} asks for {plain(wanted)}, which its sources do not serve (copies of the main "
            "weights travel where they are served by their names)"
        )


def say_why_not(error: OSError, name: object, why: str) -> None:
    """Add a note to transformers' error that says why peers do not serve the files either.

    Args:
        error: The error.
        name: The model, as the program names it.
        why: The reason.
    """
    note = f"{name} did not come from peers either: {why}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@dataclass
class _KeptMeaning:
    until_s: float
    served: ServedModel | None
    reason: str
    asked: bool = False  # a coordinator has answered


class ResolvedRevision(str):
    """A revision, equal to the one that was named, which stands for what a name meant when it was
    resolved."""

    name: str
    served: ServedModel

    @classmethod
    def of(cls, revision: str | None, name: str, served: ServedModel) -> ResolvedRevision:
        """Return a text that equals the revision, and stands for `served`."""
        made = cls(revision or "main")
        made.name, made.served = name, served
        return made


class _ThreadMeanings(threading.local):
    """What names mean in the call that runs on this thread; None outside of a call."""

    meanings: dict[tuple[str, str], ServedModel | None] | None = None


class Lookup:
    """The coordinator's models that programs have named. Thread-safe."""

    def __init__(self, settings: config.Settings, coordinator: str) -> None:
        """
        Args:
            settings: The settings of the process.
            coordinator: Where to look names up, HOST:PORT.
        """
        self.settings = settings
        self.coordinator = coordinator
        self._lock = threading.RLock()
        self._meanings: dict[tuple[str, str], _KeptMeaning] = {}
        self._models: dict[str, ServedModel] = {}
        #: The same, and the components of pipelines.
        self._folders: dict[Path, ServedModel] = {}
        self._root: Path | None = None
        self._pid = os.getpid()
        self._here = _ThreadMeanings()

    @contextmanager
    def one_call(self) -> Iterator[bool]:
        """Keep what a name means on this thread inside the block, so that files and weights of one
        call have one revision even if the name is updated meanwhile. Each block asks anew.

        Yields:
            False inside another such block, whose meanings are kept.
        """
        if self._here.meanings is not None:
            yield False
            return
        self._here.meanings = {}
        try:
            yield True
        finally:
            self._here.meanings = None

    def find(self, name: object, revision: str | None) -> ServedModel | None:
        """Return the model that a program names; None if it is to come from disk.

        Args:
            name: What was given to `from_pretrained`. A path that exists is not a name.
            revision: What was given as `revision`, or what `resolved` returned; "main" is the
                newest revision.
        """
        text = str(name)
        if os.path.exists(text) or os.path.isabs(text) or os.getpid() != self._pid:
            return None
        if isinstance(revision, ResolvedRevision) and revision.name == text:
            return revision.served
        wanted = "" if revision in (None, "main") else str(revision)
        meanings = self._here.meanings
        if meanings is None:
            return self._meaning(text, wanted, asks_again=False)
        if (text, wanted) not in meanings:
            meanings[text, wanted] = self._meaning(text, wanted, asks_again=True)
        return meanings[text, wanted]

    def resolved(self, name: object, revision: str | None) -> ResolvedRevision | None:
        """Return a revision by which a name means the same from now on; None if it is to come from
        disk. The arguments are those of `find`."""
        found = self.find(name, revision)
        if found is None:
            return None
        return ResolvedRevision.of(revision, str(name), found)

    def _meaning(self, text: str, wanted: str, *, asks_again: bool) -> ServedModel | None:
        """Return what a name means; `asks_again` asks anew for a name that is served."""
        with self._lock:
            known = self._meanings.get((text, wanted))
            now_s = time.monotonic()
            again = asks_again and known is not None and known.served is not None
            if known is None or again or known.until_s < now_s:
                known = self._looked_up(text, wanted)
                known.until_s = time.monotonic() + FRESH_S
                if known.served is None:
                    level = logging.DEBUG if known.asked else logging.WARNING
                    log.log(level, "%s does not come from peers: %s", text, known.reason)
                self._meanings[text, wanted] = known
            return known.served

    def why_not(self, name: object, revision: str | None) -> str:
        """Return why `find` returned None."""
        wanted = "" if revision in (None, "main") else str(revision)
        if os.getpid() != self._pid:
            return "this process was forked after `patch()`"
        known = self._meanings.get((str(name), wanted))
        if os.path.exists(str(name)) or os.path.isabs(str(name)) or known is None:
            return "it is a path"
        return known.reason or "another file of it was asked for"

    def of_path(self, path: object) -> ServedModel | None:
        """Return the model whose weights a path stands for; None for any other path."""
        if self._root is None or not str(path).startswith(str(self._root)):
            return None
        folder = Path(os.path.abspath(str(path))).parent
        with self._lock:
            return self._folders.get(folder)

    def weights_at(self, path: object) -> tuple[ServedModel, str] | None:
        """Return the model and the companion ("" for the main weights) that a placeholder stands
        for; None for any other path."""
        model = self.of_path(path)
        there = Path(os.path.abspath(str(path)))
        if model is None or not _is_placeholder(there):
            return None
        return model, there.name if there.name in model.companions else ""

    def component(self, pipeline: ServedModel, name: str) -> ServedModel | None:
        """Return the component of a pipeline whose files are in the folder `name`, if it is
        served."""
        with self._lock:
            return self._folders.get(pipeline.folder / name)

    def _looked_up(self, name: str, revision: str) -> _KeptMeaning:
        try:
            served = self._known_still(name, revision)
            if served is None:
                served = self._fetched(name, revision)
                self._models[served.pinned] = self._folders[served.folder] = served
        except UnknownModelError as error:
            why = f"the coordinator at {self.coordinator} does not know it"
            return _KeptMeaning(0.0, None, error.message if "@" in name else why, asked=True)
        except CoordinatorError as error:
            return _KeptMeaning(0.0, None, error.message)
        except MxError as error:
            return _KeptMeaning(0.0, None, str(error))
        except OSError as error:  # a full disk, or paths that can't be there together
            return _KeptMeaning(0.0, None, f"its files can't be written: {error.strerror}")
        if not any((served.folder / name).exists() for name in _DESCRIBED):
            return _KeptMeaning(0.0, None, "its sources have no config.json", asked=True)
        return _KeptMeaning(0.0, served, "")

    def _resolve(self, name: str, revision: str) -> tuple[ModelKey, ManifestRef]:
        found = ask(
            lambda client: client.resolve(name, revision, CHECKPOINT, documents=False),
            self.coordinator,
            self.settings,
        )
        return found.model, found.ref

    def _known_still(self, name: str, revision: str) -> ServedModel | None:
        """Return what a name means, if its files were fetched; None if they have to be."""
        if (name, revision) not in self._meanings:
            return None
        return self._models.get(pinned_name(*self._resolve(name, revision)))

    def _fetched(self, name: str, revision: str, wait_s: float = 0.0) -> ServedModel:
        """Fetch a model's files into a folder."""
        try:
            with pull(
                name,
                revision=revision,
                variant=CHECKPOINT,
                coordinator=self.coordinator,
                files_only=True,
                wait_s=wait_s,
                settings=self.settings,
            ) as running:
                files = running.files()
                manifest = running.wait_manifest()
                key, ref = running.model, manifest.ref
            pin = parse_reference(name).pin
            check_covered(name, pin, ref, "give `from_pretrained` a folder of yours")
            check_code(name, files)
        except NoSourceError:
            # Only a name that the coordinator knows is worth waiting for.
            if wait_s or not self.settings.wait_s:
                raise
            return self._fetched(name, revision, self.settings.wait_s)
        packaging = manifest.packaging
        mains = {_without_number(file.path) for file in packaging.files}
        main = mains.pop() if len(mains) == 1 else ""
        companions = tuple(each.path for each in packaging.companions)
        folder = self._new_folder()
        try:
            for path, data in files.items():
                there = folder / path
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(data)
            if PIPELINE in files:
                self._add_components(key, files, folder)
            else:
                adapts = main == ADAPTER_WEIGHTS or (
                    ADAPTER in files and "config.json" not in files
                )
                for path in (ADAPTER_WEIGHTS if adapts else WEIGHTS, main, *companions):
                    if path and "/" not in path:
                        (folder / path).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return ServedModel(key, pinned_name(key, ref), ref.identity.hex(), folder, main, companions)

    def fetch(self, model: ServedModel, below: str) -> None:
        """Put companions of a model into its folder, unless they are there.

        Args:
            model: The model.
            below: The path of one, or of a folder of some.

        Raises:
            MxError: As `pull`.
        """
        with self._lock:
            for path in model.companions:
                there = model.folder / path
                if path != below and not path.startswith(f"{below}/"):
                    continue
                if there.exists() and not _is_placeholder(there):
                    continue
                made = self._new_folder() / "companion"
                with pull(
                    model.pinned,
                    companion=path,
                    coordinator=self.coordinator,
                    out=made,
                    settings=self.settings,
                ) as running:
                    running.wait()
                there.parent.mkdir(parents=True, exist_ok=True)
                (made / there.name).rename(there)

    def _add_components(self, pipeline: ModelKey, files: Mapping[str, bytes], folder: Path) -> None:
        """Put placeholders for the weights of a pipeline's components, which are models of their
        own, into its folder. The pipeline's files say by which pin each is served."""
        pins = _object(COMPONENTS, files.get(COMPONENTS, b"{}"))
        for name, what in _object(PIPELINE, files[PIPELINE]).items():
            library = what[0] if isinstance(what, list) and what else None
            pin = pins.get(name)
            # A source wrote the names: none may lead out of the folder.
            if (
                library is None
                or name in ("", ".", "..")
                or "/" in name
                or not (folder / name / "config.json").is_file()
                or not isinstance(pin, str)
            ):
                continue
            try:
                key, ref = self._resolve(f"{pipeline.name}/{name}@{pin}", "")
            except UnknownModelError:
                continue  # transformers or diffusers will say what is missing
            if pin not in (ref.pin.hex(), ref.identity.hex()):
                raise ManifestError(
                    f"the coordinator at {self.coordinator} has other weights for "
                    f"{pipeline.name}/{shown(name)} than {pipeline.name} names"
                )
            of_diffusers = library != "transformers"
            (folder / name / (PIPELINE_WEIGHTS if of_diffusers else WEIGHTS)).touch()
            pinned = pinned_name(key, ref)
            self._folders[folder / name] = ServedModel(
                key, pinned, ref.identity.hex(), folder / name
            )

    def _new_folder(self) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="mx-files-"))
            atexit.register(self.close)
        return Path(tempfile.mkdtemp(dir=self._root))

    def close(self) -> None:
        """Remove the files. Idempotent. In a forked child they are its parent's."""
        if self._root is not None and os.getpid() == self._pid:
            try:
                shutil.rmtree(self._root, ignore_errors=True)
            except KeyboardInterrupt:  # a second Ctrl-C, as the program ends for the first
                shutil.rmtree(self._root, ignore_errors=True)
                raise
            self._root = None
            atexit.unregister(self.close)


def _is_placeholder(path: Path) -> bool:
    return path.name.endswith(TENSOR_SUFFIX) and path.is_file() and not path.stat().st_size


def _without_number(path: str) -> str:
    """Return the name of weights by that of one of their shards."""
    return re.sub(r"-\d+-of-\d+(?=\.safetensors$)", "", path)


def _object(name: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object in a file of a pipeline. Raises ManifestError."""
    try:
        check_json(data)
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the {name} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ManifestError(f"the {name} is not a JSON object")
    return found
