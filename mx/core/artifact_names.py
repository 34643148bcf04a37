"""The names by which sets of artefacts are listed, beside those of models. Pure."""

from __future__ import annotations

import re

#: The characters of a set's id: 128 bits of the digest of its document.
ID_CHARS = 32
_NAME = re.compile(rf"(.+)/artifacts/([0-9a-f]{{{ID_CHARS}}})", re.ASCII | re.DOTALL)


def listed_name(model: str, set_id: str) -> str:
    """Return the name by which a set for a model is listed."""
    return f"{model}/artifacts/{set_id}"


def model_and_set(name: str) -> tuple[str, str] | None:
    """Return the model and the id of the set that a name lists; None if it is not a set's."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])
