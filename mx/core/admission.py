"""Whether a source may be listed under the key that it asks for, and as what. Pure.

Registering never updates. A source whose weights the name does not stand for is refused, or listed
for readers that give its pin: if it was listed before, or holds another key than the name's owner.

While the state is in doubt, since it has lost some of itself, a name is bound by a receipt alone.
What brings none and would bind or update a name may be right or wrong: it is found by its pin until
the doubt ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mx.core.binding import Binding
from mx.core.bindings import Admission, Bindings
from mx.core.bound_name import (
    BoundName,
    bound_to_others,
    lends_of_none,
    not_the_owner,
    updated_by_another,
)
from mx.core.ownership import Receipt
from mx.core.types import Intent, ManifestRef, ModelKey
from mx.errors import BindingError, UnsettledError


@dataclass(frozen=True, slots=True)
class RegistrationClaim:
    """What a source claims beside its weights. `commitment` is one that it has proved to hold the
    key of, b"" if none, and `lends` one that has certified its lender key. `receipt` is the
    coordinator's own, and `may_restore` True in the first grace, and in that after a doubt.
    `in_doubt` is True while the state may have lost some."""

    commitment: bytes = b""
    intent: Intent = field(default_factory=Intent)
    receipt: Receipt | None = None
    may_restore: bool = False
    in_doubt: bool = False
    lends: bytes = b""


def admit(
    bindings: Bindings,
    key: ModelKey,
    ref: ManifestRef,
    claim: RegistrationClaim,
    *,
    address: str = "",
) -> Admission:
    """Return the key that `ref` may be bound to. Changes nothing.

    Args:
        bindings: What is bound.
        key: What the source registers.
        ref: The source's manifest.
        claim: What it claims beside that.
        address: Where the source registers from.

    Returns:
        The decision. An update has another revision in its key.

    Raises:
        BindingError: The key is bound to another identity or belongs to another owner, or
            another source has updated it.
        CapacityError: The coordinator, or this address, has reached its limit of models.
    """
    state = bindings.of(key.name)
    name, replaces = state.claimed, claim.intent.replaces
    late = name is not None and name.owned_by(claim.commitment) and name.behind(key)
    if late and claim.intent.publishes:
        replaces = key.revision
    if replaces:
        found = _update(name, key._replace(revision=replaces), ref, claim)
    else:
        found = _plain(name, key, ref, claim)
    refusal: BindingError | None = None
    if isinstance(found, BindingError):
        refusal, found = found, Admission(key, bound=False)
    key = found.key
    binding = state.get(key)
    if binding is not None and binding.identity != ref.identity:
        binding = None
    if refusal is not None:
        if replaces:
            raise refusal
        binding = state.contest(key, ref)
        listed = claim.intent.keeps_pin or claim.in_doubt or _is_strange(state.claimed, claim)
        if binding is None and not listed:
            raise refusal
    if binding is None or _restores_layout(binding, ref, found, claim):
        bindings.budget.check(address)
    elif binding.ref.layout != ref.layout:
        raise BindingError(
            f"{key} is listed in layout {binding.ref.layout_version}, and these are the same "
            f"weights in layout {ref.layout_version}",
            hint="start this source again: it lays them out as those that are listed",
        )
    return found


def _restores_layout(
    binding: Binding, ref: ManifestRef, found: Admission, claim: RegistrationClaim
) -> bool:
    """Return True if a source of the coordinator's earlier life is back: one that came before it,
    with another layout of its weights, does not keep it from its name."""
    receipt = found.receipt
    if receipt is None or receipt.this_life or not claim.may_restore or found.key != receipt.key:
        return False
    return not binding.ref.same_weights(ref) and receipt.issued_s > binding.issued_s


def _is_strange(name: BoundName | None, claim: RegistrationClaim) -> bool:
    """Return True if another key than the source's own owns the name: the source may have been
    the honest one before the coordinator restarted, and so it is found by its pin."""
    other = name is not None and not name.owned_by(claim.commitment)
    return bool(claim.commitment) and other


def _plain(
    name: BoundName | None, key: ModelKey, ref: ManifestRef, claim: RegistrationClaim
) -> Admission | BindingError:
    """Decide about a source that is not an update."""
    binding = None if name is None else name.get(key)
    receipt = claim.receipt
    fits = receipt is not None and (receipt.key, receipt.identity) == (key, ref.identity)
    if receipt is not None and fits and (name is None or _restores(name, key, receipt, claim)):
        return Admission(key, receipt=receipt, base=receipt.base)
    if claim.in_doubt and binding is None:
        return _in_doubt(key)
    if name is None:
        if claim.lends and claim.may_restore:  # its owner may yet be back
            return _in_doubt(key)
        if claim.lends:
            return lends_of_none(key)
        if not claim.intent.keeps_pin:
            return Admission(key)
        return BindingError(f"the coordinator has no receipt for {key}")
    if binding is None:
        refusal = name.refusal(key, claim.commitment, lends=claim.lends)
        if refusal is None and claim.intent.keeps_pin:
            refusal = BindingError(f"the coordinator has no receipt for {key}")
        return refusal or Admission(key)
    if binding.identity != ref.identity and not (binding.lent and name.owned_by(claim.commitment)):
        return bound_to_others(binding, ref, own=name.owned_by(claim.commitment))
    return Admission(key)


def _in_doubt(key: ModelKey) -> UnsettledError:
    return UnsettledError(
        f"the coordinator's state has lost some of its names, so that {key} can be bound only by a "
        "receipt now",
        hint="try again in a few seconds",
    )


def _restores(name: BoundName, key: ModelKey, receipt: Receipt, claim: RegistrationClaim) -> bool:
    """Return True if a receipt counts although its name has an owner: it agrees with what is bound,
    or it is of an earlier life and newer than the receipt of what is bound, in the first grace."""
    binding, stronger = name.get(key), claim.may_restore and not receipt.this_life
    if name.owned_by(receipt.commitment):
        if binding is None or binding.identity == receipt.identity:
            return True
        return stronger and receipt.issued_s > binding.issued_s
    return stronger and receipt.weight > name.issued_s


def _update(
    name: BoundName | None, key: ModelKey, ref: ManifestRef, claim: RegistrationClaim
) -> Admission | BindingError:
    """Decide about an update of a key."""
    receipt = claim.receipt
    refusal = not_the_owner(key.name, "update it")
    if not claim.commitment:
        return refusal
    if receipt is not None and (receipt.key != key or receipt.commitment != claim.commitment):
        receipt = None
    if claim.in_doubt and receipt is None:
        return _in_doubt(key)
    if name is not None and not name.owned_by(claim.commitment):
        if receipt is None or not _restores(name, key, receipt, claim):
            return refusal
        name = None
    missed: Binding | None = None  # other weights under the key, of which the source does not know
    if receipt is not None and name is not None and not _restores(name, key, receipt, claim):
        receipt, missed = None, name.get(key)
    name = name or BoundName(claim.commitment)
    try:
        following = name.update(key, ref, receipt)
    except BindingError as error:
        return error
    joins = name.get(following) is not None
    if missed is not None and missed.is_held_by(claim.commitment) and not joins:
        return updated_by_another(key, missed)
    root = (receipt.base if receipt else "") or name.root(key.revision)
    base = root if following.revision != root else ""
    return Admission(following, receipt=receipt, base=base)
