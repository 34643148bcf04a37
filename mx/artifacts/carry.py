"""Serves sets of artefacts to other processes, finds them, and fetches them.

A set is listed beside its model, as NAME/artifacts/ID, and moves as a model's weights do: from all
sources that have it, verified block by block, through the host's cache where there is one. Its
sources, the coordinator and its name are not believed: only its signed document is.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from mx import config
from mx.api.listing import list_models
from mx.api.planning import plan
from mx.api.pulling import pull
from mx.api.serving import serve as serve_checkpoint
from mx.api.source import Source
from mx.api.target import Pull
from mx.artifacts.document import KINDS
from mx.artifacts.package import DOCUMENT, ArtifactPackage
from mx.artifacts.trust import MAX_SIGNED_BYTES, SignedDocument, Trust, read_signed
from mx.core.artifact_names import listed_name, model_and_set
from mx.core.reference import parse_reference, with_pin
from mx.core.variant import ProcessingKey
from mx.errors import ArtifactError, ConfigError, PeerTimeoutError

log = logging.getLogger(__name__)

#: The most time for a document, from any source: an engine waits to start.
_DOCUMENT_S = 30.0
#: Of a signer's key, in what is listed.
_SIGNER_CHARS = 16


class _CoordinatorSettings(TypedDict):
    coordinator: str | None
    settings: config.Settings | None


@dataclass(frozen=True)
class ListedSet:
    """A set as a coordinator lists it. Nothing of it is proved: `fetch_document` returns what is
    signed.

    `name` names these bytes, also where others were registered under the set's name first.
    `signer` is the beginning of the signer's key.
    """

    name: str
    model: str
    set_id: str
    kind: str
    signer: str
    nbytes: int
    sources: int


def serve(
    path: str | Path,
    *,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
    embed: bool = True,
) -> Source:
    """Serve a set until the source is closed.

    Args:
        path: The set, as `publish` made it. Its bytes are all checked first. Its signer is not:
            readers check that with their own trust files.
        coordinator: HOST:PORT, as for `mx.serve`.
        settings: Settings to use; None loads them from the environment and the files.
        embed: False never embeds a coordinator.

    Returns:
        The source, once it is registered.

    Raises:
        ArtifactError: It is not a set, or not what its document says.
        MxError: As `mx.serve`.
    """
    with ArtifactPackage(Path(path)) as package:
        package.verify()
        signed = package.signed
    return serve_checkpoint(
        path,
        model=listed_name(signed.document.model, signed.set_id),
        variant=ProcessingKey(
            kind=signed.document.kind, signer=signed.public_key.hex()[:_SIGNER_CHARS]
        ),
        coordinator=coordinator,
        settings=settings,
        embed=embed,
    )


def find(
    model: str = "",
    *,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> list[ListedSet]:
    """Return the sets that a coordinator lists and that have sources, those with the most sources
    first.

    Args:
        model: The model that they are for; "" for all models.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: The name is malformed, or a setting is wrong.
        CoordinatorError: The coordinator does not answer.
    """
    wanted = parse_reference(model).name if model else ""
    found = []
    for status in list_models(coordinator=coordinator, settings=settings):
        named = model_and_set(status.model.name)
        if named is None or not status.sources or wanted not in ("", named[0]):
            continue
        try:
            fields = ProcessingKey.parse(status.model.variant).fields
            # Not the pin, which covers the name that the file has at a source.
            name = with_pin(str(status.model), status.ref.identity.hex())
        except ConfigError:
            continue
        kind, signer = fields.get("kind", ""), fields.get("signer", "")
        if kind in KINDS:
            found.append(ListedSet(name, *named, kind, signer, status.nbytes, status.sources))
    return sorted(found, key=lambda each: (-each.sources, each.name))


@dataclass(frozen=True)
class FetchedDocument:
    """A set's signed document, and the name with which its sources have its bytes."""

    signed: SignedDocument
    name: str


def fetch_document(
    listed: ListedSet,
    *,
    trust: Trust | None = None,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> FetchedDocument:
    """Return a listed set's document, with a right signature.

    Args:
        listed: The set, as a coordinator lists it.
        trust: Whose signatures are accepted; None for anyone's.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ArtifactError: What its sources have is not a set, or not the one that is listed.
        SignerError: Its signer may not sign sets for this model.
        MxError: As `mx.pull`.
    """
    where: _CoordinatorSettings = {"coordinator": coordinator, "settings": settings}
    planned = plan(listed.name, only=[DOCUMENT], **where)
    _require(planned.nbytes <= MAX_SIGNED_BYTES, listed.name)
    whole = plan(listed.name, **where)
    data = np.empty(planned.nbytes, np.uint8)
    with pull(listed.name, only=[DOCUMENT], into={DOCUMENT: data}, **where) as pulled:
        _require_no_files(pulled, listed.name)
        try:
            pulled.wait(_DOCUMENT_S)
        except TimeoutError:
            raise PeerTimeoutError(
                f"the document of {listed.name} did not arrive in {_DOCUMENT_S:g} s",
                hint="its sources are slow, maybe on purpose",
            ) from None
    signed = read_signed(data.tobytes(), trust)
    _require(signed.set_id == listed.set_id, listed.name)
    _require(signed.document.model == listed.model, listed.name)
    _require(whole.nbytes == len(signed.data) + signed.document.nbytes, listed.name)
    return FetchedDocument(signed, listed.name)


@contextlib.contextmanager
def fetched(
    found: FetchedDocument,
    staging: Path,
    *,
    coordinator: str | None = None,
    settings: config.Settings | None = None,
) -> Iterator[ArtifactPackage]:
    """Fetch a set from all of its sources, and yield it. It goes on where an earlier run was cut
    off.

    Args:
        found: The set's document, whose signer was checked.
        staging: A path in a private folder for what arrives; a run with the same path goes on with
            it. It is removed at the end of the block.
        coordinator: HOST:PORT; None takes the address in the settings.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ArtifactError: The set is not the one that was announced.
        MxError: As `mx.pull`.
    """
    try:  # what has arrived in part is beside `staging`
        with pull(found.name, out=staging, coordinator=coordinator, settings=settings) as pulled:
            _require_no_files(pulled, found.name)
            pulled.wait()
        files = sorted(staging.glob("*.safetensors"))
        _require(len(files) == 1, found.name)
        with ArtifactPackage(files[0]) as package:
            _require(package.signed.data == found.signed.data, found.name)
            yield package
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_no_files(pulled: Pull, name: str) -> None:
    """Refuse a set with side files: its document names no size for them."""
    try:
        manifest = pulled.wait_manifest(_DOCUMENT_S)
    except TimeoutError:
        raise PeerTimeoutError(
            f"the layout of {name} did not arrive in {_DOCUMENT_S:g} s",
            hint="its sources are slow, maybe on purpose",
        ) from None
    _require(not manifest.packaging.side_files, name)


def _require(holds: bool, name: str) -> None:
    if not holds:
        raise ArtifactError(
            f"what is listed as {name} is not that set", hint="its source lies: tell its operator"
        )
