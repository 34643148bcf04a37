"""The trainer's side of vLLM's weight transfer backend `mx`: weights are served where they are."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch.distributed.fsdp import FSDPModule
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

import mx
from mx import config, runtime
from mx.api.common import client_of
from mx.core.pull_status import PullPhase
from mx.errors import ConfigError, LocalError, MxError

#: How often the coordinator is asked which replicas have received a revision.
_ASK_AGAIN_S = 0.02
#: A replica that has not begun to receive a revision so long after it was listed is not waited for.
_BEGIN_S = 2.0

Receivers = dict[tuple[str, int], PullPhase]  # by host and process


@dataclass
class MxTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What a trainer's rank says once. All ranks give the same, but for `rank`.

    Attributes:
        model: The NAME to serve the weights as.
        coordinator: HOST:PORT, also for the replicas; None takes the settings of each.
        wait_s: How long replicas wait for a revision, and this for them to have received it.
        ahead: Whether replicas receive a revision while they generate.
        relay: Whether replicas read from each other, too.
        files: A folder whose configuration and tokenizer files travel with the weights.
    """

    backend: ClassVar[str] = "mx"

    model: str = ""
    coordinator: str | None = None
    wait_s: float = 60.0
    ahead: bool = True
    relay: bool = False
    files: str | None = None


class MxTrainerWeightTransferEngine(
    TrainerWeightTransferEngine[MxTrainerInitInfo]  # type: ignore[misc]
):
    """Serves a trainer's weights, and has vLLM's replicas install each version.

    A module's parameters are lent where they are, sharded as FSDP2 has them: no rank gathers them.
    They are listed in `send_weights` alone, so that an optimizer's step is never seen half-way.
    Other sources are iterated, and the first rank serves a copy.
    """

    init_info_cls = MxTrainerInitInfo

    def __init__(
        self, init_info: MxTrainerInitInfo, *, client: Any, source: Any, settings: config.Settings
    ) -> None:
        """Use `trainer_init`."""
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info, self._settings = init_info, settings
        self._served: mx.Source | None = None
        self._is_lent = False
        #: What is left to list the weights, where they are lent.
        self._change: AbstractContextManager[None] | None = None
        self._receivers: set[tuple[str, int]] = set()
        #: The revision that was sent last, "" before.
        self.revision = ""
        #: How long replicas could not generate at most, for the last revision, in milliseconds.
        self.pause_ms = 0.0

    @classmethod
    def trainer_init(cls, init_info: MxTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Serve the weights, and tell the replicas their name. Called on every rank.

        Args:
            init_info: The name, and this rank.
            client: vLLM's client of the replicas, which the first rank uses.
            source: vLLM's `WeightSource`; of a `ModuleSource` nothing is gathered or copied.

        Raises:
            ConfigError: There is no name, or no source.
            MxError: As `mx.serve`.
        """
        if not init_info.model or source is None:
            hint = "give `source`" if source is None else "give `model`"
            raise ConfigError("the backend mx serves a source by a name", hint=hint)
        made = cls(init_info, client=client, source=source, settings=config.load())
        try:
            made._together(made._serve)
            made._together(made._introduce if made.is_sender else lambda: None)
            made._withdraw()
        except BaseException:
            made.shutdown()
            raise
        return made

    def send_weights(self) -> None:
        """List the weights as the next revision, and have all replicas install it. Called on every
        rank, and returns on all once the replicas have it, which is when weights may change again.

        Raises:
            MxError: As `mx.Source.changing`, or another rank has failed.
            Exception: What the client raises.
        """
        try:
            self._together(self._list)
            self._together(self._send if self.is_sender else lambda: None)
        finally:
            self._withdraw()

    def shutdown(self) -> None:
        """Serve nothing any more."""
        change, self._change = self._change, None
        served, self._served = self._served, None
        if served is not None:
            served.close()
        del change  # of a source that is closed

    # -- what is served

    def _in_place(self) -> dict[str, torch.Tensor] | None:
        """Return the parameters that are lent where they are; None where they are copied."""
        if type(self.source) is not ModuleSource:
            return None
        module = self.source._module
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # else those of the root may be gathered copies
        return dict(module.named_parameters())

    def _serve(self) -> None:
        info, tensors = self._info, self._in_place()
        self._is_lent = tensors is not None
        more: dict[str, Any] = {
            "model": info.model,
            "coordinator": info.coordinator,
            "files": info.files,
            "update": True,
        }
        if tensors is None:
            copied = self._copied()
            if self.is_sender:
                self._served = mx.serve(copied, **more)
        elif self.is_sender or any(hasattr(each, "full_tensor") for each in tensors.values()):
            self._served = mx.serve(tensors, copy=False, **more)

    def _copied(self) -> dict[str, torch.Tensor]:
        """Return what the source yields, which all ranks ask for together."""
        assert self.source is not None
        found: dict[str, torch.Tensor] = {}
        error: Exception | None = None
        for name, tensor in self.source:  # to its end, as the other ranks do
            try:
                if self.is_sender and error is None:
                    found[name] = tensor.detach().cpu().clone()
            except Exception as caught:  # noqa: BLE001 - raised below
                error = caught
        if error is not None:
            raise error
        return found

    def _list(self) -> None:
        """List the weights as they are now."""
        change, self._change = self._change, None
        if change is not None:
            change.__exit__(None, None, None)
        elif not self._is_lent:
            copied = self._copied()
            if self._served is not None:
                self._served.update(copied)

    def _withdraw(self) -> None:
        """Let the optimizer change what is lent."""
        if self._served is not None and self._change is None and self._is_lent:
            change = self._served.changing()
            change.__enter__()
            self._change = change

    # -- replicas

    def _introduce(self) -> None:
        """Tell the replicas the name."""
        info = self._info
        names = ("model", "coordinator", "wait_s", "ahead", "relay")
        self.client.init_weight_transfer_engine({name: getattr(info, name) for name in names})

    def _send(self) -> None:
        assert self._served is not None
        revision = self._served.model.revision
        if self._info.ahead:
            self._wait_for_receivers(revision)
        began_s = time.monotonic()
        try:
            self.client.start_weight_update()
            with self._noting(revision):
                self.client.update_weights({"revision": revision})
        except BaseException:
            with contextlib.suppress(Exception):  # those that wait for it take the next update
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(weight_version=revision)
        self.pause_ms = (time.monotonic() - began_s) * 1e3
        self.revision = revision

    def _wait_for_receivers(self, revision: str) -> None:
        """Wait until the replicas that took the last revision have received this one, which they do
        while they generate."""
        began_s = time.monotonic()
        while waiting := set(self._receivers):
            found = runtime.run(lambda: self._asked(revision))
            for key in self._receivers:
                phase, passed_s = found.get(key), time.monotonic() - began_s
                if phase is None:
                    ended = passed_s > _BEGIN_S
                else:
                    ended = phase is not PullPhase.RUNNING or passed_s > self._info.wait_s
                if ended:
                    waiting.discard(key)
            if not waiting:
                return
            time.sleep(_ASK_AGAIN_S)

    @contextlib.contextmanager
    def _noting(self, revision: str) -> Iterator[None]:
        """Note which replicas receive a revision, until the block ends."""
        found: set[tuple[str, int]] = set()
        ended = threading.Event()

        async def look() -> None:
            while True:
                last = ended.is_set()
                found.update(await self._asked(revision))
                if last:
                    return
                await asyncio.sleep(_ASK_AGAIN_S)

        looking: Future[None] = runtime.submit(look)
        try:
            yield
        finally:
            ended.set()
            looking.result()
            self._receivers = found

    async def _asked(self, revision: str) -> Receivers:
        """Return who receives a revision; none where the coordinator does not say: it only helps
        to know."""
        try:
            async with client_of(self._settings, self._info.coordinator) as client:
                overview = await client.overview(self._info.model)
        except MxError:
            return {}
        return {
            (each.host, each.pid): each.phase
            for each in overview.pulls
            if each.model.revision == revision
        }

    def _together(self, work: Callable[[], None]) -> None:
        """Do something on each rank, wait for all of them, and raise on each if one has failed."""
        import torch.distributed as dist

        error: Exception | None = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - other ranks are told
            error = caught
        if dist.is_initialized() and dist.get_world_size() > 1:
            said = None if error is None else f"{type(error).__name__}: {error}"
            texts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(texts, said)
            if error is None and (others := [each for each in texts if each is not None]):
                raise LocalError(f"another rank has failed ({others[0]})")
        if error is not None:
            raise error
