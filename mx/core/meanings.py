"""What NAME, NAME:REVISION and NAME@PIN mean at a coordinator. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from mx.core.answers import away
from mx.core.binding import Binding
from mx.core.bindings import Bindings
from mx.core.name_state import NameState
from mx.core.reference import check_pin
from mx.core.revisions import MAIN, is_main, update_number
from mx.core.types import CHECKPOINT, ManifestRef, ModelKey
from mx.core.variant import Difference, companion_path, nearest
from mx.errors import ConfigError, UnknownModelError

#: The most names that an error's hint is made from: those like the wanted one, and any.
_MOST_ALIKE, _MOST_LOOKED = 200, 500


@dataclass(frozen=True, slots=True)
class Meaning:
    """The bindings that a reference means; at least one.

    With a pin all of them have one identity. Without one the first is meant, and the others are
    older revisions of it, the newest first. `files` is a manifest with the files that the pin
    names, None if it names none.
    """

    bindings: tuple[Binding, ...]
    pinned: bool
    files: ManifestRef | None = None


def meaning(
    bindings: Bindings,
    name: str,
    revision: str = "",
    variant: str = "",
    sees: Callable[[str], bool] | None = None,
) -> Meaning:
    """Return what a reference means.

    Args:
        bindings: The bindings.
        name: NAME or NAME@PIN.
        revision: "" for any revision if there is a pin; else for the newest that the owner has
            published of "main" and its updates (`NameState.means`).
        variant: "" for "checkpoint", or the only one that is listed.
        sees: Says which other names an error may name; None: all.

    Raises:
        UnknownModelError: No binding fits, or NAME alone could mean several variants, or the
            revision that it means is bound no more.
        ConfigError: The pin is malformed, or fits several models.
    """
    name, at, pin = name.partition("@")
    if at:
        check_pin(pin)
    pin = pin.lower()
    state = bindings.of(name)
    # A companion is asked for as such, or by its pin.
    asked = bool(at or companion_path(variant))
    named = [b for b in state.bindings() if asked or not companion_path(b.key.variant)]
    in_revision = [b for b in named if revision in ("", b.key.revision)]
    wanted = variant or CHECKPOINT
    fits = [b for b in in_revision if b.key.variant == wanted]
    if at:
        # A pin names weights: it needs no variant beside it.
        pinned = _pinned(fits, name, pin) or (None if variant else _pinned(in_revision, name, pin))
        if pinned is not None:
            return pinned
        fits = fits if variant else in_revision
    else:
        listed = [b for b in in_revision if b.bound and (revision or is_main(b.key.revision))]
        found = [b for b in listed if b.key.variant == wanted]
        # A trainer's parts (`part=1/4`) are a model together, which comes later.
        whole = [b for b in listed if ",part=" not in f",{b.key.variant}"]
        if not found and not variant and whole:
            wanted = _only_variant(name, whole)
            found = [b for b in listed if b.key.variant == wanted]
        if found and not revision:
            found = _published(state, found)
        if found:
            return Meaning(tuple(found), pinned=False)
    key = ModelKey(name, revision or MAIN, wanted)
    if not named:
        raise UnknownModelError(f"no model {name!r} here", hint=_others(bindings, name, sees))
    raise _unknown(key, named, fits, pin)


def _only_variant(name: str, listed: Sequence[Binding]) -> str:
    variants = sorted({b.key.variant for b in listed})
    if len(variants) == 1:
        return variants[0]
    raise UnknownModelError(
        f"{name} has no variant {CHECKPOINT!r} here, but {len(variants)} others",
        hint="name one of them as `variant`: " + _some(variants),
    )


def _published(state: NameState, found: Sequence[Binding]) -> list[Binding]:
    """Return the binding in the revision that NAME means, and those in older ones that it has
    meant, the newest first."""
    key, member = found[0].key, found[0].member
    meant = state.means(member.bundle)
    most = update_number(meant)
    older = [
        b
        for b in found
        if update_number(b.key.revision) < most
        and (member.alone or member.bundle in state.entries[b.key.revision].completed)
    ]
    older.sort(key=lambda b: update_number(b.key.revision), reverse=True)
    for binding in found:
        if binding.key.revision == meant:
            return [binding, *older]
    if member.alone:
        message, hint = away(key._replace(revision=meant), [b.key for b in older if b.sources])
        raise UnknownModelError(message, hint=hint)
    theirs = ", ".join(sorted(b.key.revision for b in found))
    raise UnknownModelError(
        f"{key.name} means {meant} for {member.bundle}, which {key.variant} has not registered",
        hint=f"it has registered {theirs}, which NAME means once all ranks have registered it",
    )


def _some(texts: Sequence[str], most: int = 5, separator: str = " · ") -> str:
    return separator.join(texts[:most]) + (" …" if len(texts) > most else "")


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


def _difference(differing: Difference) -> str:
    listed, asked = differing.first or "none", differing.second or "none"
    return f"{differing.field}: {listed} listed, {asked} asked for"


def _unknown(
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
    if not pin:
        message = f"no {key} here"
        in_revision = [b for b in named if b.bound and b.key.revision == key.revision]
        here = in_revision or [b for b in named if b.bound]
        near = nearest(key.variant, [b.key.variant for b in here])
        if near is not None and near[1]:
            variant, differing = near
            closest = next(b.key for b in here if b.key.variant == variant)
            message += f": {closest} is the nearest that is listed"
            return UnknownModelError(message, hint="; ".join(map(_difference, differing)))
    others = ", ".join(
        str(b.key) if b.bound else f"{b.key} by its pin only, @{b.ref.pin.hex()[:16]}"
        for b in named[:5]
    )
    return UnknownModelError(f"no {key} here", hint=f"there is {others}")


def _others(bindings: Bindings, name: str, sees: Callable[[str], bool] | None) -> str:
    """Return which other names there are, made of those alone that the caller sees."""
    names = bindings.names
    if sees is None and not names:
        return "nothing is registered here yet"
    # Few names are looked at: a comparison takes long, and any caller can ask for one.
    alike = [each for each in names if each[:1].lower() == name[:1].lower()][:_MOST_ALIKE]
    if alike := get_close_matches(name, filter(sees, alike) if sees else alike, 1):
        return f"the nearest name that is listed is {alike[0]}"
    shown = [*islice(filter(sees, names[:_MOST_LOOKED]) if sees else names, 6)]
    if not shown:
        return "nothing that you may see is registered here"
    if len(shown) == 1:
        return f"there is {shown[0]}"
    more = " …" if len(shown) > 5 else f" and {shown.pop()}"
    return f"listed are {', '.join(shown[:5])}{more}"
