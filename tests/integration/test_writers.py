"""Processes that write to what they have pulled while they serve it: no reader gets other
bytes, and no writer is taken for a liar. Every holder is a process of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mx import api, config
from mx.errors import EXIT_INCOMPLETE, EXIT_INTEGRITY, EXIT_NO_SOURCE
from tests.integration.scripts import script
from tests.support.commands import Command, Run, serve
from tests.support.outcomes import error_of, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("torch_is_forked"),
]

#: Pulls "m", gives it to others, and writes to some of its tensors when it is told to.
WRITER = """
import torch
from safetensors.torch import load_file
from mx import log
log.set_up("info", "text")
mode, like = sys.argv[2:]
into = {name: torch.zeros_like(t) for name, t in load_file(like).items()}
into = into if mode in ("module", "filled") else None
held = mode in ("module", "held")
pull = api.pull(
    "m", coordinator=coordinator, into=into, hold=held, attach=mode == "attached",
    transport=None if mode == "attached" else "tcp",
)
pull.wait()
if held:
    pull.hold()
print("ready", flush=True)
for line in sys.stdin:
    found = pull.state_dict()
    for name in line.split():
        found[name].zero_()
    print("written", flush=True)
"""
#: What the writers write to: tensors of layers at the beginning and the end.
FIRST, LAST = "model.layers.0.mlp.up_proj.weight", "model.layers.7.mlp.up_proj.weight"
#: Slow enough for pulls to be listed while they run.
SLOW = ("--max-bandwidth", "8MB/s")


class Writer:
    """A process that has pulled "m"; `endpoint` is where it gives it, "" if it gives nothing."""

    def __init__(self, ends: ExitStack, coordinator: str, mode: str, checkpoint: Path) -> None:
        before = givers(coordinator)
        self._process = ends.enter_context(
            script(WRITER, coordinator, mode, str(checkpoint), imported="torch")
        )
        self.log = ""
        threading.Thread(target=self._read, daemon=True).start()
        self._hears("ready")
        self.endpoint = ""
        if mode != "attached":
            found = until(lambda: givers(coordinator) - before, "source in the writer's process")
            (self.endpoint,) = found

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log += line

    def _hears(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word, self.log

    def write(self, *names: str) -> None:
        print(*names, file=self._process.stdin, flush=True)
        self._hears("written")


def givers(coordinator: str) -> set[str]:
    """The endpoints of the sources that have pulled all of "m"."""
    found = [each.record for each in api.list_sources("m", coordinator=coordinator)]
    return {each.endpoint for each in found if each.role.name == "RELAY" and each.whole}


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def everywhere(settings: config.Settings, coordinated: None) -> config.Settings:
    """Settings of a reader that takes its part from every holder."""
    return replace(settings, coordinated_reading="always")


Start = Callable[[str], Writer]


@pytest.fixture
def start(ends: ExitStack, coordinator: str, checkpoint: Path) -> Start:
    return lambda mode: Writer(ends, coordinator, mode, checkpoint)


def kill(origin: Command) -> None:
    origin.signal(signal.SIGKILL)
    origin.wait()


def is_right(pull: api.Pull, checkpoint: Path) -> bool:
    wanted, found = load_file(checkpoint), pull.state_dict()
    return wanted.keys() == found.keys() and all(
        torch.equal(found[name].view(torch.int16), wanted[name].view(torch.int16))
        for name in wanted
    )


def reasons(pull: api.Pull, endpoint: str) -> str:
    assert pull.report is not None
    return "; ".join(each.reason for each in pull.report.left if each.source == endpoint)


@pytest.mark.parametrize("mode", ["arena", "module", "filled"])
def test_with_no_other_holder_the_error_says_who_wrote(
    run: Run, coordinator: str, checkpoint: Path, start: Start, mode: str
) -> None:
    origin = serve(run, checkpoint, "m", coordinator, *SLOW)
    writer = start(mode)
    kill(origin)
    writer.write(FIRST, LAST)
    with api.pull("m", peer=writer.endpoint, transport="tcp") as pull:
        error = error_of(pull, 60)
    assert "changed" in str(error) and writer.endpoint in str(error)
    assert "match the model's identity" not in str(error) and "lies" not in error.hint
    assert error.exit_code in (EXIT_NO_SOURCE, EXIT_INTEGRITY, EXIT_INCOMPLETE)
    until(lambda: "withdrawn" in writer.log and FIRST in writer.log, "reason in the writer's log")
    until(lambda: not givers(coordinator), "end of its registration")


@pytest.mark.parametrize(
    ("third", "mode"),
    [
        ("origin", "filled"),
        ("replica", "arena"),
        ("replica", "module"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("origin", "arena"), ("origin", "module"), ("replica", "filled"))
        ),
    ],
)
def test_readers_get_the_right_bytes_from_another_holder(
    run: Run,
    coordinator: str,
    checkpoint: Path,
    start: Start,
    everywhere: config.Settings,
    mode: str,
    third: str,
) -> None:
    """The other holder is the origin, which is slower, or a replica while the origin is dead."""
    origin = serve(run, checkpoint, "m", coordinator, *SLOW)
    writer = start(mode)
    if third == "replica":
        start("held")
        kill(origin)
    writer.write(FIRST, LAST)
    with api.pull(
        "m", coordinator=coordinator, transport="tcp", settings=everywhere, wait_s=20
    ) as pull:
        pull.wait(90)
        assert is_right(pull, checkpoint)
        said = reasons(pull, writer.endpoint)
    assert "match the model's identity" not in said
    assert not said or "changed" in said
    with api.pull("m", peer=writer.endpoint, transport="tcp", settings=everywhere) as pull:
        assert "lies" not in error_of(pull, 60).hint
    until(lambda: writer.endpoint not in givers(coordinator), "end of its registration")


#: Pulls "m" slowly, and writes to each layer as soon as it is ready.
EARLY = """
pull = api.pull("m", coordinator=coordinator, attach=False, transport="tcp")
for event in pull.layers():
    for tensor in event.tensors().values():
        tensor.zero_()
    print(event.index, flush=True)
print(pull.wait().bytes, flush=True)
sys.stdin.read()
"""


def test_a_pull_that_writes_while_it_receives_gets_and_spoils_nothing(
    run: Run, coordinator: str, checkpoint: Path, ends: ExitStack, everywhere: config.Settings
) -> None:
    serve(run, checkpoint, "m", coordinator, *SLOW)
    writer = ends.enter_context(script(EARLY, coordinator, imported="torch"))
    assert writer.stdout is not None
    assert writer.stdout.readline().strip() == "0"
    with api.pull(
        "m", coordinator=coordinator, transport="tcp", attach=False, settings=everywhere
    ) as pull:
        report = pull.wait(90)
        assert is_right(pull, checkpoint)
    assert not any("match the model" in each.reason for each in report.left)
    lines = [writer.stdout.readline().strip() for _ in range(report.layers)]
    assert lines[-1] == str(report.bytes)


@pytest.mark.parametrize("mode", ["held", "attached"])
def test_memory_of_its_own_may_be_written_to(
    run: Run, coordinator: str, checkpoint: Path, start: Start, mode: str
) -> None:
    """What such a pull's tensors are is a private map: nothing is withdrawn."""
    serve(run, checkpoint, "m", coordinator)
    writer = start(mode)
    writer.write(FIRST, LAST)
    peer = {"peer": writer.endpoint} if writer.endpoint else {"coordinator": coordinator}
    for attach in (False, True):
        with api.pull("m", attach=attach, **peer) as pull:  # type: ignore[arg-type]
            pull.wait(60)
            assert is_right(pull, checkpoint)
    assert "withdrawn" not in writer.log
