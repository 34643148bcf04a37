"""A process group of torch's as a broadcast uses it: all ranks in step, errors typed and shared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from mx.errors import (
    ConfigError,
    CoordinatorError,
    IntegrityError,
    LocalError,
    MxError,
    PeerLostError,
    PeerProtocolError,
    PeerTimeoutError,
    SourceError,
)
from mx.memory.extras import torch_missing
from mx.text import listed, plain

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as error:
    raise torch_missing(error) from None

#: The error that all ranks raise is of the first of these families that the first error of any
#: rank belongs to. Their order is part of the protocol.
_FAMILIES = (LocalError, ConfigError, IntegrityError, CoordinatorError, SourceError)
#: What the numbers that ranks tell each other begin with: they are a broadcast's.
_MAGIC = 0x6D78_6263_6173_7431
#: What one rank tells the others of its error, in bytes.
_MOST_TEXT_BYTES = 64 << 10
#: How often a wait looks whether it is over, in case nothing tells it.
_LOOK_S = 1.0


@contextlib.contextmanager
def broken() -> Iterator[None]:
    """Translate torch's errors of a group that does not work any more."""
    try:
        yield
    except RuntimeError as error:  # all back-ends raise it
        text = plain(str(error))[:300]
        late = "timed out" in text.lower() or "timeout" in text.lower()
        kind, what = (PeerTimeoutError, "did not answer") if late else (PeerLostError, "was lost")
        raise kind(
            f"the process group broke, as a rank {what}: {text}",
            hint="no rank can use this group any more: make a new one",
        ) from error


def settle(device: torch.device) -> None:
    """Wait until what torch has queued on a GPU is done: others than torch read the memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class CollectiveStep:
    """A collective that is under way. `wait` returns once it has ended, `then` says so."""

    def __init__(self, work: Any, device: torch.device) -> None:
        self._work, self._device = work, device
        self._ended = threading.Event()
        self.then(lambda: None)

    def then(self, tell: Callable[[], None]) -> None:
        """Have `tell` called at the end, or now: on any thread."""

        def over(_: object) -> None:
            # A callback that is added after the end is called at once, maybe before those that
            # were added earlier: each says itself that the step has ended.
            self._ended.set()
            tell()

        self._work.get_future().add_done_callback(over)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has ended. torch's own wait lets no signal in.

        Raises:
            PeerLostError, PeerTimeoutError: It failed.
        """
        while not self._ended.wait(_LOOK_S) and not self._work.is_completed():
            pass
        with broken():
            self._work.wait()
        settle(self._device)


class ProcessGroup:
    """The group, and this process's place in it. Ranks are those of the default group.

    All ranks call the same methods in the same order. Whatever a rank finds wrong in between it
    tells the others in `agree`, and goes on until then.
    """

    def __init__(self, group: Any, src: int) -> None:
        """
        Raises:
            ConfigError: There is no such group, or this process is not in it. Others of the group
                do not wait for this one, or do so in vain, since it can't reach them.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "this process is in no process group",
                hint="call torch.distributed.init_process_group first",
            )
        self._group = group = dist.group.WORLD if group is None else group
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the group",
                hint="call this in the group's own processes only",
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"`group` is a {type(group).__name__}",
                hint="give a process group of torch.distributed, or None for the default one",
            )
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank: int = dist.get_rank()
        self._steps: list[CollectiveStep] = []  # that may still be under way
        self.src = src
        kinds = {each.partition(":")[0] for each in dist.get_backend_config(group).split(",")}
        #: What its back-ends move: "cpu", "cuda", or both.
        self.kinds = kinds & {"cpu", "cuda"} or {"cpu"}
        self._control = self.device("cpu" if "cpu" in self.kinds else "cuda")

    def device(self, kind: str) -> torch.device:
        """Return this process's device of a kind."""
        return torch.device("cpu" if kind == "cpu" else f"cuda:{torch.cuda.current_device()}")

    def start(self, tensor: torch.Tensor) -> CollectiveStep:
        """Begin to broadcast a tensor of bytes from `src`, whose memory is used until the step has
        ended. Raises PeerLostError, PeerTimeoutError."""
        with broken():
            work = dist.broadcast(tensor, src=self.src, group=self._group, async_op=True)
        step = CollectiveStep(work, tensor.device)
        self._steps = [each for each in self._steps if not each.ended] + [step]
        return step

    def drain(self) -> None:
        """Wait until all steps have ended, well or badly: within the group's timeout."""
        for step in self._steps:
            with contextlib.suppress(MxError):
                step.wait()

    def after_all(self, tell: Callable[[], None]) -> None:
        """Have `tell` called once all steps have ended: now, or on another thread."""
        running = next((step for step in self._steps if not step.ended), None)
        if running is None:
            tell()
        else:
            running.then(lambda: self.after_all(tell))

    def broadcast(self, data: bytes | None, nbytes: int) -> bytes:
        """Return the bytes that `src` gives, `nbytes` long. Raises PeerLostError,
        PeerTimeoutError."""
        box = torch.empty(nbytes, dtype=torch.uint8)
        if data is not None:
            box.numpy()[:] = memoryview(data)
        there = box.to(self._control)
        self.start(there).wait()
        return there.cpu().numpy().tobytes()

    def agree(
        self, error: Exception | None, what: str, facts: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return once all ranks are here, if none of them has an error.

        Args:
            error: This rank's error, if it has one.
            what: What the error that all ranks raise begins with.
            facts: Numbers to tell the others.

        Returns:
            The facts of every rank, in the order of `ranks`.

        Raises:
            MxError: A rank has an error. All raise the same one, which names each such rank.
            PeerLostError, PeerTimeoutError: The group broke.
            PeerProtocolError: A rank is not in this call.
        """
        text, family = b"", 0
        if error is not None:
            said = str(error) if isinstance(error, MxError) else f"{type(error).__name__}: {error}"
            text = said.encode(errors="replace")[:_MOST_TEXT_BYTES]
            which = (n for n, kind in enumerate(_FAMILIES, 1) if isinstance(error, kind))
            family = next(which, 1)
        mine = torch.tensor([_MAGIC, family, len(text), *facts], dtype=torch.int64)
        found = [each.tolist() for each in self._gathered(mine)]
        strange = [
            f"rank {r}" for r, each in zip(self.ranks, found, strict=True) if each[0] != _MAGIC
        ]
        if strange:
            raise PeerProtocolError(
                f"{listed(strange)}: in another collective than this one, which is a broadcast's",
                hint="ranks use a group in the same order; no rank can use this one any more",
            ) from error
        found = [each[1:] for each in found]
        if any(each[0] for each in found):
            self._refuse(found, text, what, error)
        return [each[2:] for each in found]

    def _refuse(
        self, found: list[list[int]], text: bytes, what: str, error: Exception | None
    ) -> NoReturn:
        longest = max(1, min(_MOST_TEXT_BYTES, max(each[1] for each in found)))
        box = torch.zeros(longest, dtype=torch.uint8)
        box.numpy()[: len(text)] = memoryview(text)
        told = [bytes(each.numpy()) for each in self._gathered(box)]
        said = [
            f"rank {rank}: {plain(every[:nbytes].decode(errors='replace'))}"
            for rank, every, (family, nbytes, *_) in zip(self.ranks, told, found, strict=True)
            if family
        ]
        first = next(each[0] for each in found if each[0])
        kind = _FAMILIES[first - 1] if 0 < first <= len(_FAMILIES) else LocalError
        raise kind(f"{what}: {'; '.join(said)}") from error

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._control)
        every = [torch.empty_like(mine) for _ in self.ranks]
        with broken():
            work = dist.all_gather(every, mine, group=self._group, async_op=True)
        CollectiveStep(work, self._control).wait()
        return [each.cpu() for each in every]
