"""What a pull would do, without moving a byte of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mx import discovery
from mx.core import manifest as manifests
from mx.core.planner import Plan
from mx.core.topology import Place
from mx.core.types import ManifestRef, ModelKey
from mx.runtime import in_thread
from mx.target.locator import Locator
from mx.target.options import PullOptions
from mx.target.paths import plan_paths
from mx.transport import Transport
from mx.units import count, format_bytes


@dataclass(frozen=True, repr=False)
class PlannedPull:
    """`nbytes` are those of the model's tensors, `place` is the target's."""

    model: ModelKey
    ref: ManifestRef
    nbytes: int
    layers: int
    place: Place
    plan: Plan

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
    locator = Locator(options)
    try:
        located = await locator.locate()
        documents = await locator.documents(located)
        manifest = await in_thread(manifests.decode, located.ref, documents)
    finally:
        await locator.close()
    return PlannedPull(
        located.key,
        located.ref,
        manifest.layout.payload_nbytes,
        len(manifest.layout.layers),
        place,
        plan_paths(options, place, transports, located.sources),
    )


def target_place(options: PullOptions) -> Place:
    """Where a pull with these options runs. With its interfaces' addresses: without any it would
    look like a machine that nothing can be routed to. Raises ConfigError for an interface that is
    not there."""
    return discovery.here(options.device, nics=options.nics)
