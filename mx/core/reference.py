"""The text by which a user names a model: NAME, NAME:REVISION, NAME@PIN, or a combination.

The printed form of a `ModelKey` is valid too, so that one command accepts what another lists:
`llama:main.2[rank-0]`.
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
    """The parts of a reference. "" stands for a part that the text leaves open.

    `pin` is the beginning of an identity in hexadecimal digits, unchecked.
    """

    name: str
    revision: str = ""
    variant: str = ""
    pin: str = ""

    @property
    def pinned_name(self) -> str:
        """NAME or NAME@PIN, the form that a coordinator resolves."""
        return f"{self.name}@{self.pin}" if self.pin else self.name

    def fits(self, key: ModelKey, identity: bytes) -> bool:
        """Return True if the reference names a model of this key and identity."""
        return (
            self.name in ("", key.name)
            and self.revision in ("", key.revision)
            and self.variant in ("", key.variant)
            and identity.hex().startswith(self.pin.lower())
        )


def parse_reference(text: str, *, revision: str = "", variant: str = "") -> ModelReference:
    """Parse NAME[:REVISION][[VARIANT]][@PIN].

    Args:
        text: What the user wrote.
        revision: The revision that the user gave apart from `text`, "" for none.
        variant: The variant that the user gave apart from `text`, "" for none.

    Returns:
        The reference; its revision and variant come from `text` or from the other arguments.

    Raises:
        ConfigError: The text is not of this form, or contradicts `revision` or `variant`.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or "" in (match["revision"], match["pin"]) or (text and not match["name"]):
        raise ConfigError(
            f"{text!r} is not the name of a model", hint="write NAME, NAME:REVISION or NAME@PIN"
        )
    for what, inside, beside in (
        ("revision", match["revision"], revision),
        ("variant", match["variant"], variant),
    ):
        if inside and beside and inside != beside:
            raise ConfigError(
                f"{text!r} names the {what} {inside!r}, but `{what}` is {beside!r}",
                hint=f"leave out `{what}`",
            )
    return ModelReference(
        match["name"],
        match["revision"] or revision,
        match["variant"] or variant,
        match["pin"] or "",
    )
