"""Compile caches that an engine takes from peers before it compiles, and whether it used them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mx import artifacts, config
from mx.errors import MxError
from mx.log import event

#: What engines made of the caches that were shipped; "none" where there were none that fit.
STATES = ("used", "partly", "unused", "none")

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def compile_counts() -> dict[str, int]:
    """Return how often engines of this process used compile caches, by the words of `STATES`."""
    with _lock:
        return {state: _counts[state] for state in STATES}


class CompileCaches:
    """The compile caches of one engine, from before it compiles until it is closed.

    Whatever fails, the engine compiles as always.
    """

    def __init__(
        self,
        engine: str,
        log: logging.Logger,
        model: str,
        settings: config.Settings,
        fields: Mapping[str, str],
    ) -> None:
        """Take the set that fits, and have the engine use it. Never raises.

        Args:
            engine: What messages call the engine.
            log: The engine's logger.
            model: The model's name.
            settings: Settings of mx; `trust` is the trust file.
            fields: What the engine knows of the environment.
        """
        #: One of `STATES` once that is known, else "".
        self.state = ""
        #: One line about it.
        self.text = ""
        self._engine, self._log, self._model = engine, log, model
        self._held = contextlib.ExitStack()
        self._used: artifacts.Used | None = None
        if not settings.trust:
            self._tell("none", "no trust file is named: give `trust`")
            return
        try:
            used = artifacts.use(model, trust=settings.trust, fields=fields, settings=settings)
            self._used = self._held.enter_context(used)
        except Exception as error:  # noqa: BLE001 - the engine must start
            self._tell("none", _line(error))
            return
        if self._used.obtained.folder is None:
            self._tell("none", "; ".join(self._used.obtained.reasons))

    @property
    def options(self) -> dict[str, Any] | None:
        """Options of `torch.compile` by which Inductor finds them on any thread; None if there are
        none: its own default is faster where it does compile."""
        found = self._used is not None and self._used.obtained.folder is not None
        return {"cpp_cache_precompile_headers": False} if found else None

    def compiled(self) -> None:
        """Log whether the caches were used, once the engine has compiled. Never raises."""
        if self.state or self._used is None:
            return
        try:
            usage = self._used.report()
        except Exception as error:  # noqa: BLE001 - the engine must start
            self._tell("unused", _line(error))
        else:
            if usage is not None:
                self._tell(usage.state, usage.text)

    def _tell(self, state: str, text: str) -> None:
        self.state, self.text = state, text
        with _lock:
            _counts[state] += 1
        fields: dict[str, object] = {}
        if self._used is not None and (set_id := self._used.obtained.set_id):
            fields = {"set": set_id, "signer": self._used.obtained.signer}
        rest = "" if state == "used" else f"; {self._engine} compiles as always"
        event(
            self._log,
            "engine.compile_caches",
            level=logging.INFO if state == "used" else logging.WARNING,
            model=self._model,
            state=state,
            **fields,
            text=text + rest,
        )

    def close(self) -> None:
        """Restore the engine's own caches. Idempotent."""
        with contextlib.suppress(Exception):
            self._held.close()


def _line(error: Exception) -> str:
    return error.message if isinstance(error, MxError) else f"{type(error).__name__}: {error}"
