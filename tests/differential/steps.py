"""What a round does: steps in any order, each of which checks what it gets."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file

from mx import api
from mx.core.types import ModelKey
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
from tests.differential.weights import Print, Tensors, Version, print_of, write
from tests.differential.world import LIMIT_S, Name, World, expecting

#: What a lender lends: a folder's weights, which have files, more often than others.
KINDS = ["folder", "folder", "memory", "lent"]
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
    grace_s, restarts = world.rng.choice([0.0, 0.0, 5.0]), world.rng.random() < 0.15
    note = f"grace {grace_s}{', the coordinator restarts' if restarts else ''}"
    with expecting(world, f"update {name.name} ({name.lender.kind}, {note})"):
        world.update(name, grace_s=grace_s, restarts=restarts)
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
    if world.rng.random() < 0.5:
        world.settle(name)
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
    kind = world.rng.choice(KINDS)
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
    """The files in the folder are replaced, or written to in place, and look as old as those
    before."""
    path = name.folder / "model.safetensors"
    if not path.exists():
        return
    in_place = world.rng.random() < 0.5
    world.note(f"the files in {name.folder} are {'written to' if in_place else 'replaced'}")
    before = path.stat()
    write(name.folder, *name.fresh(), in_place=in_place)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- what reads -----------------------------------------------------------------------------------


def pull(world: World, name: Name, *, keep: bool = False) -> None:
    """Pull with any options; while it runs, look, change, restart or stop; then compare. With
    `keep` it stays as a replica."""
    rng, began = world.rng, name.truth.newest
    settled, changes = _is_settled(name), world.changes
    called, wanted = _called(world, name)
    options: dict[str, Any] = {"hold": True}
    if not keep:
        options = _options(world, name, may_follow=wanted is None)
    if wanted in (None, began) and rng.random() < 0.5:  # else it may be gone for good
        options["wait_s"] = 10.0
    simple = (bool, str, float)
    note = ", ".join(f"{k}={v}" if isinstance(v, simple) else k for k, v in options.items())
    with (
        expecting(world, f"pull {called}: {note}", *ENDS),
        _ending(lambda: settled and world.changes == changes and wanted in (None, began)),
    ):
        started = api.pull(
            called, coordinator=world.coordinator.address, settings=world.settings, **options
        )
        with contextlib.ExitStack() as opened:
            opened.enter_context(started)
            looks = Looks(world, name, started, into="into" in options)
            if rng.random() < 0.3:
                started.on_layer(looks.reported)
            began_with = _meanwhile(world, name, started, looks, at=rng.choice([0, 0, 0, 1, 99]))
            if rng.random() < 0.2:
                _interrupted_wait(world, started)
            report = started.wait(LIMIT_S)
            world.tally.update(["whole", *(f"whole with {option}" for option in options)])
            world.tally["followed"] += began_with not in ("", started.model.revision)
            tensors = started.state_dict()
            version = _expected(name, tensors)
            if settled and world.changes == changes:  # else an older revision may have been served
                assert wanted is not None or version.number >= began, (
                    f"version {version.number}, when {began} was published before"
                )
            assert wanted in (None, version.number), f"version {version.number}, not {wanted}"
            _whole(name, started, version, tensors, options)
            _as_reported(name, report, version)
            looks.compare()
            assert started.manifest is not None
            assert report.layers == len(started.manifest.layout.layers)
            if options.get("hold") and (keep or rng.random() < 0.7):
                source = started.hold()
                world.note(f"  held at {source.endpoint}")
                _from_replica(world, name, source, version)
                if (keep or rng.random() < 0.6) and "into" not in options:
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


def _called(world: World, name: Name) -> tuple[str, int | None]:
    """Return what a pull calls the model, and the version that this means; None: what its name
    means."""
    drawn = world.rng.random()
    if drawn < 0.1 and name.truth.identities:
        identity = world.rng.choice(list(name.truth.identities))
        return f"{name.name}@{identity}", name.truth.identities[identity].number
    if drawn < 0.2 and name.truth.revisions:
        revision = world.rng.choice(list(name.truth.revisions))
        if ":" in revision:  # the first one is called as the name is
            return revision, name.truth.revisions[revision].number
    return name.name, None


def _options(world: World, name: Name, *, may_follow: bool) -> dict[str, Any]:
    rng = world.rng
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options["transport"] = "tcp"
    if rng.random() < 0.3:
        options["attach"] = False
    if rng.random() < 0.2:
        options["verify"] = "strong"
    if rng.random() < 0.1:  # goes with none of what follows
        return options | {"only": rng.sample(sorted(name.sizes), 2)}
    if rng.random() < 0.4:
        options["hold"] = True
    if rng.random() < 0.25:
        options["into"] = {
            key: torch.zeros(size, dtype=torch.int32) for key, size in name.sizes.items()
        }
    elif rng.random() < 0.1 and "hold" not in options:
        spare = 1 << 16  # tensors and layers are aligned
        options["into"] = memoryview(bytearray(4 * sum(name.sizes.values()) + spare))
    if name.held and rng.random() < 0.5:
        options["reuse"] = rng.choice(name.held)[0]
    if rng.random() < 0.6 and may_follow:
        options["follow"] = True
    elif rng.random() < 0.3 and "into" not in options:
        options["out"] = name.folder.parent / "out"
        shutil.rmtree(options["out"], ignore_errors=True)
    return options


class Looks:
    """What was seen of a pull's layers while it ran: each is of one version, and stays so."""

    def __init__(self, world: World, name: Name, started: api.Pull, *, into: bool) -> None:
        self._world, self._name, self._started = world, name, started
        self._into = into  # the tensors are the caller's own, and are filled again
        self._seen: list[tuple[str, Tensors, Print]] = []
        self._files: list[dict[str, bytes]] = []

    def look(self, event: api.LayerEvent) -> None:
        """Look at a layer that is ready, in one way or another."""
        how = self._world.rng.choice(["tensors", "tensors", "layer_state_dict"])
        with expecting(self._world, f"  look at layer {event.index}: {how}", RevisionChangedError):
            if how == "tensors":
                self._add(event.revision, event.tensors())
            else:  # it may be of a later revision
                self._add("", self._started.layer_state_dict(event.index))

    def files(self) -> None:
        """Ask for the files; of what was lent, or is gone by now, there are none."""
        self._world.note("  ask for the files")
        with contextlib.suppress(MxError):
            self._files.append(self._started.files())

    def reported(self, event: api.LayerEvent) -> None:
        """Look at a layer in a callback, on a thread of mx's."""
        with contextlib.suppress(RevisionChangedError):
            self._add(event.revision, event.tensors())

    def _add(self, revision: str, tensors: Tensors) -> None:
        self._seen.append((revision, tensors, print_of(tensors)))

    def compare(self) -> None:
        """Raise AssertionError if anything that was seen is of no version, or has changed."""
        truth = self._name.truth
        for files in self._files:
            self._world.tally["files seen"] += 1
            assert any(each.files == files for each in truth.versions.values()), files
        for revision, tensors, then in self._seen:
            self._world.tally["layers seen"] += 1
            model = str(ModelKey(self._name.name, revision)) if revision else ""
            of, said = truth.of(then), truth.revisions.get(model)
            assert of, f"a layer that is of no version: {sorted(tensors)}"
            assert said is None or said in of, f"a layer of {model}, {said}, that is of {of}"
            assert self._into or print_of(tensors) == then, "tensors that were seen have changed"


def _meanwhile(world: World, name: Name, started: api.Pull, looks: Looks, *, at: int) -> str:
    """Look at layers, and do something after so many of them. Returns the first one's revision."""
    rng, first, changed = world.rng, "", False
    for _ in range(3):  # after a change the layers are iterated again
        ended = True
        with expecting(world, "  layers", RevisionChangedError):
            ended = False
            for index, event in enumerate(started.layers()):
                first = first or event.revision
                if rng.random() < 0.6:
                    looks.look(event)
                if rng.random() < (0.15 if index else 0.5):
                    looks.files()
                if index == at and not changed:
                    changed = True
                    what = rng.choice([update, update, update, update, interrupted_update, restart])
                    what(world, name)
            ended = True
        if ended or rng.random() < 0.5:
            break
    return first


def _interrupted_wait(world: World, started: api.Pull) -> None:
    """A wait for the pull's end is interrupted; the pull goes on."""
    with (
        expecting(world, "  wait", Interrupted),
        interrupted(world.rng.uniform(0.0, 0.03)),
    ):
        started.wait(LIMIT_S)


def _expected(name: Name, tensors: Tensors) -> Version:
    """Return the one version that all of the tensors are of."""
    found = name.truth.of(print_of(tensors))
    assert len(found) == 1, f"{name.name}: these are the weights of no version:\n" + _mixture(
        name, tensors
    )
    return found[0]


def _mixture(name: Name, tensors: Tensors) -> str:
    of: dict[tuple[str, str], int] = {
        each: version.number for key, version in name.truth.versions.items() for each in key
    }
    return "\n".join(f"  {each[0]}: {of.get(each, 'no version')}" for each in print_of(tensors))


def _whole(
    name: Name,
    started: api.Pull,
    version: Version,
    tensors: Tensors,
    options: dict[str, Any],
) -> None:
    """All that a pull shows is of one version."""
    wanted = options.get("only", name.sizes)
    assert tensors.keys() == set(wanted)
    if isinstance(options.get("into"), dict):
        assert print_of(options["into"]) == print_of(tensors)
    else:
        assert started.manifest is not None
        buffer = options.get("into", started.buffer())
        layout = (started.subset or started.manifest).layout
        for each in layout.tensors:
            begin = layout.layers[each.layer].arena_offset + each.offset
            there = bytes(buffer[begin : begin + each.nbytes])
            assert there == bytes(tensors[each.name].view(torch.uint8).numpy()), each.name
    if "out" in options:
        assert print_of(load_file(options["out"] / "model.safetensors")) == print_of(tensors)
        for file, content in version.files.items():
            assert (options["out"] / file).read_bytes() == content, f"{file} of another version"
    with contextlib.suppress(NoSourceError, ConfigError, ClosedError, IncompleteError):
        files = started.files()
        assert files == version.files, "the files of another version"


def _as_reported(name: Name, report: api.PullReport, version: Version) -> None:
    """The revision and the identity that a pull reports are those of its bytes."""
    truth = name.truth
    for said in (truth.revisions.get(report.model), truth.identities.get(report.identity)):
        assert said is None or said is version, (
            f"the report says {report.model}, which is version {said.number}, "
            f"and the bytes are version {version.number}"
        )


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


def interrupted_serve(world: World, name: Name) -> None:
    """A source that joins those of a name is interrupted as it starts: it is closed, or goes on."""
    if name.lender is None:
        return
    # It may outlive the lender, and the coordinator that knew of the lender's files.
    beside, version = None, name.truth.versions.get(print_of(name.lender.tensors))
    if version is not None and version.files:
        beside = name.folder.parent / "joins"
        beside.mkdir(exist_ok=True)
        for file, content in version.files.items():
            (beside / file).write_bytes(content)
    with (
        expecting(world, f"interrupted serve {name.name}", Interrupted, BindingError, *ENDS),
        interrupted(world.rng.uniform(0.0, 0.05)),
        api.serve(
            name.lender.tensors,
            model=name.name,
            coordinator=world.coordinator.address,
            files=beside,
            settings=world.settings,
        ),
    ):
        pass


def unclosed_pull(world: World, name: Name) -> None:
    """A pull that is complete is never closed; its tensors are what counts."""
    settled = _is_settled(name)
    with expecting(world, f"unclosed pull {name.name}", *ENDS), _ending(lambda: settled):
        tensors = api.load(
            name.name, coordinator=world.coordinator.address, settings=world.settings
        )
        _expected(name, tensors)


def let_go(world: World, name: Name) -> None:
    """A replica ends, and a pull finds what is left."""
    if not name.held:
        pull(world, name, keep=True)
    if name.held:
        started, source = name.held.pop(world.rng.randrange(len(name.held)))
        world.note(f"{name.name}: the replica at {source.endpoint} ends")
        world.changes += 1
        source.close()
        started.close()
        pull(world, name)


def write_to_replica(world: World, name: Name) -> None:
    """A replica's process writes to its own tensors: no reader gets these bytes, and none that can
    read from the lender fails."""
    if not name.held:
        pull(world, name, keep=True)
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
    # The other steps do without these.
    from mx.config import state_folder
    from mx.engines.replica.folder_hash import identity_of, remember
    from mx.engines.replica.names import meant_by

    path = name.folder / "model.safetensors"
    if not path.exists():  # with weights that no source serves
        write(name.folder, *name.fresh())
    hashed = world.rng.random() < 0.3
    if hashed:
        with expecting(world, f"hash {name.folder}"):
            time.sleep(max(0.0, path.stat().st_ctime + 2.1 - time.time()))
            world.tally["folders hashed before"] += remember(name.folder, state_folder())
    if world.rng.random() < (0.7 if hashed else 0.4):
        replace_files(world, name)
    on_disk, meant = print_of(load_file(path)), meant_by(str(name.folder))
    world.note(f"an engine for {name.folder}: {meant.refused or meant.identity}")
    if meant.refused:
        return
    world.tally["engines that may take others"] += 1
    assert meant.identity == identity_of(name.folder)[0], f"not what is in the folder: {meant.how}"
    with (
        expecting(world, "  pull it", *ENDS),
        api.pull(
            f"{meant.name}@{meant.identity}",
            coordinator=world.coordinator.address,
            settings=world.settings,
        ) as pulled,
    ):
        pulled.wait(LIMIT_S)
        world.tally["engines that took others"] += 1
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
    interrupted_serve: 1,
    unclosed_pull: 1,
    let_go: 1,
    write_to_replica: 1,
    by_folder: 1,
    replace_files: 1,
    as_an_engine: 2,
}
