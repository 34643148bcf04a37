"""What one rank of an engine has loaded and lends, as its user sees it."""

from __future__ import annotations

import threading
from collections import Counter

from mx.engines.compiling import CompileCaches
from mx.engines.replica.lender import Lender


class RankLoading:
    """What one rank of an engine has loaded and lends, for as long as the engine runs."""

    def __init__(self, name: str, wake: str = "") -> None:
        #: The loader's option.
        self.name, self.wake = name, wake
        self.lender: Lender | None = None
        self.refused = 0
        #: How often it loaded from which state, or by the engine's ordinary loader.
        self.loads: Counter[str] = Counter()
        #: The identity of what was taken from peers, in hexadecimal; "" if nothing was.
        self.identity = ""
        #: Who served what was taken from peers: "tcp from HOST:PORT, ...".
        self.source = ""
        #: Whether the engine's updates are to keep linear weights as they are; see vLLM's loader.
        self.plain = False
        #: The compile caches from peers, if they were asked for.
        self.caches: CompileCaches | None = None
        #: Waits for the process that hashes the folder, if there is one.
        self.hashing: threading.Thread | None = None

    def status(self) -> dict[str, object]:
        """Return what `mx.engines.vllm.status` says that it returns."""
        lender = self.lender
        source = None if lender is None else lender.source
        return {
            "model": self.name,
            "variant": "" if lender is None else str(lender.key),
            "loads": dict(self.loads),
            "refused": self.refused,
            "lending": "off" if lender is None else lender.state,
            "revision": "" if source is None else source.model.revision,
            "identity": "" if source is None else source.identity_hex,
            "source": self.source,
            "why": "" if lender is None else lender.why,
            "compile_caches": "off" if self.caches is None else self.caches.state,
        }
