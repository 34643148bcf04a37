"""Sets of artefacts in which a liar has changed a field: nothing of them is laid out or loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

import mx
from mx import config
from mx.artifacts import document as documents
from mx.artifacts import environment, package
from mx.artifacts.document import COMPILE_CACHE, CUDA_GRAPH, ArtifactFile, Document
from mx.artifacts.trust import _STATEMENT, public_key, sign
from mx.artifacts.using import obtain
from mx.core.artifact_names import listed_name
from mx.errors import IntegrityError
from mx.graphs import find
from mx.wire.v1 import artifacts_pb2 as pb
from tests.support import artifact_sets
from tests.support.commands import commands, start_coordinator

pytestmark = pytest.mark.integration

FARM, LIAR = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
PIN = 64 * "1"
HERE = environment.here(names=["python", "platform"])
CACHE = artifact_sets.document(
    {"inductor/ab/x.py": b"good", "inductor/ab/y.so": b"object"}, model="m", environment=HERE
)
GRAPH = replace(
    artifact_sets.document(
        {f"graphs/{PIN}/decode": b"good", f"graphs/{PIN}/images/x": b"object"},
        model="m",
        environment=HERE,
    ),
    kind=CUDA_GRAPH,
    pin=PIN,
)
EVIL = b"evil!!"


def _blob(document: Document, **change: object) -> Document:
    return replace(document, blobs=[replace(document.blobs[0], **change), *document.blobs[1:]])  # type: ignore[arg-type]


def _file(document: Document, **change: object) -> Document:
    return replace(document, files=[replace(document.files[0], **change), *document.files[1:]])  # type: ignore[arg-type]


#: What a liar gains by each, if it counted: his code, another model, an older set made newer …
CHANGES: Mapping[str, Callable[[Document], Document]] = {
    "nothing": lambda d: d,
    "model": lambda d: replace(d, model="other"),
    "kind": lambda d: replace(
        d, kind=COMPILE_CACHE if d.kind == CUDA_GRAPH else CUDA_GRAPH, pin="" if d.pin else PIN
    ),
    "created_s": lambda d: replace(d, created_s=d.created_s + 1),
    "a field's value": lambda d: replace(d, environment={**d.environment, "python": "CPython 9"}),
    "a field less": lambda d: replace(d, environment={"python": d.environment["python"]}),
    "a field more": lambda d: replace(d, environment={**d.environment, "zz": ""}),
    "a blob's digest": lambda d: _blob(d, blake3=blake3(EVIL).digest()),
    "a blob's size": lambda d: _blob(d, nbytes=len(EVIL)),
    "a blob": lambda d: _blob(d, blake3=blake3(EVIL).digest(), nbytes=len(EVIL)),
    "a path": lambda d: _file(d, path=d.files[0].path + "0"),
    "a path outside": lambda d: _file(d, path="../evil.py"),
    "a file's blob": lambda d: replace(
        d, files=[replace(d.files[0], blob=1), replace(d.files[1], blob=0)]
    ),
    "executable": lambda d: _file(d, executable=True),
    "a file more": lambda d: replace(
        d, files=[*d.files, ArtifactFile(d.files[-1].path + ".more", 0)]
    ),
    "pin": lambda d: replace(d, pin=64 * "2"),
}


def _forged(document: Document, how: str) -> bytes:
    """Return a signed document as a liar makes it, who has a right one, and a key of his own."""
    data = documents._message(document).SerializeToString(deterministic=True)
    right = pb.SignedArtifact.FromString(
        sign(CACHE if document.kind == COMPILE_CACHE else GRAPH, FARM).data
    )
    signature, public = right.signature, public_key(FARM)
    if how != "old signature":
        signature = LIAR.sign(_STATEMENT + data)
    if how == "own key":
        public = public_key(LIAR)
    message = pb.SignedArtifact(document=data, public_key=public, signature=signature)
    return message.SerializeToString(deterministic=True)


def _write(path: Path, signed: bytes, document: Document) -> None:
    """Write a set of which everything but the signature agrees with the document."""
    known = {blake3(each).digest(): each for each in (b"good", b"object", EVIL)}
    blobs = b"".join(known[b.blake3][: b.nbytes].ljust(b.nbytes, b"!") for b in document.blobs)
    tensors = {
        package.DOCUMENT: np.frombuffer(signed, np.uint8),
        "set.1.blobs": np.frombuffer(blobs, np.uint8),
    }
    save_file(tensors, path)


@pytest.mark.parametrize("kind", [COMPILE_CACHE, CUDA_GRAPH])
@pytest.mark.parametrize(
    "how",
    ["old signature", pytest.param("own signature", marks=pytest.mark.long), "own key"],
)
def test_no_field_of_a_set_can_be_changed(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trust = artifact_sets.write_trust(tmp_path / "trust.toml", FARM)
    base = CACHE if kind == COMPILE_CACHE else GRAPH
    with commands() as run:
        settings = config.load({"coordinator": start_coordinator(run)[0]}, environ={"HOME": "/x"})
        for number, (what, change) in enumerate(CHANGES.items()):
            if what == "nothing" and how == "old signature":
                continue  # the right set
            document = change(base)
            signed = _forged(document, how)
            path = tmp_path / f"{number}.safetensors"
            _write(path, signed, document)
            try:
                with package.ArtifactPackage(path) as opened:
                    opened.verify()
            except IntegrityError:
                pass
            else:  # by his own key, which no trust file names
                assert how == "own key", what
            # Listed as what a target looks for, by the id that it would have.
            data = pb.SignedArtifact.FromString(signed).document
            variant = mx.ProcessingKey(kind=kind, signer=public_key(FARM).hex()[:16])
            source = mx.serve(
                path,
                model=listed_name("m", documents.set_id(data)),
                variant=variant,
                settings=settings,
            )
            try:
                if kind == COMPILE_CACHE:
                    got = obtain("m", trust=trust, root=tmp_path / "root", settings=settings)
                    assert got.folder is None, what
                    reasons = got.reasons
                else:
                    found = find("m", pin=PIN, trust=trust, settings=settings)
                    assert not found.graphs, what
                    reasons = found.reasons
                (reason,) = reasons  # and not that nothing is listed
                assert " is not used: " in reason, (what, reason)
            finally:
                source.close()
    for root in (tmp_path / "root", tmp_path / "cache" / "mx" / "artifacts"):
        left = os.listdir(root) if root.exists() else []
        assert not left, left
