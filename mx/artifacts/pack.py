"""What the artefacts pack adds to mx: compile caches and CUDA graphs that travel with weights."""

from __future__ import annotations

from mx.packs import ASKING, LOGGING, Pack

PACK = Pack(
    modules={"artifacts": "mx.artifacts", "graphs": "mx.graphs"},
    verbs={"artifacts": "mx.artifacts.verbs:app"},
    additions={"serve": "mx.artifacts.verbs:SERVED", "pull": "mx.artifacts.verbs:PULLED"},
    takes={
        "artifacts_list": ASKING,
        "artifacts_pull": (*ASKING, "trust", *LOGGING),
        "artifacts_check": ("trust",),
    },
)
