"""What NAME, NAME:REVISION and NAME@PIN mean at a coordinator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mx.core.bindings import Bindings
from mx.core.groups import Binding
from mx.core.reference import check_pin
from mx.core.revisions import MAIN, is_main, update_number
from mx.core.types import ManifestRef, ModelKey
from mx.errors import ConfigError, UnknownModelError


@dataclass(frozen=True, slots=True)
class Meaning:
    """The bindings that a reference means; at least one.

    With a pin all of them have one identity. Without one each has its own, the first is preferred,
    and none contests another. `files` is a manifest with the files that the pin names, None if it
    names none.
    """

    bindings: tuple[Binding, ...]
    pinned: bool
    files: ManifestRef | None = None


def meaning(bindings: Bindings, name: str, revision: str = "", variant: str = "") -> Meaning:
    """Return what a reference means.

    Args:
        bindings: The bindings.
        name: NAME or NAME@PIN.
        revision: "" for any revision if there is a pin, else for "main" and its updates, the newest
            first.
        variant: "" for "checkpoint".

    Raises:
        UnknownModelError: No binding fits.
        ConfigError: The pin is malformed, or fits several models.
    """
    name, at, pin = name.partition("@")
    if at:
        check_pin(pin)
    pin = pin.lower()
    variant = variant or "checkpoint"
    named = bindings.of_name(name)
    fits = [b for b in named if revision in ("", b.key.revision) and b.key.variant == variant]
    if at:
        pinned = _pinned(fits, name, pin)
        if pinned is not None:
            return pinned
    else:
        found = [b for b in fits if b.bound and (revision or is_main(b.key.revision))]
        found.sort(key=lambda b: update_number(b.key.revision), reverse=True)
        if found:
            return Meaning(tuple(found), pinned=False)
    raise _unknown(bindings, ModelKey(name, revision or MAIN, variant), named, fits, pin)


def _pinned(fits: Sequence[Binding], name: str, pin: str) -> Meaning | None:
    found = [b for b in fits if b.identity.hex().startswith(pin)]
    files: dict[bytes, ManifestRef] = {}
    if not found:
        for binding in fits:
            refs = binding.pinned(pin)
            files |= {ref.packaging: ref for ref in refs}
            if refs:
                found.append(binding)
    if not found:
        return None
    if len({binding.identity for binding in found}) > 1 or len(files) > 1:
        raise ConfigError(f"{name}@{pin} fits several models", hint="give more digits")
    return Meaning(tuple(found), True, next(iter(files.values()), None))


def _unknown(
    bindings: Bindings,
    key: ModelKey,
    named: Sequence[Binding],
    fits: Sequence[Binding],
    pin: str,
) -> UnknownModelError:
    if fits and pin:
        refs = [ref for binding in fits for ref in binding.pinned("")]
        held = ", ".join(ref.pin.hex()[:16] for ref in refs[:5])
        return UnknownModelError(
            f"{key.name} is not {pin} here, but {held}",
            hint="check the pin, or ask a coordinator that has those weights",
        )
    if named:
        others = ", ".join(
            str(b.key) if b.bound else f"{b.key} by its pin only, @{b.identity.hex()[:16]}"
            for b in named[:5]
        )
        return UnknownModelError(f"no {key} here", hint=f"there is {others}")
    names = bindings.names
    there = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    hint = f"there is {there}" if names else "nothing is registered here yet"
    return UnknownModelError(f"no model {key.name!r} here", hint=hint)
