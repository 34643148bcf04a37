"""vLLM's weight transfer backend `mx`: workers that take a trainer's weights as mx serves them.

A worker receives a revision into host memory, while it generates, and installs it in one go between
two steps. Nothing is written to its parameters before all of its engine's ranks have all they need.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import mx
from mx.core.revisions import is_main, main_revision, update_number
from mx.engines.replica.ahead import AheadPull
from mx.engines.vllm.installing import Installation
from mx.engines.vllm.tracing import UntraceableError
from mx.engines.vllm.worker import STATUS_METHOD, status
from mx.errors import ConfigError, LocalError, NoSourceError
from mx.log import Event, event
from mx.memory.tensors import TORCH_DTYPES

log = logging.getLogger(__name__)


@dataclass
class MxInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker is told once.

    Attributes:
        model: The NAME that the trainer serves.
        coordinator: HOST:PORT; None takes the worker's settings.
        wait_s: How long an update waits for its revision.
        ahead: Whether the next revision is received as soon as it is listed, while the engine
            generates. It takes host memory for what this worker needs of the weights.
        relay: Whether other replicas may read here what was received, until the next revision is
            there. It keeps the whole model in host memory.
    """

    model: str = ""
    coordinator: str | None = None
    wait_s: float = 60.0
    ahead: bool = True
    relay: bool = False


@dataclass
class MxUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a worker is told for each update: the revision to install, such as "main.2"."""

    revision: str = ""


Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class _Receiving:
    """A pull of one revision, of what an installation wants of it, once it is listed."""

    def __init__(self, info: MxInitInfo, revision: str, installation: Installation | None) -> None:
        self.revision, self.installation = revision, installation
        part: dict[str, Any] = {}
        if installation is not None and installation.is_sliced and not info.relay:
            wanted = installation.wanted
            part["only"] = list(wanted)
            part["slices"] = {name: each for name, each in wanted.items() if each is not None}
        self.is_part = bool(part)
        self._ahead = AheadPull(
            info.model,
            revision,
            coordinator=info.coordinator,
            wait_s=info.wait_s,
            hold=info.relay,
            **part,
        )

    def pull(self, wait_s: float) -> mx.Pull:
        """Return the pull, which is waited for.

        Raises:
            NoSourceError: The revision is not listed after `wait_s`.
            MxError: The coordinator does not answer.
        """
        try:
            return self._ahead.pull(wait_s)
        except TimeoutError:
            raise NoSourceError(
                f"no source has {self.revision} (waited {wait_s:g} s)",
                hint="list the revision before the update",
            ) from None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without weights."""
        try:
            self._ahead.pull(0).wait(0)
        except TimeoutError:
            return False
        except Exception:  # noqa: BLE001 - another one is made, which says why
            return True
        return False

    def fits(self, installation: Installation | None) -> bool:
        """Return True if it brings what an installation wants."""
        return not self.is_part or self.installation is installation

    def close(self) -> None:
        """End the wait, or the pull."""
        self._ahead.close()


class MxWeightTransferEngine(
    WeightTransferEngine[MxInitInfo, MxUpdateInfo]  # type: ignore[misc]
):
    """The worker's side. vLLM calls it on the worker's thread, between steps."""

    init_info_cls = MxInitInfo
    update_info_cls = MxUpdateInfo
    supports_draft_weight_update = False  # one name has one model's weights

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        """As vLLM's factory calls it."""
        super().__init__(config, vllm_config, device, model)
        self._info: MxInitInfo | None = None
        self._receiving: _Receiving | None = None
        self._relayed: _Receiving | None = None
        self._installation: Installation | None = None  # once a checkpoint's form is known
        #: Whether the update that is under way has written to parameters.
        self.has_written = False
        #: Why the parameters are of two versions, or "".
        self.torn = ""
        #: The last update, for `mx_peer_status`.
        self.updated: dict[str, object] = {}
        _guard(vllm_config)

    def init_transfer_engine(self, init_info: MxInitInfo) -> None:
        """Take the name of the trainer's weights. Nothing is asked for yet.

        Args:
            init_info: The name, and how to receive it.

        Raises:
            ConfigError: There is no name.
        """
        if not init_info.model:
            raise ConfigError("the backend mx needs the trainer's name", hint="give `model`")
        if getattr(self.parallel_config, "enable_eplb", False):
            raise ConfigError(
                "experts move between ranks (EPLB), and an update would go where they were",
                hint="leave out `enable_eplb`",
            )
        self.shutdown()
        self._info, self._installation = init_info, None

    def start_weight_update(self) -> None:
        """Do nothing: parameters stay as they are until all that is needed is here."""
        self.has_written = False

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has installed the update."""

    def receive_weights(self, update_info: MxUpdateInfo) -> None:
        """Wait until a revision is here, and install it.

        Args:
            update_info: The revision.

        Raises:
            ConfigError: The weights do not fit the model. Nothing was written.
            MxError: A rank of this engine could not receive them. Nothing was written.
            LocalError: The install failed. The worker computes nothing until an update succeeds.
        """
        began_s = time.monotonic()
        error: Exception | None = None
        try:
            installation, tensors = self._received(update_info.revision)
        except Exception as caught:  # noqa: BLE001 - other ranks are told
            error = caught
        _agree(error)
        waited_s = time.monotonic() - began_s
        self.has_written, error = True, None
        self.torn = f"an update to {update_info.revision} has failed half-way"
        try:
            with _uninterrupted():
                installation.write(tensors, self.model_config, self.device)
        except Exception as caught:  # noqa: BLE001 - other ranks are told
            error = caught
        _agree(error)
        self.torn = ""
        pause_s = time.monotonic() - began_s
        self._note(update_info.revision, installation, waited_s, pause_s)
        tensors.clear()
        self._look_ahead(installation)

    def shutdown(self) -> None:
        """End what is being received."""
        self._end_receiving()
        self._end_relay()

    # -- receiving

    def _end_receiving(self) -> None:
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.close()

    def _received(self, revision: str) -> tuple[Installation, dict[str, torch.Tensor]]:
        info = self._info
        if info is None:
            raise ConfigError("call init_weight_transfer_engine before an update")
        if not revision:
            raise ConfigError("an update has a revision", hint='give `revision`, such as "main.2"')
        installation = self._installation
        receiving = self._receiving
        if (
            receiving is None
            or receiving.revision != revision
            or not receiving.fits(installation)
            or receiving.has_failed
        ):
            self._end_receiving()
            receiving = _Receiving(info, revision, installation)
            self._receiving = receiving
        pull = receiving.pull(info.wait_s)
        forms = _forms(pull)
        if installation is None or installation.by_values or not installation.fits(forms):
            if receiving.is_part:  # the checkpoint has another form now
                self._installation = None
                return self._received(revision)
            installation = self._installation = self._found(forms, pull)
        pull.wait()
        self._end_relay()
        tensors = {n: each.contiguous() for n, each in pull.state_dict().items()}
        return installation, tensors

    def _found(self, forms: Forms, pull: mx.Pull) -> Installation:
        empty = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in forms.items()
        }
        try:
            return Installation(self.model, empty)
        except UntraceableError as error:
            event(log, "engine.untraceable", level=logging.WARNING, text=str(error))
            pull.wait()
            return Installation(self.model, pull.state_dict(), by_values=True)

    def _look_ahead(self, installation: Installation) -> None:
        """Begin to receive the next revision, which is waited for."""
        info, held = self._info, self._receiving
        assert info is not None and held is not None
        self._receiving = None
        if info.relay:
            self._relayed = held
        else:
            held.close()
        if info.ahead and is_main(held.revision):
            later = main_revision(max(update_number(held.revision), 1) + 1)
            self._receiving = _Receiving(info, later, installation)

    def _end_relay(self) -> None:
        relayed, self._relayed = self._relayed, None
        if relayed is not None:
            relayed.close()

    def _note(
        self, revision: str, installation: Installation, waited_s: float, pause_s: float
    ) -> None:
        assert self._info is not None
        self.updated = {
            "model": self._info.model,
            "revision": revision,
            "waited_ms": round(waited_s * 1e3, 1),
            "pause_ms": round(pause_s * 1e3, 1),
            "in_place": len(installation.written_in_place),
            "reloaded": len(installation.reloaded),
        }
        log.info(Event("engine.updated", self.updated))


def _forms(pull: mx.Pull) -> Forms:
    """Return the types and shapes of the checkpoint's tensors, once they are known."""
    layout = pull.wait_manifest().layout
    found = {each.name: (each.dtype, each.shape) for each in layout.tensors}
    found |= {each.name: (each.dtype, each.shape) for each in layout.aliases}
    return {name: (TORCH_DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in found.items()}


def _agree(error: Exception | None) -> None:
    """Raise on each rank of an engine if one has an error."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    said = None if error is None else f"{type(error).__name__}: {error}"
    for group in (get_tp_group(), get_pp_group()):  # other data-parallel engines go their own way
        if group.world_size > 1:
            texts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(texts, said, group=group.cpu_group)
            said = next((each for each in texts if each is not None), None)
    if error is not None:
        raise error
    if said is not None:
        raise LocalError(f"another rank of this engine has failed ({said})")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: pressed.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed and callable(before):
            before(*pressed[0])


def _guard(vllm_config: Any) -> None:
    """Have the worker compute nothing while its parameters are of two versions, and say what it
    has installed."""
    module, _, name = str(vllm_config.parallel_config.worker_cls).rpartition(".")
    worker = getattr(sys.modules.get(module), name, None)
    if worker is None or getattr(worker.execute_model, "has_mx_guard", False):
        return
    setattr(worker, STATUS_METHOD, status)
    original = worker.execute_model

    @functools.wraps(original)
    def execute_model(self: Any, *given: Any, **named: Any) -> Any:
        if torn := getattr(getattr(self, "weight_transfer_engine", None), "torn", ""):
            raise LocalError(torn, hint="update the weights again, or start another replica")
        return original(self, *given, **named)

    execute_model.has_mx_guard = True  # type: ignore[attr-defined]
    worker.execute_model = execute_model
