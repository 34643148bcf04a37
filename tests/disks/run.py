"""Pulls from random folders while disks and files misbehave: each draws a model, how it lies in its
folder, what goes wrong and when, and how it is pulled; then every byte is compared."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mx
from mx import api, config
from mx.core.packaging import DIGESTS
from mx.errors import MxError
from mx.snapshots.indexing import index_folder
from mx.storage.load import hash_opened
from mx.storage.safetensors import open_checkpoint
from tests.support.tensors import same

Tensors = dict[str, torch.Tensor]

MIB = 1 << 20
RANKS = 2
SETTINGS = {"cache_socket": "off", "stall_timeout_s": "60", "store_timeout_s": "60"}
_preadv = os.preadv


# -- what is pulled -------------------------------------------------------------------------------


def shapes(rng: random.Random) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the tensors of a model: of layers, of any size, some at odd places in their file."""
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (rng.choice(kinds), (rng.randint(1, 4096), 64))
    }
    for layer in range(rng.randint(1, 4)):
        rows = rng.choice([2, 64, 1024, 1500, 3000])
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.mlp.up_proj.weight"] = (rng.choice(kinds), (rows, rng.choice([64, 512])))
        found[f"{prefix}.norm.weight"] = (rng.choice(kinds), (rng.choice([1, 7, 4096]),))
        if rng.random() < 0.3:
            found[f"{prefix}.empty"] = (torch.float32, (0, 4))
    return found


def made(rng: random.Random, of: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> Tensors:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    found = {}
    for name, (dtype, shape) in of.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        found[name] = data.view(dtype).reshape(shape)
    return found


def write(rng: random.Random, folder: Path, tensors: Tensors) -> str:
    """Write a checkpoint in some way. Returns how."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    how = rng.choice(["one file", "one file", "shards", "pulled", "indexed", "linked", "frozen"])
    if how == "shards":
        names = rng.sample(sorted(tensors), len(tensors))
        half = len(names) // 2 or 1
        for number, part in enumerate((names[:half], names[half:]), 1):
            if part:
                save_file(
                    {name: tensors[name] for name in part},
                    folder / f"model-{number:05}-of-00002.safetensors",
                )
        return how
    if how in ("pulled", "frozen"):
        plain = folder.parent / f"{folder.name}-plain"
        plain.mkdir()
        shutil.move(folder / "config.json", plain / "config.json")
        save_file(tensors, plain / "model.safetensors")
        folder.rmdir()
        if how == "frozen":
            with api.serve(plain, model=folder.name, settings=settings()) as source:
                mx.freeze(source, folder, settings=settings())
            return how
        with api.pull("m", path=plain, out=folder, settings=settings()) as pull:
            pull.wait(60)
        assert (folder / DIGESTS).exists()
        return how
    file = folder / "model.safetensors"
    save_file(tensors, file)
    if how == "linked":
        blob = folder.parent / f"{folder.name}-blob"
        shutil.move(file, blob)
        file.symlink_to(blob)
    if how != "one file":
        index_folder(folder)
    return how


def settings(**more: str) -> config.Settings:
    return config.load({**SETTINGS, **more}, environ=dict(os.environ))


# -- what goes wrong ------------------------------------------------------------------------------


class Fault:
    """Something that happens to one of a folder's files at the moment of a read, or before."""

    def __init__(self, rng: random.Random, folder: Path, other: Tensors) -> None:
        self.folder, self.other = folder, other
        self._rng = rng
        self._lock = threading.Lock()
        self._reads = 0
        self.at = rng.choice([0, 1, 2, 3, 5, 8])
        files = sorted(folder.rglob("*.safetensors"))
        self.file = rng.choice(files)
        self._nbytes = self.file.stat().st_size
        self._position = rng.randrange(self._nbytes)
        self.name = rng.choice(list(FAULTS))
        self._happens = FAULTS[self.name]
        self.happened = False
        self.close: Callable[[], object] = lambda: None

    def before(self) -> None:
        """Let what is to happen before the pull happen."""
        if self.name in BEFORE:
            self.happened = True
            self._happens(self)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        """Read as `os.preadv`, unless it goes wrong."""
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
        if not path.startswith(str(self.folder)) or self.name in BEFORE or self.name == "none":
            return _preadv(fd, buffers, offset, flags)
        nbytes = sum(len(each) for each in buffers)
        with self._lock:
            number, self._reads = self._reads, self._reads + 1
            if self.name == "bad block":
                if offset <= self._position < offset + nbytes and path.startswith(str(self.file)):
                    self.happened = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            elif number == self.at:
                self.happened = True
                self._happens(self)
        return _preadv(fd, buffers, offset, flags)

    # The faults.

    def flip(self) -> None:
        times = self.file.stat()
        with self.file.open("r+b") as file:
            file.seek(-1 - self._position % max(1, self._nbytes // 2), os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x40]))
        os.utime(self.file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def truncate(self) -> None:
        os.truncate(self.file, self._position)

    def replace(self) -> None:
        new = self.folder / "new"
        held = set(load_file(self.file))
        save_file({name: each for name, each in self.other.items() if name in held}, new)
        new.replace(self.file)

    def overwrite(self) -> None:
        held = set(load_file(self.file))
        new = self.folder / "new"
        save_file({name: each for name, each in self.other.items() if name in held}, new)
        with self.file.open("r+b") as file:
            file.write(new.read_bytes())
        new.unlink()

    def unlink(self) -> None:
        self.file.unlink()

    def lie(self) -> None:
        """Digests that are not the weights'."""
        for kept in self.folder.rglob(DIGESTS):
            data = bytearray(kept.read_bytes())
            for _ in range(self._rng.randint(1, 3)):
                data[self._rng.randrange(len(data))] = self._rng.randrange(256)
            kept.write_bytes(data[: self._rng.choice([len(data), len(data) // 2])])

    def fail(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def slow(self) -> None:
        time.sleep(0.3)

    def end(self) -> None:
        threading.Thread(target=self.close).start()


FAULTS: dict[str, Callable[[Fault], None]] = {
    "none": lambda fault: None,
    "flipped before": Fault.flip,
    "truncated before": Fault.truncate,
    "replaced before": Fault.replace,
    "lying digests": Fault.lie,
    "truncated": Fault.truncate,
    "replaced": Fault.replace,
    "overwritten": Fault.overwrite,
    "unlinked": Fault.unlink,
    "one read fails": Fault.fail,
    "bad block": Fault.fail,
    "slow": Fault.slow,
    "closed": Fault.end,
}
BEFORE = ("flipped before", "truncated before", "replaced before", "lying digests")
#: What a pull may not fail by.
HARMLESS = ("none", "lying digests", "slow", "unlinked", "replaced")
#: What changes what a folder holds, in a way that a pull may see as the folder's own.
NEWER = ("flipped before", "replaced before", "replaced")


@contextlib.contextmanager
def faulty(fault: Fault) -> Iterator[None]:
    os.preadv = fault.preadv  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv = _preadv


# -- a round --------------------------------------------------------------------------------------


class Round:
    """One folder, one fault, one pull, of one or of two ranks."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        of = shapes(rng)
        self.right, self.other = made(rng, of), made(rng, of)
        self.folder = folder / "m"
        self.how = write(rng, self.folder, self.right)
        plain = self.folder if self.how != "frozen" else folder / "m-plain"
        ref = hash_opened(open_checkpoint(plain), threads=1).manifest.ref
        self.pin = rng.choice(["", ref.identity.hex(), ref.pin.hex()])
        self.second = folder / "second" if rng.random() < 0.4 else None
        if self.second is not None:
            shutil.copytree(plain, self.second)
            shutil.rmtree(self.second / "digests", ignore_errors=True)
        self.fault = Fault(rng, self.folder, self.other)
        self.ranks = RANKS if rng.random() < 0.3 else 1
        self.options = self._options(folder)
        self.outcomes: list[str] = []

    def __str__(self) -> str:
        options = ", ".join(sorted(self.options))
        return (
            f"{self.how}, {self.fault.name} at {self.fault.at}, pin {self.pin[:8] or '-'}, "
            f"{self.ranks} ranks, second {self.second is not None}, {options}"
        )

    def _options(self, folder: Path) -> dict[str, Any]:
        rng, options = self.rng, dict[str, Any]()
        if self.ranks > 1:
            return options
        drawn = rng.random()
        if drawn < 0.25:
            options["only"] = rng.sample(sorted(self.right), 1 + len(self.right) // 2)
        elif drawn < 0.45:
            options["into"] = {name: torch.empty_like(each) for name, each in self.right.items()}
        elif drawn < 0.65:
            options["out"] = folder / "out"
        if rng.random() < 0.2:
            options["verify"] = "strong"
        return options

    def _wanted(self, rank: int, of: Tensors) -> Tensors:
        found = {name: of[name] for name in self.options.get("only", of)}
        if self.ranks > 1:
            found = {
                n: t.chunk(RANKS)[rank].contiguous() if "up_proj" in n else t
                for n, t in found.items()
            }
        return found

    def play(self) -> None:
        """Raises AssertionError if it breaks a rule."""
        self.fault.before()
        with faulty(self.fault):
            threads = [threading.Thread(target=self._pull, args=(n,)) for n in range(self.ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), "a pull does not end"
        assert len(self.outcomes) == self.ranks
        for outcome in self.outcomes:
            assert not outcome.startswith("broken"), outcome

    def _pull(self, rank: int) -> None:
        try:
            self.outcomes.append(self._pulled(rank))
        except BaseException:  # noqa: BLE001 - reported
            self.outcomes.append(f"broken: {traceback.format_exc()}")

    def _pulled(self, rank: int) -> str:
        options, name = dict(self.options), f"m@{self.pin}" if self.pin else "m"
        if self.ranks > 1:
            options["slices"] = {"*up_proj*": mx.Shard(0, rank, RANKS)}
            options["local_ranks"] = mx.LocalRanks(rank, RANKS, str(self.folder), wait_s=30)
        more = {}
        if self.second is None:
            options["path"] = self.folder
            if self.how == "frozen":
                options["source"] = "snapshot"
        else:
            options |= {"source": "auto", "coordinator": "127.0.0.1:9"}
            more["object_url"] = f"file://{self.second}"
            if self.how == "frozen":
                more["snapshot_root"] = str(self.folder.parent)
            else:
                options["fallback"] = self.folder
        seen: list[Tensors] = []
        try:
            with api.pull(name, settings=settings(**more), **options) as pull:
                self.fault.close = pull.close
                if self.pin and "into" not in options:
                    pull.on_layer(lambda event: seen.append(_copies(event.tensors())))
                report = pull.wait(100)
                found = _copies(pull.state_dict())
        except MxError as error:
            self._may_fail(error)
            return type(error).__name__
        known = bool(self.pin) or self.how == "frozen"
        wanted = [self.right] if known else [self.right, self.other]
        versions = [self._wanted(rank, each) for each in wanted]
        assert self._is_allowed(found, versions, report), f"bytes of no version ({self})"
        for layer in seen:
            assert all(torch.equal(_bits(versions[0][n]), _bits(t)) for n, t in layer.items())
        if "out" in options:
            written: Tensors = {}
            for file in sorted(options["out"].glob("*.safetensors")):
                written |= load_file(file)
            assert same(written, found), "what was written is something else"
        return "whole" if not self.fault.happened else f"whole, {self.fault.name}"

    def _is_allowed(self, found: Tensors, versions: list[Tensors], report: api.PullReport) -> bool:
        if any(same(found, each) for each in versions):
            return True
        # Without a pin the folder says what the model is, as long as it is not changed meanwhile.
        defines = self.how != "frozen" and bool(report.defined_by)
        return not self.pin and self.fault.name in NEWER and defines

    def _may_fail(self, error: MxError) -> None:
        said = f"{type(error).__name__}: {error} ({self})"
        assert self.fault.happened or self.fault.name == "bad block", f"nothing happened: {said}"
        if self.fault.name == "closed":
            return
        assert self.fault.name not in HARMLESS or self.fault.name in ("replaced", "unlinked"), said
        # A pin says what to take from the next store, unless something was delivered before.
        assert self.second is None or not self.pin, f"the next store has it: {said}"


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def run(rounds: int, seed: int, folder: Path) -> int:
    """Play rounds from a seed on. Returns the exit code: 1 after the first that breaks a rule."""
    logging.getLogger("mx").setLevel(logging.CRITICAL)
    began_s, tally = time.monotonic(), Counter[str]()
    for number in range(seed, seed + rounds):
        here = folder / str(number)
        here.mkdir()
        try:
            played = Round(here, number)
            try:
                played.play()
            except BaseException:
                print(f"seed {number}: {played}", file=sys.stderr)
                raise
            tally.update([*played.outcomes, played.how, played.fault.name])
        except Exception:  # noqa: BLE001 - whatever it is, the round has failed
            traceback.print_exc()
            print(f"failed: repeat it with --seed {number} --rounds 1", file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(here, ignore_errors=True)
    done = ", ".join(f"{count} {what}" for what, count in sorted(tally.items()))
    took_s = time.monotonic() - began_s
    print(f"{rounds} rounds from seed {seed} in {took_s:.0f} s: all right ({done})")
    return 0
