"""Each class of mx and its transports has a name of its own: one word, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.daemon import ROOT

#: The doubles that stay, and why.
ALLOWED = {
    "MxPeerLoader": "the name under which each engine knows mx's loader",
    "Region": "public in mx.graphs; the other one is the wire message's, and in kept states",
}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for folder in ("mx", "transports"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    doubles = {name: where for name, where in places.items() if len(where) > 1}
    assert not {name: where for name, where in doubles.items() if name not in ALLOWED}
    assert doubles.keys() == ALLOWED.keys()  # what is not a double any more is not allowed
