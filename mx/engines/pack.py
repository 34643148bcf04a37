"""What the engines pack adds to mx: adapters of one engine each."""

from __future__ import annotations

from mx.packs import Pack

PACK = Pack(modules={"engines": "mx.engines"})
