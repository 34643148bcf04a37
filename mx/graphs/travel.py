"""Graphs between processes: recorded to be published, and found by a target."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from mx import config
from mx.artifacts.caches import GRAPHS
from mx.artifacts.carry import fetched
from mx.artifacts.choosing import Search
from mx.artifacts.document import CUDA_GRAPH
from mx.artifacts.using import staging
from mx.errors import ConfigError, MxError, OutputError
from mx.graphs.merge import Package
from mx.private import private_folder

_IMAGES = "images"
_PIN = re.compile("[0-9a-f]{64}", re.ASCII)
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}", re.ASCII)


def record(package: Package, name: str) -> None:
    """Keep a graph to be published, in a command that `mx artifacts record` runs.

    Args:
        package: The graph, for the weights of a pin.
        name: What a target finds it by, such as "decode.8": letters, digits, `_`, `.`, `=`, `-`.

    Raises:
        ConfigError: Nothing is being recorded, there is a graph of this name, the name is none, or
            the graph is for no pin.
        OutputError: It can't be written.
    """
    folder = config.recording()
    if folder is None:
        raise ConfigError(
            "nothing is being recorded", hint="run this program by `mx artifacts record`"
        )
    if not _NAME.fullmatch(name) or name == _IMAGES:
        raise ConfigError(f"{name!r} can't be a graph's name", hint="use letters and digits")
    if not _PIN.fullmatch(package.pin):
        raise ConfigError("the graph is for no pin", hint="give `export` that of the weights")
    place = folder / GRAPHS / package.pin
    try:
        (place / _IMAGES).mkdir(mode=0o700, parents=True, exist_ok=True)
        for digest, image in package.images.items():
            if not (place / _IMAGES / digest).exists():
                (place / _IMAGES / digest).write_bytes(image)
        with open(place / name, "xb") as file:
            file.write(package.graph)
    except FileExistsError:
        raise ConfigError(f"there is a graph {name} already", hint="name another") from None
    except OSError as error:
        raise OutputError(f"{place} could not be written: {error.strerror}") from error


@dataclass(frozen=True)
class Published:
    """A graph of a trusted publisher: what `restore` takes."""

    message: bytes = field(repr=False)
    images: Mapping[str, bytes] = field(repr=False)

    def image(self, digest: str) -> bytes:
        """Return an image.

        Args:
            digest: Its blake3 in hexadecimal.

        Raises:
            KeyError: There is no such image.
        """
        return self.images[digest]


@dataclass(frozen=True)
class FoundGraphs:
    """The graphs for weights and this environment, by name; none, and the reasons.

    Attributes:
        graphs: The graphs by name.
        set_id: The id of the set that they are in, "" for none.
        signer: The name of its signer in the trust file.
        reasons: Why other sets, or all, are not used: one line each.
        seconds: How long this took.
    """

    graphs: Mapping[str, Published] = field(default_factory=dict)
    set_id: str = ""
    signer: str = ""
    reasons: Sequence[str] = ()
    seconds: float = 0.0


def find(
    model: str,
    *,
    pin: str,
    trust: str | Path,
    fields: Mapping[str, str] | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> FoundGraphs:
    """Find the newest set of graphs for these weights and this environment by a trusted signer, and
    fetch it into memory. Nothing of it is loaded.

    Args:
        model: The model's name, as for `mx.pull`.
        pin: That of the weights, all 64 digits.
        trust: The trust file.
        fields: Fields of the environment that the caller knows.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The graphs by name; without any, why in `reasons`.

    Raises:
        ConfigError: An argument is wrong. What is wrong with sets is in `reasons`.
    """
    started_s = time.monotonic()
    if not _PIN.fullmatch(pin):
        raise ConfigError(f"{pin!r} is not a whole pin", hint="give all 64 digits")
    search = Search(
        model,
        CUDA_GRAPH,
        trust=trust,
        pin=pin,
        fields=fields,
        coordinator=coordinator,
        settings=settings,
    )
    place = private_folder(config.cache_folder() / "artifacts")
    for choice in search.choices():
        set_id = choice.found.signed.set_id
        try:
            with (
                staging(place, set_id) as arriving,
                fetched(
                    choice.found,
                    arriving,
                    coordinator=search.coordinator,
                    settings=search.settings,
                ) as package,
            ):
                files = {each.path: package.read(each.blob) for each in package.document.files}
        except MxError as error:
            search.refuse(set_id, error.message)
            continue
        seconds = time.monotonic() - started_s
        graphs = _graphs(files, f"{GRAPHS}/{pin}/")
        return FoundGraphs(graphs, set_id, choice.signer, tuple(search.reasons), seconds)
    return FoundGraphs(reasons=tuple(search.reasons), seconds=time.monotonic() - started_s)


def _graphs(files: Mapping[str, bytes], prefix: str) -> dict[str, Published]:
    names = {path.removeprefix(prefix): data for path, data in files.items()}
    images = {
        blake3(data).hexdigest(): data
        for name, data in names.items()
        if name.startswith(f"{_IMAGES}/")
    }
    return {name: Published(data, images) for name, data in names.items() if "/" not in name}
