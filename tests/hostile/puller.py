"""A pull in a process of its own: `python -m tests.hostile.puller ARGUMENTS`.

ARGUMENTS is a JSON object: "model", and arguments of `mx.pull` by name. It hashes the tensors of
each layer when the layer is said to be ready, and prints the report, or the error, with the hashes
as "delivered". Those of them that are not in "right" would be wrong bytes: then it ends with 1.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from mx import api
from mx.core.types import Layout
from mx.errors import EXIT_OK, EXIT_OTHER, MxError
from mx.transport import Span, contiguous, host_view


def hashes(layout: Layout, arena: Span, layer: int) -> dict[str, str]:
    """Return the sha256 of the layer's tensors, which are read where torch would see them: to
    import it takes longer than all else here."""
    place = layout.layers[layer]
    begin = place.first_tensor
    found = {}
    for tensor in layout.tensors[begin : begin + len(place.extents)]:
        assert not tensor.stride
        offset = place.arena_offset + tensor.offset
        data = host_view(arena)[offset : offset + tensor.nbytes]
        found[tensor.name] = hashlib.sha256(data).hexdigest()
    return found


def run(model: str, right: dict[str, str], **options: Any) -> int:
    delivered: dict[str, str] = {}
    code = EXIT_OK
    with api.pull(model, **options) as pull:
        try:
            for layer in pull.layers():
                layout, view = pull._job.edition.view()
                delivered |= hashes(layout, contiguous(view), layer.index)
            found = pull.wait().to_json()
        except MxError as error:
            code = error.exit_code
            found = {"error": {"message": error.message, "exit_code": code}}
    print(json.dumps(found | {"delivered": delivered}), flush=True)
    return code if delivered.items() <= right.items() else EXIT_OTHER


if __name__ == "__main__":
    sys.exit(run(**json.loads(sys.argv[1])))
