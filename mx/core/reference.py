"""How a model is named where people name it: NAME, NAME:REVISION, NAME@PIN, and together.

The text that a `ModelKey` prints as is understood too, so that what one command lists another
takes: `llama:main.2[rank-0]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mx.core.types import ModelKey
from mx.errors import ConfigError

_REFERENCE = re.compile(
    r"(?P<name>[^:@\[\]]*)(:(?P<revision>[^@\[\]]*))?"
    r"(\[(?P<variant>[^\[\]@]+)\])?(@(?P<pin>.*))?",
    re.S,
)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """What a text names. "" is for what it leaves open.

    `pin` is the beginning of an identity in hexadecimal digits, unchecked.
    """

    name: str
    revision: str = ""
    variant: str = ""
    pin: str = ""

    @property
    def pinned_name(self) -> str:
        """NAME or NAME@PIN, as a coordinator resolves it."""
        return f"{self.name}@{self.pin}" if self.pin else self.name

    def fits(self, key: ModelKey, identity: bytes) -> bool:
        """Return True if a model of this key and identity is one that the reference names."""
        return (
            self.name in ("", key.name)
            and self.revision in ("", key.revision)
            and self.variant in ("", key.variant)
            and identity.hex().startswith(self.pin.lower())
        )


def parse_reference(text: str, *, revision: str = "", variant: str = "") -> ModelReference:
    """Read NAME[:REVISION][[VARIANT]][@PIN].

    Args:
        text: What the user wrote.
        revision: What the user wrote for the revision elsewhere, "" for nothing.
        variant: The same for the variant.

    Returns:
        The reference, with the revision and the variant from wherever they were given.

    Raises:
        ConfigError: The text is not of this form, or contradicts `revision` or `variant`.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or "" in (match["revision"], match["pin"]) or (text and not match["name"]):
        raise ConfigError(f"{text!r} names no model", hint="write NAME, NAME:REVISION or NAME@PIN")
    for what, inside, beside in (
        ("revision", match["revision"], revision),
        ("variant", match["variant"], variant),
    ):
        if inside and beside and inside != beside:
            raise ConfigError(
                f"{text!r} names the {what} {inside!r}, and `{what}` another: {beside!r}",
                hint=f"leave out `{what}`",
            )
    return ModelReference(
        match["name"],
        match["revision"] or revision,
        match["variant"] or variant,
        match["pin"] or "",
    )
