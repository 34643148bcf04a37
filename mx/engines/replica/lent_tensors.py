"""An engine's tensors as mx serves them: where they are, or copies of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import mx
from mx.api.holding import lend
from mx.core.types import ModelKey
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import LiveTensors, ParameterSlot, common_device, plain
from mx.errors import BindingError


class LentTensors:
    """The tensors of one model, of which mx serves those that are all on the host, or all on one
    GPU, where they are."""

    def __init__(
        self,
        slots: Mapping[str, ParameterSlot],
        key: ModelKey,
        options: LoaderOptions,
        files: Path | None,
        cancelled: Callable[[], bool],
    ) -> None:
        """
        Args:
            slots: Where the model has its tensors.
            key: What they are lent as.
            options: The coordinator, and the bounds of what is served.
            files: A folder with the model's configuration and tokenizer, to travel along.
            cancelled: Returns True once nothing is to be hashed any more.
        """
        self.slots, self.live = slots, LiveTensors(slots)
        self._key, self._options, self._files, self._cancelled = key, options, files, cancelled
        self._served: Mapping[str, torch.Tensor] = self.live
        self._copies = False  # whether mx copies what is served

    @property
    def settings(self) -> mx.config.Settings:
        """Those of the loader."""
        return self._options.settings

    @property
    def on_gpu(self) -> bool:
        """True if all are on one GPU."""
        return common_device(self.live).startswith("cuda")

    def copy(self, to: str) -> None:
        """Serve the tensors as they are now, whatever becomes of them.

        Args:
            to: "device" for copies on theirs, else copies on the host, which mx makes of those
                that are there.
        """
        self._copies = to != "device"
        self._served = _copied(self.live, torch.Tensor.cpu if self._copies else torch.Tensor.clone)

    def gather(self) -> None:
        """Have copies on the host of tensors that are on devices, if not all are in one place."""
        if not common_device(self.live):
            self._served = _copied(self.live, torch.Tensor.cpu)

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew the copies that `gather` has made."""
        if self._served is not self.live:
            for name, tensor in self.live.items():
                there = self._served[name]
                if there.data_ptr() != tensor.data_ptr():
                    there.copy_(tensor)

    def take(self, model: str, variant: str) -> None:
        """Fill the tensors from a peer, where they are.

        Args:
            model: NAME@IDENTITY.
            variant: Its variant; another one that has the same weights will do: a key says of what
                checkpoint they are made, if that is known.

        Raises:
            MxError: As `mx.pull`; some may be filled.
        """
        settings = self._options.settings
        listed = mx.list_sources(model, settings=settings)
        with mx.pull(
            model,
            variant=next((each.record.model.variant for each in listed), variant),
            into=self.live,
            transport=self._options.transport or None,
            settings=settings,
        ) as pull:
            pull.wait()
            pull.release()

    def identity(self) -> bytes:
        """Return the identity of the tensors as they are now."""
        held = lend(self.live, self._key, cancelled=self._cancelled)
        held.release()
        return held.manifest.ref.identity

    def serve(self) -> mx.Source:
        """Hash and serve the tensors, without the files if another source has brought others.

        Raises:
            MxError: As `mx.serve`.
        """
        try:
            source = self._serve(self._files)
        except BindingError:
            if self._files is None:
                raise
            source = self._serve(None)
        if self._copies:
            self.drop()
        return source

    def drop(self) -> None:
        """Refer to no copies any more."""
        self._served = {}

    def _serve(self, files: Path | None) -> mx.Source:
        return mx.serve(
            self._served,
            model=self._key.name,
            revision=self._key.revision,
            variant=self._key.variant,
            embed=False,
            copy=self._copies,
            files=files,
            wait_s=0,  # the engine starts without a coordinator
            settings=self._options.settings,
            cancelled=self._cancelled,
        )


def _copied(
    tensors: Mapping[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors, with copies of those on devices; tied tensors have one copy."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if tensor.device.type != "cpu":
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if place not in copies:
                copies[place] = copy(plain(tensor))
            found[name] = copies[place]
    return found
