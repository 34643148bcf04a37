"""Files of safetensors, byte by byte, also such as its library does not write. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from mx.core.layout import kind_nbytes


def raw_file(header: Mapping[str, object] | bytes, data: bytes = b"", *, pad: int = 0) -> bytes:
    """Return a safetensors file's bytes, with exactly this header (JSON, or bytes as they are)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int) -> dict[str, object]:
    """Return a tensor's entry in a header."""
    end = begin + kind_nbytes((dtype, tuple(shape), ()))
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def crafted(
    tensors: Iterable[tuple[str, str, list[int], bytes]],
    metadata: dict[str, str] | None = None,
    *,
    pad: int = 0,
) -> bytes:
    """Return a safetensors file with these (name, dtype, shape, bytes), in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, dtype, shape, content in tensors:
        header[name] = entry(dtype, shape, len(data))
        data += content
    return raw_file(header, data, pad=pad)
