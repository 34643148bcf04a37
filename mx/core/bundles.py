"""Which ranks of a bundle are there, and which are missing. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from mx.core.answers import BundleStatus
from mx.core.binding import Binding
from mx.core.name_state import NameState
from mx.core.variant import members_of, membership

#: The most missing ranks that an answer names.
MAX_MISSING = 64


def summaries(state: NameState, is_served: Callable[[Binding], bool]) -> Iterator[BundleStatus]:
    """Yield the bundles of a model name, by revision.

    Args:
        state: What is bound under the name.
        is_served: Returns True if a whole source of a binding grants reads.
    """
    served: dict[tuple[str, str], set[str]] = {}  # the variants, by revision and bundle
    for revision, entry in state.entries.items():
        for variant, binding in entry.variants.items():
            if is_served(binding):
                served.setdefault((revision, binding.member.bundle), set()).add(variant)
    for revision, entry in state.entries.items():
        for bundle in sorted(entry.bundles):
            ranks = membership(bundle).ranks
            there = served.get((revision, bundle), set())
            missing: list[str] = []
            if len(there) < ranks:
                absent = (each for each in members_of(bundle) if each not in there)
                missing = list(itertools.islice(absent, MAX_MISSING))
            yield BundleStatus(
                state.name,
                revision,
                bundle,
                ranks,
                tuple(missing),
                ranks - len(there),
                revision == state.means(bundle),
            )
