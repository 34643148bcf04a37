"""Decodes one manifest. Run as a program, by its path.

A large manifest of a stranger may take seconds to be refused, in which no other thread of its
process gets on: here that costs a process, which can be killed. It reads a line of JSON with the
manifest's digests and sizes and its parent's import path, and then the documents; it prints a JSON
object: the `message` and `hint` of the error, or nothing in it.
"""

from __future__ import annotations

import json
import os
import resource
import sys

_MOST_BYTES = 4 << 30


def main() -> dict[str, str]:
    """Return the text to print."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    head = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = head["path"]
    from mx.core import manifest
    from mx.core.types import ManifestRef
    from mx.errors import ManifestError

    digests = [bytes.fromhex(digest) for digest in head["digests"]]
    sizes = (head["sizes"][0], head["sizes"][1], head["sizes"][2])
    ref = ManifestRef(digests[0], digests[1], digests[2], sizes, head["layout_version"])
    documents = {digest: sys.stdin.buffer.read(nbytes) for digest, nbytes in ref.documents}
    try:
        manifest.decode(ref, documents)
    except ManifestError as error:
        return {"message": error.message, "hint": error.hint}
    except MemoryError:
        return {"message": "it takes too much memory", "hint": ""}
    return {}


if __name__ == "__main__":
    print(json.dumps(main()))
