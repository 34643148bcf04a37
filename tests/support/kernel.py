"""What the kernel of mx is, and what the packs beside it are."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import ROOT

#: Packages of `mx`, and of `mx_transports`, that are not a part of the kernel.
PACKS = (
    *("artifacts", "engines", "fleet", "graphs", "kv", "metrics", "operations", "redis_state"),
    *("remote", "snapshots", "testing", "trainers"),
)
TRANSPORT_PACKS = ("ucx",)


def kernel() -> list[Path]:
    """Return the folders and modules of the kernel."""
    own = [each for each in (ROOT / "mx").iterdir() if each.name not in PACKS]
    transports = ROOT / "transports" / "mx_transports"
    own += [each for each in transports.iterdir() if each.name not in TRANSPORT_PACKS]
    return [each for each in sorted(own) if each.is_dir() or each.suffix == ".py"]
