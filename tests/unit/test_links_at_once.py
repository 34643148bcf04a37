"""A GPU is filled over several of its links at once: which of them a plan takes, and how the
transfer machine divides trips among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from mx import plugins
from mx.core.digest import DIGEST_BYTES
from mx.core.paths import Path
from mx.core.planner import plan
from mx.core.striping import MOST_TRIP_NBYTES, Part
from mx.core.topology import Gpu, GpuPeer, Place
from mx.core.transfer import TransferMachine
from mx.core.transfer_commands import Assign, Command, LayerReady
from mx.fetching.paths import path_or_reason
from mx.units import MIB
from tests.support.topologies import Host, host, nvlink_gpus, source
from tests.support.transfer_machine import grid_of

TRANSPORTS = plugins.transports()

# -- which links ------------------------------------------------------------------------------


def mesh(lanes: dict[tuple[int, int], int], count: int = 4, *, p2p: bool = True) -> Host:
    """Return a host whose GPUs are joined by lanes of NVLink, without switches."""
    uuids = [f"GPU-mesh-{number}" for number in range(count)]

    def between(one: int, other: int) -> int:
        return lanes.get((one, other), 0) or lanes.get((other, one), 0)

    return host(
        "mesh",
        gpus=[
            Gpu(
                uuid,
                number,
                pcie_generation=4,
                pcie_width=16,
                nvlinks=sum(between(number, other) for other in range(count) if other != number),
                nvlink_gb_per_s=25.0,
                peers=tuple(
                    GpuPeer(uuids[other], between(number, other), p2p, p2p)
                    for other in range(count)
                    if other != number
                ),
            )
            for number, uuid in enumerate(uuids)
        ],
    )


def taken(there: Host, gpus: Sequence[int], *, attach: bool = True) -> list[tuple[str, str]]:
    """Return (GPU, medium) of the paths that a pull into GPU 0 uses at once."""
    sources = [source(there.place(gpu, pid=20 + n)) for n, gpu in enumerate(gpus)]
    here = there.place(0, pid=99)

    def reach(name: str, place: Place) -> Path | str:
        return path_or_reason(TRANSPORTS[name], here, place, trusted_fabric=True)

    chosen = plan(here, sources, sorted(TRANSPORTS), reach, attach=attach).chosen
    return [(path.source.place.device[-1], path.medium.value) for path in chosen]


def test_sources_behind_links_of_their_own_are_read_at_once() -> None:
    there = mesh({(0, 1): 4, (0, 2): 2})
    assert taken(there, [1, 2]) == [("1", "nvlink"), ("2", "nvlink")]
    # The third is reached through the slot alone.
    assert taken(there, [3, 2, 1]) == [("1", "nvlink"), ("2", "nvlink"), ("3", "pcie")]
    assert taken(there, [3, 2]) == [("2", "nvlink"), ("3", "pcie")]
    # Two on one GPU share its lanes, two without NVLink share the slot.
    assert taken(there, [1, 1]) == [("1", "nvlink")]
    there = mesh({(0, 1): 4})
    assert taken(there, [2, 3]) == [("2", "pcie")]


def test_behind_switches_all_share_the_lanes_of_the_target() -> None:
    there = host("nvlink", gpus=nvlink_gpus("nvlink"))
    assert taken(there, [3, 5, 6]) == [("3", "nvlink")]


def test_nothing_is_read_beside_memory_of_the_same_gpu() -> None:
    there = mesh({(0, 1): 4, (0, 2): 2})
    for attach in (True, False):
        assert taken(there, [1, 0, 2], attach=attach) == [("0", "device")]


def test_what_takes_a_context_on_another_gpu_is_a_spare() -> None:
    there = mesh({(0, 1): 4}, p2p=True)
    gpu = there.gpus[0]
    alone = tuple(replace(peer, p2p_read=bool(peer.nvlinks)) for peer in gpu.peers)
    there = replace(there, gpus=(replace(gpu, peers=alone), *there.gpus[1:]))
    assert taken(there, [1, 2]) == [("1", "nvlink")]


# -- how trips are divided --------------------------------------------------------------------


@dataclass
class Link:
    """Carries one trip after the other at its rate."""

    bytes_per_s: float
    estimate: float
    trips: list[tuple[float, tuple[Part, ...]]] = field(default_factory=list)  # each with its end
    sizes: list[int] = field(default_factory=list)
    free_s: float = 0.0


class Pull:
    """A pull of a model over links, by the machine; time is its own."""

    def __init__(self, layers_mib: list[int], chunk_mib: int, links: list[Link]) -> None:
        self.grid, self.links, self.now_s = grid_of(layers_mib, chunk_mib), links, 0.0
        pages = [bytes(DIGEST_BYTES * blocks) for blocks in self.grid.layer_blocks]
        self.machine = TransferMachine(self.grid, pages.__getitem__, several_connections=True)
        self.ready: list[int] = []
        self.before_first = 0  # bytes asked of the first layer's source before that is ready
        self._do(self.machine.start())
        for number, link in enumerate(links):
            rate = link.estimate
            self._do(
                self.machine.add_connection(
                    number, 6, 0.0, source=f"s{number}", bytes_per_s=rate, trip_s=0.5
                )
            )
        while any(link.trips for link in links):
            number = min(
                (n for n, link in enumerate(links) if link.trips), key=lambda n: links[n].trips[0]
            )
            self.now_s, trip = links[number].trips.pop(0)
            landed = [(part, bytes(DIGEST_BYTES * (part.end - part.begin))) for part in trip]
            self._do(self.machine.landed(number, landed, self.now_s))

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, LayerReady):
                self.ready.append(command.layer)
            elif isinstance(command, Assign):
                link = self.links[command.connection]
                size = sum(self.grid.part_nbytes(*part) for part in command.parts)
                link.sizes.append(size)
                link.free_s = max(link.free_s, self.now_s) + size / link.bytes_per_s
                link.trips.append((link.free_s, command.parts))
                if 0 not in self.ready and command.connection == 0:
                    self.before_first += size


@pytest.mark.parametrize("rates", [(85e9, 85e9), (85e9, 42e9), (85e9, 20e9), (170e9, 85e9, 20e9)])
@pytest.mark.parametrize("gib", [2, 16])
def test_all_links_end_together_and_read_long_runs(rates: tuple[float, ...], gib: int) -> None:
    links = [Link(rate, rate) for rate in rates]
    pull = Pull([gib * 1024 // 32] * 32, 16, links)
    assert pull.machine.holdings.whole and 0 in pull.ready[:2]  # another may read the second
    least_s = gib * 1024 * MIB / sum(rates)
    assert pull.now_s <= 1.1 * least_s
    for link in links:
        assert abs(sum(link.sizes) / link.bytes_per_s - pull.now_s) <= 0.15 * pull.now_s
        assert max(link.sizes) <= MOST_TRIP_NBYTES
    # Most come in long runs of chunks, but those at the beginning and at the end.
    sizes = [size for link in links for size in link.sizes]
    assert len(sizes) <= 6 * gib + 40 * len(links)
    assert pull.before_first == gib * 1024 // 32 * MIB


def test_what_was_expected_wrongly_is_seen_early() -> None:
    links = [Link(85e9, 85e9), Link(8.5e9, 85e9)]  # the second is as if it shared a link
    pull = Pull([256] * 32, 16, links)
    assert pull.machine.holdings.whole
    assert pull.now_s <= 1.25 * 8192 * MIB / sum(link.bytes_per_s for link in links)


def test_the_model_is_read_whole_whatever_its_size() -> None:
    for mib in (1, 3, 17, 64):
        links = [Link(85e9, 85e9), Link(40e9, 40e9)]
        pull = Pull([mib] * 4, 1, links)
        assert pull.machine.holdings.whole and len(pull.ready) == 4
