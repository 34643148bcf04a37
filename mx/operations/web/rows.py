"""Rows of the page: what of a model, a source and a pull is shown, as JSON can say it. Pure.

Texts from peers are bounded, and without control characters; the page shows them as text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.core.answers import ModelStatus
from mx.core.pull_status import PullStatus
from mx.core.types import AddressTable, ModelKey, SourceRecord
from mx.text import plain

#: Layers are shown one mark each up to this many, else in groups of neighbours.
MARKS = 120
#: The share of a group that is there, in steps: the last is all of it, the first none.
STEPS = "0123456789"
_MAX_CHARS = 256
_PIN_CHARS = 64

Row = dict[str, object]


def model_row(status: ModelStatus) -> Row:
    """Return the row of a model's variant."""
    return {
        **_key(status.model),
        "pin": status.ref.pin.hex()[:_PIN_CHARS],
        "bytes": status.nbytes,
        "layers": status.layers,
        "sources": status.sources,
        "pinOnly": status.pin_only,
    }


def source_row(record: SourceRecord) -> Row:
    """Return the row of a source, without what changes by the second (`load_row`)."""
    table, layers = record.table, _layers_of(record.table)
    return {
        **_key(record.model),
        "pin": record.ref.pin.hex()[:16],
        "endpoint": _text(record.endpoint),
        "host": _text(record.place.hostname),
        "pid": record.place.pid,
        "role": record.role.value,
        "state": record.state.value,
        "pinOnly": record.pin_only,
        "transports": [_text(name) for name in record.transports],
        "devices": sorted({_device(region.device) for region in table.regions}),
        "layers": layers,
        "held": sum(end - begin for begin, end in table.held),
        "marks": marks_of_ranges(table.held, layers),
    }


def load_row(readers: int, gb_per_s: float, lease_left_s: float, lease_s: float) -> Row:
    """Return the row of what a source serves now.

    Args:
        readers: How many read from it.
        gb_per_s: Its rate.
        lease_left_s: How long it stays listed without another heartbeat.
        lease_s: The longest that any source has left: about a whole lease.

    Returns:
        The row. A lease that is renewed as it should be is None, so that such rows do not change.
    """
    late = lease_left_s < 0.5 * lease_s
    return {
        "readers": readers,
        "rate": _rate(gb_per_s),
        "lease": round(lease_left_s) if late else None,
    }


def pull_row(status: PullStatus) -> Row:
    """Return the row of a pull."""
    return {
        **_key(status.model),
        "host": _text(status.host),
        "pid": status.pid,
        "phase": status.phase.value,
        "layers": status.layers,
        "ready": status.layers_ready,
        "marks": marks_of_bits(status.ready, status.layers),
        "bytes": status.nbytes,
        "done": status.done_bytes,
        "seconds": round(status.seconds, 2),
        "rate": _rate(status.gb_per_s),
        "sources": [_text(source) for source in status.sources],
        "retries": status.retries,
        "requests": _text(status.requests),
    }


def _layers_of(table: AddressTable) -> int:
    """Return how many layers a source's model has, as far as its table says."""
    ends = [region.layers[1] for region in table.regions if region.layers]
    return max([table.layer_count, *ends, *(end for _, end in table.held[-1:])])


def marks_of_bits(bits: int, layers: int) -> str:
    """Return a step of `STEPS` for each layer, or group of layers, of a bit set."""
    return "".join(
        _step((bits >> begin & ((1 << size) - 1)).bit_count(), size)
        for begin, size in _groups(layers)
    )


def marks_of_ranges(ranges: Sequence[tuple[int, int]], layers: int) -> str:
    """Return a step of `STEPS` for each layer, or group of layers, of ascending ranges."""
    marks, first = [], 0
    for begin, size in _groups(layers):
        end, count = begin + size, 0
        while first < len(ranges) and ranges[first][1] <= begin:
            first += 1
        for low, high in ranges[first:]:
            if low >= end:
                break
            count += min(high, end) - max(low, begin)
        marks.append(_step(count, size))
    return "".join(marks)


def _groups(layers: int) -> list[tuple[int, int]]:
    """Return the groups as (first layer, number of layers)."""
    size = max(1, -(-layers // MARKS))
    return [(begin, min(size, layers - begin)) for begin in range(0, layers, size)]


def _step(count: int, size: int) -> str:
    if count >= size:
        return STEPS[-1]
    # Part of a group is never shown as nothing, nor as all.
    return STEPS[max(1, count * (len(STEPS) - 1) // size)] if count > 0 else STEPS[0]


def _key(key: ModelKey) -> Row:
    return {
        "name": _text(key.name),
        "title": _text(str(key), 3 * _MAX_CHARS),
    }


def _device(name: str) -> str:
    return "GPU" if name.startswith("cuda") else "host"


def _rate(gb_per_s: float) -> int:
    """Return bytes per second with three digits: more would change all the time."""
    return int(float(f"{gb_per_s * 1e9:.3g}"))


def _text(text: str, most: int = _MAX_CHARS) -> str:
    text = plain(text)
    return text if len(text) <= most else text[: most - 1] + "…"
