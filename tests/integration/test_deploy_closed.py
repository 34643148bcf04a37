"""The closed overlay of deploy/kubernetes, run: its own commands, certificates in cert-manager's
form, its policy, Redis with TLS and its users, each pod in namespaces of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hosts
from tests.support.cluster import Cluster, check_closed
from tests.support.kubelet import unavailable

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
    pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable() or ""),
]


def test_the_overlay_runs_closed(tmp_path: Path) -> None:
    with hosts.Hosts() as made:
        cluster = Cluster(made, tmp_path)
        try:
            check_closed(cluster)
        finally:
            cluster.close()
