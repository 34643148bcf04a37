"""Exposes a held model through every transport that can, and withdraws the exposures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from mx.errors import LocalError, MxError, NotAllowedError, UnsuitedError
from mx.transport import ExposedRegion, ExposeOptions, Exposure, Transport, Unavailable

log = logging.getLogger(__name__)


class Held(Protocol):
    """What is exposed: a `mx.source.model.SourceModel`, or other memory that changes (`live`)."""

    generation: int
    device: str
    growing: bool

    @property
    def live(self) -> bool: ...

    def regions(self) -> list[ExposedRegion]: ...


def expose(
    held: Held, transports: Mapping[str, Transport], options: ExposeOptions
) -> dict[str, Exposure]:
    """Expose a model at its generation. Blocks.

    Args:
        held: The model; its memory must stay until the exposures are withdrawn.
        transports: The transports to try, by name.
        options: Passed to each transport.

    Returns:
        The exposures by transport; transports that cannot serve the model are left out.

    Raises:
        LocalError: No transport can serve the model.
    """
    exposures: dict[str, Exposure] = {}
    reasons: list[str] = []
    for name, transport in sorted(transports.items()):
        viable = transport.probe()
        if isinstance(viable, Unavailable):
            reasons.append(f"{name}: {viable.reason}")
            continue
        try:
            exposure = transport.expose(held.regions(), options)
        except MxError as error:
            reasons.append(f"{name}: {error}")
            # A missing permission is not a surprise, nor a transport for GPUs and memory of the
            # host; most transports cannot expose memory that is still being filled, or a GPU's.
            others = held.device != "cpu" and type(error) is LocalError
            expected = isinstance(error, NotAllowedError | UnsuitedError)
            usual = held.growing or held.live or others or expected
            level = logging.INFO if usual else logging.WARNING
            # As text: a kept log record would keep the regions through the error's traceback.
            log.log(level, "%s does not serve the model: %s", name, str(error))
            continue
        exposure.set_generation(held.generation)
        exposures[name] = exposure
    if not exposures:
        raise LocalError("no transport can serve the model: " + "; ".join(reasons))
    return exposures


def withdraw(exposures: Sequence[Exposure], timeout_s: float) -> list[Exposure]:
    """Close all exposures, and wait up to `timeout_s` for each to end. Blocks.

    Returns:
        Those that have not ended: readers still use their memory.
    """
    for exposure in exposures:
        exposure.close()
    return [exposure for exposure in exposures if not exposure.join(timeout_s)]
