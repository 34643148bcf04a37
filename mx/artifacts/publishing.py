"""Makes a set of compile caches from what `record` recorded: an operator's work, with his key."""

from __future__ import annotations

import time
from pathlib import Path

from mx.artifacts import package
from mx.artifacts.document import COMPILE_CACHE, ArtifactFile, Blob, Document
from mx.artifacts.recording import recorded
from mx.artifacts.trust import Signed, read_key, sign
from mx.core.reference import parse_reference
from mx.errors import ConfigError


def publish(folder: str | Path, *, model: str, key: str | Path, out: str | Path) -> Signed:
    """Sign what was recorded in a folder, and write it as a set.

    Args:
        folder: The folder that `record` made.
        model: The name of the model that the set is for.
        key: The publisher's key file.
        out: The file to make; its name ends in .safetensors.

    Returns:
        The set's signed document.

    Raises:
        ArtifactError: The folder is not as it was recorded, or has what no set may have.
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
    blobs: dict[bytes, int] = {}
    first: list[Path] = []  # a file with each blob's bytes
    described, files = [], []
    for each, digest in sorted(found.files, key=lambda entry: entry[0].path):
        if digest not in blobs:
            blobs[digest] = len(blobs)
            described.append(Blob(digest, each.nbytes))
            first.append(root / each.path)
        files.append(ArtifactFile(each.path, blobs[digest], each.executable))
    document = Document(name, COMPILE_CACHE, int(time.time()), found.environment, described, files)
    signed = sign(document, secret)
    package.write(path, signed, (each.read_bytes() for each in first))
    return signed
