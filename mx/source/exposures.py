"""Making a held model readable through every transport that can, and ending that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mx.errors import LocalError, MxError, NotAllowedError
from mx.source.model import HeldModel
from mx.transport import ExposeOptions, Exposure, Transport, Unavailable

log = logging.getLogger(__name__)


def expose(
    held: HeldModel, transports: Mapping[str, Transport], options: ExposeOptions
) -> dict[str, Exposure]:
    """The exposures by transport, at the model's generation. Blocks. Raises LocalError where no
    transport can offer the model."""
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
            # What nobody has allowed is no surprise, nor is memory that is not of its kind.
            usual = held.growing or isinstance(error, NotAllowedError)
            level = logging.INFO if usual else logging.WARNING
            # As text: who keeps log records would keep the regions, by the error's traceback.
            log.log(level, "%s is not offered: %s", name, str(error))
            continue
        exposure.set_generation(held.generation)
        exposures[name] = exposure
    if not exposures:
        raise LocalError("no transport can offer the model: " + "; ".join(reasons))
    return exposures


def withdraw(exposures: Sequence[Exposure], timeout_s: float) -> None:
    """End them all, and wait up to `timeout_s` for each. Blocks."""
    for exposure in exposures:
        exposure.close()
    for exposure in exposures:
        exposure.join(timeout_s)
