"""Makes a set from what `record` recorded: an operator's work, with his key."""

from __future__ import annotations

import time
from pathlib import Path

from mx.artifacts import package
from mx.artifacts.caches import GRAPHS
from mx.artifacts.document import COMPILE_CACHE, CUDA_GRAPH, ArtifactFile, Blob, Document
from mx.artifacts.recording import recorded
from mx.artifacts.trust import SignedDocument, read_key, sign
from mx.core.reference import parse_reference
from mx.errors import ConfigError


def publish(
    folder: str | Path,
    *,
    model: str,
    key: str | Path,
    out: str | Path,
    graphs: bool = False,
) -> SignedDocument:
    """Sign what was recorded in a folder, and write it as a set.

    Args:
        folder: The folder that `record` made.
        model: The name of the model that the set is for.
        key: The publisher's key file.
        out: The file to make; its name ends in .safetensors.
        graphs: Whether to take the CUDA graphs that were recorded, in place of the caches.

    Returns:
        The set's signed document.

    Raises:
        ArtifactError: The folder has changed since it was recorded, or has something that no set
            may have.
        ConfigError: An argument is wrong, the key file is not this user's alone, or there is a
            file `out`.
        CapacityError, OutputError: It can't be written.
    """
    root, path = Path(folder), Path(out)
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"{path} does not end in .safetensors", hint="a set is such a file: name it so"
        )
    name = parse_reference(model).name
    if name != model:
        raise ConfigError(
            f"a set is for a model's name, and {model!r} is more than that", hint=f"give {name}"
        )
    secret = read_key(Path(key))
    found = recorded(root)
    taken = [each for each in found.files if each[0].path.startswith(f"{GRAPHS}/") == graphs]
    pins = sorted({each.path.split("/")[1] for each, _ in taken}) if graphs else [""]
    if not taken:
        what = "CUDA graphs" if graphs else "compile caches"
        raise ConfigError(
            f"no {what} were recorded in {root}", hint="there may be artefacts of another kind"
        )
    if len(pins) > 1:
        raise ConfigError(
            f"the graphs in {root} are for the weights of {len(pins)} pins",
            hint="a set is for one: record the graphs of each by itself",
        )
    blobs: dict[bytes, int] = {}
    first: list[Path] = []  # a file with each blob's bytes
    described, files = [], []
    for each, digest in sorted(taken, key=lambda entry: entry[0].path):
        if digest not in blobs:
            blobs[digest] = len(blobs)
            described.append(Blob(digest, each.nbytes))
            first.append(root / each.path)
        files.append(ArtifactFile(each.path, blobs[digest], each.executable))
    document = Document(
        name,
        CUDA_GRAPH if graphs else COMPILE_CACHE,
        int(time.time()),
        found.environment,
        described,
        files,
        pins[0],
    )
    signed = sign(document, secret)
    package.write(path, signed, (each.read_bytes() for each in first))
    return signed
