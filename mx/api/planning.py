"""Shows what a pull would do: `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack, cast

from mx import runtime
from mx.api.arguments import PlanArguments, PullArguments, takes
from mx.api.common import transports
from mx.api.options import pull_options, settings_of
from mx.api.tables import SourceMemory, memories
from mx.core.paths import Medium
from mx.core.planner import Plan
from mx.core.selection import Subset
from mx.core.topology import Place
from mx.core.types import ManifestRef, ModelKey, SourceRecord
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths, target_place
from mx.fetching.resolver import describe
from mx.runtime import in_thread
from mx.transport import Transport
from mx.units import count, format_bytes
from mx.wire.locate import Locator


@dataclass(frozen=True, repr=False)
class PlannedPull:
    """`nbytes` are those that are moved: of the model's tensors, or of all blocks that hold a part
    of the `subset`. `place` is the target's. `memories` says where each source has the bytes, as
    its layer-address table at the coordinator says."""

    model: ModelKey
    ref: ManifestRef
    nbytes: int
    layers: int
    place: Place
    plan: Plan
    subset: Subset | None = None
    memories: tuple[SourceMemory, ...] = ()
    coordinate_always: bool = False

    @property
    def coordinated(self) -> bool:
        """True if the pull would exchange chunks with others that read there at the same time:
        over links that they share."""
        best = self.plan.chosen[:1]
        moves = any(not path.attach for path in best)
        return moves and (self.coordinate_always or best[0].medium is Medium.NETWORK)

    def devices_of(self, source: SourceRecord) -> tuple[str, ...]:
        """Return the devices of a source's memory, by its table: "cpu" or "cuda:UUID".

        Args:
            source: One of the plan's sources.
        """
        found = (m for m in self.memories if m.record.source_id == source.source_id)
        return next((each.devices for each in found), ())

    def __repr__(self) -> str:
        """One line: the model, and the paths that a pull would take."""
        chosen = ", ".join(f"{path.label} from {path.source.endpoint}" for path in self.plan.chosen)
        size = f"{format_bytes(self.nbytes)} in {count(self.layers, 'layer')}"
        return f"<PlannedPull {self.model}: {size}, {chosen or 'no way to get them here'}>"

    @property
    def estimate_s(self) -> float | None:
        """How long the chosen ways should take; None if there is none. Attached memory is there
        at once."""
        if not self.plan.chosen:
            return None
        if self.plan.chosen[0].attach:
            return 0.0
        return self.nbytes / (self.plan.gb_per_s * 1e9)


async def plan_pull(
    options: PullOptions, place: Place, transports: Mapping[str, Transport]
) -> PlannedPull:
    """Resolve, fetch the manifest, plan. Raises UnknownModelError, CoordinatorError,
    SourceError."""
    async with Locator(options) as locator:
        located, manifest = await describe(locator)
        where = await memories(locator, located.sources, manifest.layout)
    subset, nbytes = None, manifest.layout.payload_nbytes
    if options.selection is not None:
        subset = await in_thread(options.selection.of, manifest.layout)
        nbytes = await in_thread(lambda: subset.moved_nbytes)
    return PlannedPull(
        located.model,
        located.ref,
        nbytes,
        len(manifest.layout.layers),
        place,
        plan_paths(options, place, transports, located.sources),
        subset,
        where,
        options.coordinate_always,
    )


@takes(PlanArguments)
def plan(model: str, **arguments: Unpack[PlanArguments]) -> PlannedPull:
    """Return the paths from the sources of `model` to this process, without moving weights.

    The plan says which paths a `pull` with the same arguments would use, what each should carry,
    and why it would not use the others. It says where each source has the bytes, too (`memories`).

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        peer: HOST:PORT of the one source to consider, without a coordinator.
        revision: The revision, where `model` names none.
        variant: The variant: a word, or a `ProcessingKey` or its text. If empty, "checkpoint", or
            the only one that is listed.
        coordinator: HOST:PORT; None takes the address in the settings.
        transport: The name of the only transport to consider.
        attach: False leaves out paths that share memory.
        device: Where the pull would put the model: "cpu", or a GPU, "cuda:N" or "cuda:GPU-...".
        only, slices: As in `pull`. The plan's `subset` says how many bytes are the tensors' own,
            and how many are moved for them.
        owner: As in `pull`.
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        ConfigError: An argument is wrong.
        UnknownModelError: The coordinator knows no such model.
        CoordinatorError: The coordinator does not answer.
        SourceError: The source at `peer` can't be used.
    """
    options = pull_options(model, settings_of(arguments), cast(PullArguments, arguments))
    place, known = target_place(options), transports()
    return runtime.run(lambda: plan_pull(options, place, known))
