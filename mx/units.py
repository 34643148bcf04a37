"""Sizes, rates and times, and their spelling.

Units are part of names everywhere in mx: `_bytes`, `_s`, `_gb_per_s` (decimal gigabytes, 1e9
bytes, per second). The binary sizes here are plain ints.
"""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 10**9

_SUFFIXES = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": KIB,
    "m": 10**6,
    "mb": 10**6,
    "mib": MIB,
    "g": GB,
    "gb": GB,
    "gib": GIB,
}


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` (a positive int) that is >= `value`."""
    return -(-value // alignment) * alignment


def parse_bytes(text: str) -> int:
    """Read "16MiB", "1.5 GB" or "4096" as a number of bytes.

    Raises:
        ValueError: The text is anything else, such as a negative number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _SUFFIXES:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB, 1.5GB or 4096")
    return int(float(match[1]) * _SUFFIXES[match[2].lower()])


_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": GB}


def parse_rate(text: str) -> int:
    """Read "500MB/s", "2Gbit/s" or "4096" as a number of bytes per second.

    Raises:
        ValueError: The text is anything else, such as a negative number or "Gb/s", which may mean
            bytes or bits.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)(?:/s)?\s*", text)
    unit = match[2] if match else ""
    if match is None or re.fullmatch(r"[kMG]b", unit):
        raise ValueError(f"{text!r} is not a rate: write it like 500MB/s, 2Gbit/s or 1000000")
    if unit.lower() in _BITS:
        return int(float(match[1]) * _BITS[unit.lower()] / 8)
    try:
        return parse_bytes(match[1] + unit)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a rate: write it like 500MB/s, 2Gbit/s or 1000000"
        ) from None


_DURATIONS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Read "90", "1.5", "500ms", "1m" or "1h30m" as a number of seconds.

    Args:
        text: A number of seconds, or numbers with the units ms, s, m (min), h and d.

    Returns:
        The seconds; not negative.

    Raises:
        ValueError: The text is anything else.
    """
    wrong = ValueError(f"{text!r} is not a time: write it like 90, 500ms, 1m or 1h30m")
    plain = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", plain, re.ASCII):
        return float(plain)
    if not re.fullmatch(r"(\d+(\.\d+)?\s*(ms|min|[smhd])\s*)+", plain, re.ASCII):
        raise wrong
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|min|[smhd])", plain, re.ASCII)
    return float(sum(float(number) * _DURATIONS_S[unit] for number, unit in parts))


def parse_ports(text: str) -> range:
    """Read "7602" or "7602-7609" as ports; "" means none.

    Raises:
        ValueError: The text is anything else.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last <= 65535:
        raise ValueError(f"{text!r} is not a range of ports: write it like 7602-7609")
    return range(first, last + 1)


def format_bytes(nbytes: int | float) -> str:
    """Return a size like "2.15 GB", "16.8 MB" or "96 B": decimal, as rates are."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{int(nbytes)} B"


def format_seconds(seconds: float) -> str:
    """Return a time like "1.24 s", "18.3 ms" or "45 us"."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} us"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate like "2.15 GB/s" or "4.7 MB/s": bytes per second, scaled as sizes are.

    Rates are in bytes per second everywhere; only what an interface declares is in Gbit/s, as its
    vendor has it.
    """
    return f"{format_bytes(bytes_per_s)}/s"


def count(number: int, noun: str) -> str:
    """Return a count like "1 layer" or "26 layers"; `noun` is in the singular."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
