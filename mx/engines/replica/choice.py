"""Chooses what a replica starts from: another replica's state, a checkpoint, or neither."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

import mx
from mx import namekey, runtime
from mx.api.arguments import PlanArguments, PullArguments
from mx.api.options import pull_options, settings_of
from mx.core.answers import BundleStatus
from mx.core.revisions import may_be_update
from mx.core.types import Manifest, SourceRecord
from mx.core.variant import ProcessingKey, differences, nearest
from mx.errors import UnknownModelError
from mx.fetching.resolver import describe, retry_until_found
from mx.wire.listing import SourceStatus
from mx.wire.locate import Locator

CHECKPOINT = "checkpoint"
#: How many digits of a checkpoint's identity the key of a state has.
CHECKPOINT_DIGITS = 16


@dataclass(frozen=True)
class Choice:
    """What a replica starts from.

    `state` is "checkpoint", a state of the engine's, or "" for none of them. `checkpoint` begins
    the identity of the checkpoint that the weights are made of, if it is known. `why` says why
    something better was not taken; with `refused` because it is another's. `name` is the model's.
    With `identity`, in hexadecimal, the checkpoint has it. `identities` has, for a state of the
    engine's, the identity of each rank's variant, in hexadecimal. `snapshot` is the folder of the
    snapshot that has it, "" for sources.
    """

    state: str = ""
    revision: str = ""
    checkpoint: str = ""
    why: str = ""
    refused: bool = False
    name: str = ""
    identity: str = ""
    identities: Mapping[str, str] = field(default_factory=dict)
    snapshot: str = ""

    def of(self, state: str, checkpoint: str, identities: Mapping[str, str]) -> Choice:
        """Return it with a state."""
        return replace(self, state=state, checkpoint=checkpoint, identities=identities)

    def encode(self) -> str:
        """Return the choice as text, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Choice:
        """Return the choice that `encode` wrote."""
        return cls(**json.loads(text))

    def revision_to_lend(self, default: str) -> str:
        """Return the revision to lend what was chosen as. An update stays one: its key is that of
        what it has replaced, and only the revision says that it is no longer made of that
        checkpoint.

        Args:
            default: The revision for all else.
        """
        updated = self.state not in ("", CHECKPOINT) and may_be_update(self.revision)
        return self.revision if updated else default


def with_checkpoint(key: ProcessingKey, checkpoint: str) -> ProcessingKey:
    """Return a key with its checkpoint field set; "" removes the field."""
    fields = {name: value for name, value in key.fields.items() if name != CHECKPOINT}
    return ProcessingKey.parse(
        ",".join(f"{n}={v}" for n, v in {**fields, **_field(checkpoint)}.items())
    )


def _field(checkpoint: str) -> dict[str, str]:
    return {CHECKPOINT: checkpoint} if checkpoint else {}


def look(
    name: str,
    keys: Mapping[str, ProcessingKey],
    *,
    revision: str = "",
    checkpoint: str = "",
    pin: str = "",
    identity: str = "",
    settings: mx.config.Settings | None = None,
) -> Choice:
    """Ask the coordinator what is listed, and choose what to load.

    No checkpoint says what an engine has made of it: a state is believed only from the name's
    owner, who is known by the name key. Where the user has a name only, the coordinator says whose
    a source is. Where he has a pin, or weights of his own, neither the coordinator nor the name's
    owner is believed: then this process has to hold the key itself, which proves it.

    Args:
        name: The model's name.
        keys: The states that this rank can take, best first, each with its key.
        revision: The only revision to take; "" for the newest.
        checkpoint: The beginning of the identity of the only checkpoint to take; "" for any.
        pin: The checkpoint's pin; "" for none.
        identity: The identity of the user's own weights, in hexadecimal; "" if it is not known.
            Then the choice is a state that is made of them, or none.
        settings: Settings to use; None loads them.

    Raises:
        CoordinatorError: The coordinator does not answer.
    """
    try:
        bundles = mx.list_bundles(name, settings=settings)
    except UnknownModelError:
        bundles = []
    listed = mx.list_models(settings=settings)
    # What a shortened key has is known once its sources are, too: see `variant.differences`.
    sources = mx.list_sources(name, settings=settings)
    if pin or identity:
        pin = pin.lower()
        key = namekey.load(settings or mx.config.load())
        owned = states_of(sources, key.vouched)
        refs = [each.ref for each in listed if each.model.name == name]
        whole = identity or next(
            (
                each.identity.hex()
                for each in refs
                if each.identity.hex().startswith(pin) or each.pin.hex().startswith(pin)
            ),
            "",
        )
        found = choose(
            keys,
            bundles if whole else (),
            {},
            owned,
            revision=revision,
            checkpoint=whole,
            pinned=True,
        )
        if found.state in keys:
            return found
        why = found.why if found.refused else ""
        if identity:
            return Choice(why=why, refused=bool(why))
        digits = (whole or pin)[:CHECKPOINT_DIGITS]
        return Choice(CHECKPOINT, revision, digits, why, bool(why))
    owned = states_of(sources, lambda record: record.by_owner)
    identities = {
        each.model.revision: each.ref.identity.hex()
        for each in listed
        if each.model.name == name and each.model.variant == CHECKPOINT and not each.pin_only
    }
    return choose(keys, bundles, identities, owned, revision=revision, checkpoint=checkpoint)


def states_of(
    sources: Iterable[SourceStatus], is_owners: Callable[[SourceRecord], bool]
) -> dict[tuple[str, str], str]:
    """Return what the owner of a name serves: by revision and variant, the identity in hexadecimal.

    Args:
        sources: Of the name.
        is_owners: Returns True if the owner vouches for a source's weights.
    """
    return {
        (record.model.revision, record.model.variant): record.ref.identity.hex()
        for record in (each.record for each in sources)
        if is_owners(record)
    }


def choose(
    keys: Mapping[str, ProcessingKey],
    bundles: Sequence[BundleStatus],
    identities: Mapping[str, str],
    owned: Mapping[tuple[str, str], str],
    *,
    revision: str = "",
    checkpoint: str = "",
    pinned: bool = False,
) -> Choice:
    """Choose among what is listed.

    A state is taken if its key agrees in every field, every rank of it is served and is the name's
    owner's, and it is made of the checkpoint that is listed now, if one is. What an update has
    written is made of no checkpoint: it keeps the key of what it replaces. So where a checkpoint is
    asked for, revisions that are called as updates are (ROOT.2 …) are not taken, unless `revision`
    names one.

    Args:
        keys: The states that this rank can take, best first, each with its key.
        bundles: What is listed under the name.
        identities: By revision, the identity of each checkpoint that is listed.
        owned: By revision and variant, the identity of what the name's owner serves.
        revision: The only revision to take; "" for the newest.
        checkpoint: The beginning of the identity of the only checkpoint to take; "" for any.
        pinned: Whether to take only weights that are made of `checkpoint`. Where `revision` names
            none, they may be of any revision that is not an update.

    Returns:
        The choice; with the state "" if there is nothing to take.
    """
    current = [
        each
        for each in bundles
        if (each.revision == revision if revision else pinned or each.named)
    ]
    source = next(
        (
            each
            for each in current
            if each.variant == CHECKPOINT
            and each.complete
            and identities.get(each.revision, "").startswith(checkpoint)
        ),
        None,
    )
    whole = "" if source is None else identities.get(source.revision, "")
    digits = (whole or checkpoint)[:CHECKPOINT_DIGITS]
    refused: list[str] = []
    as_made = bool(checkpoint) and (pinned or not revision)
    for state, key in keys.items():
        taken: list[tuple[BundleStatus, str]] = []
        for each in current:
            if _made_as(each, key):
                of = _made_of(each)
                why = _why_not(each, of, digits, owned, as_made=as_made, pinned=pinned)
                if why:
                    refused.append(f"{each} {why}")
                else:
                    taken.append((each, of))
        if len({of for _, of in taken}) > 1:
            refused.append(
                f"there are replicas of {len(taken)} checkpoints, and `checkpoint` names none "
                f"of them: {', '.join(of or 'unknown' for _, of in taken)}"
            )
        elif taken:
            found, of = taken[0]
            ranks = {each: owned[found.revision, each] for each in found.variants}
            return Choice(state, found.revision, of, identities=ranks)
    refused += _other_keys(keys, current)
    if source is not None:
        return Choice(CHECKPOINT, source.revision, digits, _text(refused), bool(refused))
    none = "nothing that this engine can take is listed" if bundles else "no source is listed"
    return Choice(why=_text(refused) or none, refused=bool(refused))


def _why_not(
    bundle: BundleStatus,
    of: str,
    digits: str,
    owned: Mapping[tuple[str, str], str],
    *,
    as_made: bool,
    pinned: bool,
) -> str:
    """Return why a state is not taken, or "".

    Args:
        bundle: The state, whose key fits.
        of: The beginning of the identity of the checkpoint that it is made of; "": unknown.
        digits: That of the checkpoint to take; "" for any.
        owned: As for `choose`.
        as_made: Whether updates are not taken.
        pinned: As for `choose`.
    """
    if as_made and may_be_update(bundle.revision):
        return f"may be an update of what was made of checkpoint {digits}"
    if digits and not (of and (of.startswith(digits) or digits.startswith(of))):
        return f"is made of checkpoint {of or 'unknown'}, not of {digits}"
    if not bundle.complete:
        return f"is incomplete: {bundle.missing_count} of {bundle.ranks} ranks have no source"
    if any((bundle.revision, variant) not in owned for variant in bundle.variants):
        return f"is not taken: its source does not hold the name key of {bundle.name}'s owner" + (
            ", as far as this process can tell by its own" if pinned else ""
        )
    return ""


def _other_keys(
    keys: Mapping[str, ProcessingKey], current: Sequence[BundleStatus]
) -> Iterator[str]:
    """Yield in which fields the nearest state of another key differs, if none has the key itself.

    What another engine holds is not mentioned.
    """
    if any(_made_as(each, key) for each in current for key in keys.values()):
        return
    states = {str(plain(variant)) for each in current for variant in _variants_of(each)}
    for key in keys.values():
        asked = next(plain(str(key)).members())  # of listed bundles, too, the first rank is shown
        engine = [each for each in states if f"engine={asked.fields.get('engine')}," in each]
        found = nearest(str(asked), engine)
        if found is not None:
            fields = "; ".join(
                f"{d.field}: {d.first or 'none'} listed, {d.second or 'none'} here"
                for d in differences(found[0], str(asked))
            )
            yield f"[{found[0]}] is another: {fields}"
            return


def _variants_of(bundle: BundleStatus) -> Iterator[str]:
    if "=" in bundle.variant:
        yield next(iter(bundle.variants))


def plain(variant: str) -> ProcessingKey:
    """Return a key without the checkpoint that its weights are made of."""
    return with_checkpoint(ProcessingKey.parse(variant), "")


def _made_as(bundle: BundleStatus, key: ProcessingKey) -> bool:
    return "=" in bundle.variant and plain(bundle.variant).bundle == plain(str(key)).bundle


def _made_of(bundle: BundleStatus) -> str:
    return ProcessingKey.parse(bundle.variant).fields.get(CHECKPOINT, "")


def _text(refused: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(refused))


def manifest_of(model: str, arguments: PlanArguments) -> Manifest:
    """Return the manifest of what a pull is to fetch, for those who make memory for it to fill.

    Args:
        model: NAME@PIN: a pull of that has the same tensors.
        arguments: The pull's.

    Raises:
        MxError: As `mx.plan`.
    """
    asked = cast(PullArguments, dict(arguments))
    options = pull_options(model, settings_of(asked), asked)

    async def ask() -> Manifest:
        async with Locator(options) as locator:
            _, manifest = await retry_until_found(
                lambda: describe(locator), options.wait_s, lambda: None
            )
            return manifest

    return runtime.run(ask)
