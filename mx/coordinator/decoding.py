"""Decodes manifests before their sources are listed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from mx.coordinator.bounds import PrincipalLocks
from mx.core import manifest
from mx.core.types import ManifestRef
from mx.errors import ManifestError
from mx.runtime import in_thread, uncut

#: The most manifests that are known to be decodable.
_MOST_DECODED = 4096
#: Documents up to this size together are decoded at once: it takes a millisecond.
_SMALL_BYTES = 32 << 10
#: Up to this size on a thread: it stops others for some milliseconds. Beyond it in a child.
_MEDIUM_BYTES = 512 << 10
_CHILD = Path(__file__).with_name("decode_child.py")
_CHILDREN = 2
_CHILD_TIMEOUT_S = 20.0


class ManifestDecoder:
    """Decodes each manifest once. Of an address one large manifest is decoded at a time, so that
    one which sends many delays the others by one."""

    def __init__(self) -> None:
        self._known: OrderedDict[ManifestRef, None] = OrderedDict()
        self._decoding = asyncio.Semaphore(_CHILDREN)
        self._turns = PrincipalLocks()

    async def check(self, ref: ManifestRef, documents: Mapping[bytes, bytes], address: str) -> None:
        """Decode a manifest, unless that has been done lately.

        Args:
            ref: The manifest.
            documents: Its documents.
            address: Who registers it.

        Raises:
            ManifestError: It can't be decoded, or that takes too long.
        """
        if sum(ref.sizes) <= _SMALL_BYTES:
            if ref not in self._known:
                manifest.decode(ref, documents)
        else:
            async with self._turns.of(address):
                if ref not in self._known:
                    async with self._decoding:
                        # Uncut: else the next one would be decoded beside one that was given up.
                        await uncut(in_thread(_decode, ref, documents))
        self._known[ref] = None
        self._known.move_to_end(ref)
        while len(self._known) > _MOST_DECODED:
            self._known.popitem(last=False)


def _decode(ref: ManifestRef, documents: Mapping[bytes, bytes]) -> None:
    if sum(ref.sizes) <= _MEDIUM_BYTES or not sys.executable:
        manifest.decode(ref, documents)
        return
    head = {
        "path": sys.path,
        "digests": [each.hex() for each in (ref.identity, ref.layout, ref.packaging)],
        "sizes": ref.sizes,
        "layout_version": ref.layout_version,
    }
    sent = [json.dumps(head).encode(), b"\n", *(documents[digest] for digest, _ in ref.documents)]
    try:
        ran = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=b"".join(sent),
            capture_output=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
        )
        error = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise ManifestError(f"it takes more than {_CHILD_TIMEOUT_S:g} s to decode") from None
    except ValueError:
        raise ManifestError("it ends the process that decodes it") from None
    except OSError:  # no process can be started
        manifest.decode(ref, documents)
        return
    if error:
        raise ManifestError(error["message"], hint=error["hint"])
