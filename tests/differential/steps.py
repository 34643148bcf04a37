"""What a round does: steps in any order, each of which checks what it gets."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file

from mx import api
from mx.engines.replica.names import meant_by
from mx.errors import (
    BindingError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    IncompleteError,
    MxError,
    NoSourceError,
    RevisionChangedError,
    UnknownModelError,
)
from tests.differential.weights import Tensors, Version, print_of, write
from tests.differential.world import LIMIT_S, Name, World, expecting

#: How a pull may end when what it reads from changes, restarts or ends.
ENDS = (IncompleteError, NoSourceError, UnknownModelError, CoordinatorError)


class Interrupted(BaseException):
    """What the alarm's handler raises, as the user's Ctrl-C does."""


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """Raise Interrupted at some point of the block, or not at all."""

    def handler(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- what changes ---------------------------------------------------------------------------------


def update(world: World, name: Name) -> None:
    """The owner publishes new weights: they are what the name means when the call returns."""
    if name.lender is None:
        return
    grace_s = world.rng.choice([0.0, 0.0, 5.0])
    with expecting(world, f"update {name.name} ({name.lender.kind}, grace {grace_s})"):
        world.update(name, grace_s=grace_s)
        assert name.lender.source.withdrawn == "", name.lender.source.withdrawn


def interrupted_update(world: World, name: Name) -> None:
    """An update is interrupted: the old weights are served, the new ones, or none, with a reason;
    and the next update works."""
    lender = name.lender
    if lender is None:
        return
    after_s = world.rng.uniform(0.0, 0.03)
    done = False
    with (
        expecting(world, f"interrupted update {name.name} ({lender.kind})", Interrupted),
        interrupted(after_s),
    ):
        world.update(name, grace_s=0.0)
        done = True
    if done:
        return
    # Which weights are there now is not known; a failure to publish them is said.
    update(world, name)


def restart(world: World, name: Name) -> None:
    """The coordinator forgets all."""
    world.note("restart the coordinator")
    world.restart_coordinator()
    if world.rng.random() < 0.5:
        for each in world.names:
            world.settle(each)


def new_lender(world: World, name: Name) -> None:
    """The lender ends and another one comes with other weights: they are refused while the name is
    bound to the old ones, unless they come as an update, and published otherwise."""
    if not name.settled:
        return
    kind = world.rng.choice(["folder", "memory", "lent"])
    if name.lender is not None:
        world.note(f"{name.name}: the lender ends")
        world.changes += 1
        name.lender.source.close()
        name.lender = None
        if world.rng.random() < 0.5:
            bound = bool(name.held)
            with expecting(world, f"serve {name.name} anew ({kind})", BindingError):
                world.serve(name, kind, speed="")
                assert not bound, "other weights took the name"
            return
    with expecting(world, f"serve {name.name} anew as an update ({kind})"):
        world.serve(name, kind, speed="", update=True)


def replace_files(world: World, name: Name) -> None:
    """The files in the folder are replaced, and look as old as those before."""
    path = name.folder / "model.safetensors"
    if not path.exists():
        return
    world.note(f"the files in {name.folder} are replaced")
    before = path.stat()
    tensors, version = name.fresh()
    write(name.folder, tensors, version)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- what reads -----------------------------------------------------------------------------------


def pull(world: World, name: Name) -> None:
    """Pull with any options; while it runs, look, change, restart or stop; then compare."""
    rng, began = world.rng, name.truth.newest
    settled, changes = _is_settled(name), world.changes
    options = _options(world, name)
    simple = (bool, str, float)
    note = ", ".join(f"{k}={v}" if isinstance(v, simple) else k for k, v in options.items())
    with (
        expecting(world, f"pull {name.name}: {note}", ConfigError, *ENDS),
        _ending(lambda: settled and world.changes == changes),
    ):
        started = api.pull(
            name.name, coordinator=world.coordinator.address, settings=world.settings, **options
        )
        with contextlib.ExitStack() as opened:
            opened.enter_context(started)
            looked = _meanwhile(world, name, started, at=rng.choice([0, 0, 0, 1, 99]))
            report = started.wait(LIMIT_S)
            world.tally["whole"] += 1
            tensors = started.state_dict()
            version = _expected(name, tensors)
            if settled and world.changes == changes:  # else an older revision may have been served
                assert version.number >= began, (
                    f"version {version.number}, when {began} was published before"
                )
            _whole(started, version, tensors, options)
            for seen, bytes_then in looked:
                if "into" not in options:
                    assert print_of(seen) == bytes_then, "tensors that were looked at have changed"
            assert started.manifest is not None
            assert report.layers == len(started.manifest.layout.layers)
            if options.get("hold") and rng.random() < 0.7:
                source = started.hold()
                world.note(f"  held at {source.endpoint}")
                _from_replica(world, name, source, version)
                if rng.random() < 0.6 and "into" not in options:
                    name.held.append((started, source))
                    opened.pop_all()
            elif rng.random() < 0.3 and "into" not in options:
                # A reader's own business.
                for tensor in tensors.values():
                    tensor.view(-1)[0] += 1


def _is_settled(name: Name) -> bool:
    """Return True if a name is served, and means what was published last."""
    return name.settled and name.lender is not None and not name.lender.source.withdrawn


@contextlib.contextmanager
def _ending(must_not: Callable[[], bool]) -> Iterator[None]:
    """Refuse that a pull fails for which there is no reason."""
    try:
        yield
    except ENDS as error:
        assert not must_not(), f"nothing has changed, but the pull failed: {error}"
        raise


def _options(world: World, name: Name) -> dict[str, Any]:
    rng = world.rng
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options["follow"] = True
    if rng.random() < 0.4:
        options["hold"] = True
    if rng.random() < 0.7:
        options["transport"] = "tcp"
    if rng.random() < 0.3:
        options["attach"] = False
    if rng.random() < 0.2:
        options["verify"] = "strong"
    if rng.random() < 0.25:
        options["into"] = {
            key: torch.zeros(size, dtype=torch.int32) for key, size in name.sizes.items()
        }
    elif rng.random() < 0.2:
        options["out"] = name.folder.parent / "out"
        shutil.rmtree(options["out"], ignore_errors=True)
    if name.held and rng.random() < 0.5:
        options["reuse"] = rng.choice(name.held)[0]
    if rng.random() < 0.5:
        options["wait_s"] = 10.0
    return options


def _meanwhile(
    world: World, name: Name, started: api.Pull, *, at: int
) -> list[tuple[Tensors, Any]]:
    """Do something after so many layers. Returns the tensors that were looked at, with what they
    were."""
    looked: list[tuple[Tensors, Any]] = []
    for index, event in enumerate(_layers(world, started)):
        if world.rng.random() < 0.6:
            with expecting(world, f"  look at layer {event.index}", RevisionChangedError):
                seen = event.tensors()
                looked.append((seen, print_of(seen)))
        if world.rng.random() < 0.15:
            world.note("  ask for the files")
            with contextlib.suppress(MxError):
                started.files()
        if index == at:
            what = world.rng.choice([update, update, update, update, interrupted_update, restart])
            what(world, name)
    return looked


def _layers(world: World, started: api.Pull) -> Iterator[Any]:
    with expecting(world, "  layers", RevisionChangedError):
        yield from started.layers()


def _expected(name: Name, tensors: Tensors) -> Version:
    version = name.truth.versions.get(print_of(tensors))
    assert version is not None, f"{name.name}: these are the weights of no version:\n" + _mixture(
        name, tensors
    )
    return version


def _mixture(name: Name, tensors: Tensors) -> str:
    of: dict[tuple[str, str], int] = {
        each: version.number for key, version in name.truth.versions.items() for each in key
    }
    return "\n".join(f"  {each[0]}: {of.get(each, 'no version')}" for each in print_of(tensors))


def _whole(started: api.Pull, version: Version, tensors: Tensors, options: dict[str, Any]) -> None:
    """All that a pull shows is of one version."""
    if "into" in options:
        assert print_of(options["into"]) == print_of(tensors)
    else:
        assert started.manifest is not None
        buffer, layout = started.buffer(), started.manifest.layout
        for each in layout.tensors:
            begin = layout.layers[each.layer].arena_offset + each.offset
            there = bytes(buffer[begin : begin + each.nbytes])
            assert there == bytes(tensors[each.name].view(torch.uint8).numpy()), each.name
    if "out" in options:
        assert print_of(load_file(options["out"] / "model.safetensors")) == print_of(tensors)
    with contextlib.suppress(NoSourceError, ConfigError, ClosedError, IncompleteError):
        files = started.files()
        assert files == version.files, "the files of another version"


def _from_replica(world: World, name: Name, source: api.Source, version: Version) -> None:
    """What is held gives the same."""
    with (
        expecting(world, "  pull from it", *ENDS),
        api.pull(name.name, peer=source.endpoint, settings=world.settings) as other,
    ):
        other.wait(LIMIT_S)
        found = _expected(name, other.state_dict())
        assert found.number == version.number, f"the replica gives version {found.number}"


def interrupted_pull(world: World, name: Name) -> None:
    """A pull is interrupted anywhere."""
    after_s = world.rng.uniform(0.0, 0.05)
    hold = world.rng.random() < 0.5
    with (
        expecting(world, f"interrupted pull {name.name}", Interrupted, *ENDS),
        interrupted(after_s),
        api.pull(
            name.name, coordinator=world.coordinator.address, settings=world.settings, hold=hold
        ) as started,
    ):
        started.wait(LIMIT_S)
        if hold:
            started.hold()


def unclosed_pull(world: World, name: Name) -> None:
    """A pull that is complete is never closed; its tensors are what counts."""
    settled = _is_settled(name)
    with expecting(world, f"unclosed pull {name.name}", *ENDS), _ending(lambda: settled):
        tensors = api.load(
            name.name, coordinator=world.coordinator.address, settings=world.settings
        )
        _expected(name, tensors)


def let_go(world: World, name: Name) -> None:
    """A replica ends."""
    if name.held:
        started, source = name.held.pop(world.rng.randrange(len(name.held)))
        world.note(f"{name.name}: the replica at {source.endpoint} ends")
        world.changes += 1
        source.close()
        started.close()


def write_to_replica(world: World, name: Name) -> None:
    """A replica's process writes to its own tensors: no reader gets these bytes, and none that can
    read from the lender fails."""
    if name.held:
        started, source = world.rng.choice(name.held)
        tensors = started.state_dict()
        which = world.rng.choice(sorted(tensors))
        world.note(f"{name.name}: the replica at {source.endpoint} writes to {which}")
        tensors[which].view(-1)[world.rng.randrange(tensors[which].numel())] += 1
        pull(world, name)


def by_folder(world: World, name: Name) -> None:
    """Both folders have the same name: what is in one never comes under the other's."""
    with expecting(world, f"serve and pull by the folder {name.folder.name}", BindingError, *ENDS):
        if not (name.folder / "model.safetensors").exists():
            return
        on_disk = print_of(load_file(name.folder / "model.safetensors"))
        with (
            api.serve(
                name.folder, coordinator=world.coordinator.address, settings=world.settings
            ) as source,
            api.pull(
                source.model.name,
                coordinator=world.coordinator.address,
                settings=world.settings,
            ) as pulled,
        ):
            pulled.wait(LIMIT_S)
            assert print_of(pulled.state_dict()) == on_disk, "another folder's weights"


def as_an_engine(world: World, name: Name) -> None:
    """What an engine may take in place of a folder's weights is the same, whatever the folder is
    called, and whatever was there before."""
    path = name.folder / "model.safetensors"
    if not path.exists():
        return
    on_disk, meant = print_of(load_file(path)), meant_by(str(name.folder))
    world.note(f"an engine for {name.folder}: {meant.refused or meant.identity}")
    if meant.refused:
        return
    world.tally["engines that may take a peer's"] += 1
    with (
        expecting(world, "  pull it", *ENDS),
        api.pull(
            f"{meant.name}@{meant.identity}",
            coordinator=world.coordinator.address,
            settings=world.settings,
        ) as pulled,
    ):
        pulled.wait(LIMIT_S)
        assert print_of(pulled.state_dict()) == on_disk, "a peer's weights in place of others"


Step = Callable[[World, Name], None]

#: Each step with how often it is drawn.
STEPS: dict[Step, int] = {
    pull: 10,
    update: 3,
    interrupted_update: 1,
    restart: 1,
    new_lender: 1,
    interrupted_pull: 1,
    unclosed_pull: 1,
    let_go: 1,
    write_to_replica: 1,
    by_folder: 1,
    replace_files: 1,
    as_an_engine: 1,
}
