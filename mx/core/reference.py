"""The text by which a user names a model: NAME, NAME:REVISION, NAME@PIN, or a combination.

A pin is the beginning of an identity, or of `ManifestRef.pin`, which covers the files too. All 64
digits name one model. Fewer are for reading: 8 digits can be forged with 2**32 attempts.

The printed form of a `ModelKey` is valid too, so that one command accepts what another lists:
`llama:main.2[rank-0]`, `llama[tp=0/2,dtype=bf16]`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import ProcessingKey, canonical_variant
from mx.errors import ConfigError

MIN_PIN_DIGITS = 8
MAX_PIN_DIGITS = 64

_PIN = re.compile(rf"[0-9a-fA-F]{{{MIN_PIN_DIGITS},{MAX_PIN_DIGITS}}}", re.ASCII)
_REFERENCE = re.compile(
    r"(?P<name>[^:@\[\]]*)(:(?P<revision>[^@\[\]]*))?"
    r"(\[(?P<variant>[^\[\]@]+)\])?(@(?P<pin>.*))?",
    re.S,
)


class ModelReference(NamedTuple):
    """The parts of a reference. "" stands for a part that the text leaves open. `pin` is
    unchecked."""

    name: str
    revision: str = ""
    variant: str = ""
    pin: str = ""

    @property
    def pinned_name(self) -> str:
        """NAME or NAME@PIN, the form that a coordinator resolves."""
        return f"{self.name}@{self.pin}" if self.pin else self.name

    def fits(self, key: ModelKey, ref: ManifestRef) -> bool:
        """Return True if the reference names a model of this key and manifest."""
        return self.fits_key(key) and ref.pinned_by(self.pin)

    def fits_key(self, key: ModelKey) -> bool:
        """Return True if the reference, whatever its pin, names a model of this key."""
        return (
            self.name in ("", key.name)
            and self.revision in ("", key.revision)
            and self.variant in ("", key.variant)
        )


def check_pin(pin: str) -> None:
    """Check the pin of NAME@PIN.

    Raises:
        ConfigError: It does not have 8 to 64 hexadecimal digits.
    """
    if not _PIN.fullmatch(pin):
        raise ConfigError(
            f"@{pin[:80]} is not a pin, which has {MIN_PIN_DIGITS} to {MAX_PIN_DIGITS} hex digits",
            hint="mx models lists the pin of each model",
        )


def parse_reference(
    text: str, *, revision: str = "", variant: str | ProcessingKey = ""
) -> ModelReference:
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
    beside_it = canonical_variant(variant)
    inside_it = canonical_variant(match["variant"] or "")
    for what, inside, beside in (
        ("revision", match["revision"], revision),
        ("variant", inside_it, beside_it),
    ):
        if inside and beside and inside != beside:
            raise ConfigError(
                f"{text!r} names the {what} {inside!r}, but `{what}` is {beside!r}",
                hint=f"leave out `{what}`",
            )
    return ModelReference(
        match["name"],
        match["revision"] or revision,
        inside_it or beside_it,
        match["pin"] or "",
    )


def pinned_name(key: ModelKey, ref: ManifestRef) -> str:
    """Return the reference that names exactly these weights, and their files if there are any."""
    return with_pin(str(key), ref.pin.hex())


def with_pin(model: str, pin: str) -> str:
    """Return a model's printed key with a pin in place of its revision, so that it names the same
    weights under another revision, too."""
    named = parse_reference(model)
    return f"{named.name}[{named.variant}]@{pin}" if named.variant else f"{named.name}@{pin}"
