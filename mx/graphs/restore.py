"""Makes published graphs launchable in this process, and proves that they compute the same.

Nothing here raises what an engine would have to handle: where a graph can't be used there is a
reason, and the engine captures as always.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from mx import trace
from mx.contexts import OwnContext
from mx.core.variant import Difference
from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.cuda.errors import CudaError
from mx.cuda.vmm import OccupiedError
from mx.errors import CapacityError, MxError
from mx.graphs.build import Template
from mx.graphs.calls import GraphCalls
from mx.graphs.eager import EagerCall
from mx.graphs.export import device_fields
from mx.graphs.functions import Functions, library_differences, mapped_libraries
from mx.graphs.message import decode
from mx.graphs.package import Graph, GraphError, GraphPlace
from mx.graphs.prove import prove
from mx.graphs.region import Region, open_regions
from mx.graphs.states import Cause, GraphProgress, GraphStep, Reason, Refusal, State, refuse
from mx.graphs.tensors import RegionTensor
from mx.memory.device import require_device
from mx.text import listed
from mx.units import format_bytes

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def counts() -> dict[str, int]:
    """Return how often graphs of this process were "restored", "proved", "launched" (each graph
    once), and refused: "refused: golden", by cause."""
    with _lock:
        return dict(_counts)


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1


_CAUSES: tuple[tuple[type[Exception], Cause], ...] = (
    (GraphError, Cause.MALFORMED),
    (OccupiedError, Cause.OCCUPIED),
    (CapacityError, Cause.MEMORY),
    (CudaError, Cause.DRIVER),
)


def restore(
    message: bytes, get_image: Callable[[str], bytes], **given: Unpack[RestoreOptions]
) -> RestoredGraph:
    """Load the only graph of a package of a publisher that this process trusts, up to being
    instantiated; `restore_all` is for several.

    The weights need not have arrived: `tensors()` of what this returns are their places.

    Args:
        message: The package's message, from a document whose signature was checked.
        get_image: Returns an image by its blake3 in hexadecimal; it may raise.
        **given: See `RestoreOptions`.

    Returns:
        The graph: its `state` says whether it was restored, its `reason` why not. The caller closes
        it. This raises nothing.
    """
    first, *others = restore_all(message, get_image, **given).values()
    if others:
        first._refuse(Reason(Cause.OTHER, f"the package has {len(others)} more: use `restore_all`"))
    for graph in others:
        graph.close()
    return first


def restore_all(
    message: bytes, get_image: Callable[[str], bytes], **given: Unpack[RestoreOptions]
) -> RestoredGraphs:
    """Load the graphs of a package of a publisher that this process trusts, as `restore` does.

    Of a package for several addresses those are loaded whose addresses are the first that are free.

    Args:
        message: The package's message, from a document whose signature was checked.
        get_image: Returns an image by its blake3 in hexadecimal; it may raise.
        **given: See `RestoreOptions`.

    Returns:
        The graphs by name, each with its own `state` and `reason`; of a message that is none, one
        without name that is refused. The caller closes them. This raises nothing.
    """
    home = _Home()
    with trace.span("graphs.restore") as span:
        reason = _why_not(lambda: home.open(message, get_image, RestoreOptions(**given)))
        known: dict[str, Graph | None] = {graph.name: graph for graph in home.graphs} or {"": None}
        graphs = RestoredGraphs((name, RestoredGraph(home, known[name])) for name in known)
        for at, graph in enumerate(graphs.values()):
            if reason is None:
                graph._attempt(GraphStep.RESTORE, graph._restore)
            else:
                graph._refuse(reason, quiet=at > 0)
        restored = sum(graph.state is State.RESTORED for graph in graphs.values())
        span.set(graphs=len(graphs), restored=restored)
    return graphs


class RestoreOptions(TypedDict, total=False):
    """What a process says of itself to restore graphs.

    Attributes:
        device: The GPU, "cuda:N", "cuda:GPU-..." or N.
        regions: Memory that was opened for these graphs before; by default it is opened here.
        pin: That of the weights which are pulled.
        environment: This process's fields beyond those of its GPU.
        libraries: The files of the libraries that the graphs name; those that this process has
            mapped are found without.
        calls: What loads kernels that are in no library's file, by the names that the publisher
            used.
        work: The bytes that this process needs of named work memory, which have to agree.
    """

    device: int | str
    regions: Sequence[Region]
    pin: str
    environment: Mapping[str, str]
    libraries: Sequence[Path]
    calls: Sequence[EagerCall]
    work: Mapping[str, int]


class RestoredGraphs(dict[str, "RestoredGraph"], OwnContext):
    """The graphs of a package, by name. Each is proved and launched by itself; prove all of them
    before one is launched."""

    def close(self) -> None:
        """Close all of them. Idempotent."""
        with contextlib.ExitStack() as ends:
            for graph in self.values():
                ends.callback(graph.close)


class _Home:
    """What the graphs of a package share: memory, the functions of kernels, and a raw graph of each
    topology."""

    def __init__(self) -> None:
        self.graphs: Sequence[Graph] = ()
        self.regions: list[Region] = []
        self.launched = False
        self.driver: GraphCalls
        self.memory = contextlib.ExitStack()  # regions and the device: weights may be arriving
        self._loaded = contextlib.ExitStack()  # modules and raw graphs
        self._templates: dict[int, Template] = {}
        #: Graphs that are not closed, and those that are not refused either.
        self._open: set[object] = set()
        self._used: set[object] = set()

    def open(
        self, message: bytes, get_image: Callable[[str], bytes], given: RestoreOptions
    ) -> None:
        self.graphs = decode(message)
        graph, libraries = self.graphs[0], given.get("libraries", ())
        if graph.fatbins:
            libraries = [*mapped_libraries(), *libraries]
        device, calls, pin = given.get("device", 0), given.get("calls", ()), given.get("pin", "")
        name = f"cuda:{device}" if isinstance(device, int) else device
        opened = self.memory.enter_context(Device.open(load(), name))
        here = {**given.get("environment", {}), **device_fields(opened)}
        _check_environment(graph, here, given.get("work", {}), libraries, calls)
        if graph.pin and graph.pin != pin:
            refuse(Cause.PIN, f"the graph is of the weights {graph.pin}, not {pin or 'any others'}")
        if nbytes := sum(each.nbytes for one in self.graphs for each in one.tried):
            _log.info("the graphs' publisher vouches for %d bytes by a trial", nbytes)
        self._open_regions(opened, given.get("regions", ()))
        self.driver = GraphCalls()
        paths = {path.name: path for path in libraries}
        self._functions = Functions(
            self.driver, opened, graph, get_image, paths, calls, self._loaded
        )

    def _open_regions(self, device: Device, given: Sequence[Region]) -> None:
        """Open the memory, and leave out graphs for other addresses."""
        choices = list(dict.fromkeys(graph.regions for graph in self.graphs))
        specs = tuple(region.spec for region in given)
        if given and specs not in choices:
            where = listed([f"{each.nbytes} bytes at {each.base:#x}" for each in sum(choices, ())])
            refuse(Cause.OCCUPIED, f"the graph needs {where}, and other regions were given")
        for region in given:
            if region.device.key != device.key:
                refuse(Cause.OCCUPIED, f"a region is on {region.device.key}, not {device.key}")
        self.regions = list(given)
        if not given:
            nbytes = min(sum(each.nbytes for each in choice) for choice in choices)
            require_device(device, nbytes, "the graphs' memory")
            specs, self.regions = open_regions(choices, device, self.memory)
        self.graphs = [graph for graph in self.graphs if graph.regions == specs]

    def executable(self, graph: Graph) -> int:
        """Return an executable of a graph, which the caller destroys."""
        device = self.regions[0].device
        with device.current():
            template = self._templates.get(graph.topology)
            if template is None:
                template = Template(self.driver, graph, self._functions.of, device.context)
                self._templates[graph.topology] = template
                self._loaded.callback(template.close)
            return template.instantiate(graph)

    def enter(self, graph: object) -> None:
        """Note a graph that uses this."""
        self._open.add(graph)
        self._used.add(graph)

    def unload(self, graph: object, executable: int) -> None:
        """Free the executable of a graph, and kernels and raw graphs with the last one."""
        self._used.discard(graph)
        if not self.regions:
            return
        try:
            with self.regions[0].device.current(), contextlib.ExitStack() as ends:
                if not self._used:
                    ends.push(self._loaded.pop_all())
                    self._templates.clear()
                if executable:
                    ends.callback(self.driver.executable_destroy, executable)
        except CudaError as error:
            _log.warning("the CUDA graph's kernels were not given back: %s", error)

    def leave(self, graph: object) -> None:
        """Free the memory with the last graph."""
        self._open.discard(graph)
        if not self._open:
            self.regions = []
            self.memory.close()


class RestoredGraph(OwnContext):
    """A graph on its way into an engine. Use `restore` to make one.

    `state` says what may be done, `reason` why it is refused. Not thread-safe: one thread restores,
    proves and launches all graphs of a package.
    """

    def __init__(self, home: _Home, graph: Graph | None) -> None:
        self._progress = GraphProgress()
        self._home, self._graph = home, graph
        self._executable = 0
        home.enter(self)

    @property
    def name(self) -> str:
        """What tells it from other graphs of its package, "" for one alone."""
        return "" if self._graph is None else self._graph.name

    @property
    def state(self) -> State:
        """What may be done with the graph."""
        return self._progress.state

    @property
    def reason(self) -> Reason | None:
        """Why the graph is refused; None as long as it is not."""
        return self._progress.reason

    def tensors(self) -> dict[str, RegionTensor]:
        """Return views of the weights' places, by name, for `mx.pull(into=...)`; none if the
        graph's memory could not be opened. They are valid until `close`."""
        return self._views(lambda graph: graph.weights)

    def work(self) -> dict[str, RegionTensor]:
        """Return views of named work memory, by name: of zeros until the graph is launched."""
        return self._views(lambda graph: graph.work)

    def inputs(self) -> dict[str, RegionTensor]:
        """Return views of what a replay reads, by name."""
        return self._views(lambda graph: [each.place for each in graph.inputs])

    def outputs(self) -> dict[str, RegionTensor]:
        """Return views of what a replay writes, by name."""
        return self._views(lambda graph: [each.place for each in graph.outputs])

    def _views(self, places: Callable[[Graph], Sequence[GraphPlace]]) -> dict[str, RegionTensor]:
        regions = self._home.regions
        if self._graph is None or not regions or self.state is State.CLOSED:
            return {}
        return {place.name: regions[place.region].tensor(place) for place in places(self._graph)}

    def prove(
        self, inputs: Mapping[str, bytes | memoryview], expected: Mapping[str, bytes | memoryview]
    ) -> bool:
        """Replay the golden inputs, then others, and compare all outputs.

        The weights have to be in place, and the engine must not use the regions' other memory yet:
        it is set to zero before and after.

        Args:
            inputs: Other bytes for each input, by name, in host memory.
            expected: What the engine itself computes of them, for each output.

        Returns:
            True if the graph is proved. Otherwise it is refused, with the reason, unless it was not
            restored in the first place.
        """
        if not self._progress.may(GraphStep.PROVE):
            return False
        with trace.span("graphs.prove") as span:
            done = self._attempt(GraphStep.PROVE, lambda: self._prove(inputs, expected))
            span.set(proved=done)
        return done

    def launch(self, stream: int) -> bool:
        """Queue a replay.

        Args:
            stream: A CUstream as an int: `torch.cuda.current_stream().cuda_stream`.

        Returns:
            True if it is queued; False if the graph is not proved, or the driver refuses, which
            refuses the graph from now on.
        """
        if not self._progress.may(GraphStep.LAUNCH):
            return False
        first = self.state is State.PROVED
        try:
            with self._home.regions[0].device.current():
                self._home.driver.replay(self._executable, stream)
        except CudaError as error:
            self._refuse(Reason(Cause.DRIVER, str(error)))
            return False
        self._progress.take(GraphStep.LAUNCH)
        self._home.launched = True
        if first:
            _count(State.LAUNCHED.value)
        return True

    def close(self) -> None:
        """Free the graph, and with the last one of its package the kernels, and the regions that
        were opened for it. Idempotent."""
        self._progress.take(GraphStep.CLOSE)
        self._unload()
        self._home.leave(self)

    # -- the steps ---------------------------------------------------------------------------------

    def _refuse(self, reason: Reason, *, quiet: bool = False) -> None:
        if self._progress.refuse(reason):
            _count(f"refused: {reason.cause.value}")
            if not quiet:
                name = f" {self.name}" if self.name else ""
                _log.warning("the CUDA graph%s is not used: capture it here: %s", name, reason)
        self._unload()

    def _attempt(self, step: GraphStep, work: Callable[[], None]) -> bool:
        reason = _why_not(work)
        if reason is not None:
            self._refuse(reason)
            return False
        self._progress.take(step)
        _count(self.state.value)
        return True

    def _unload(self) -> None:
        """Free what was loaded. The regions stay: a pull may be filling them."""
        executable, self._executable = self._executable, 0
        self._home.unload(self, executable)

    def _restore(self) -> None:
        assert self._graph is not None
        self._executable = self._home.executable(self._graph)

    def _prove(
        self, inputs: Mapping[str, bytes | memoryview], expected: Mapping[str, bytes | memoryview]
    ) -> None:
        assert self._graph is not None
        home = self._home
        if home.launched:
            refuse(Cause.OTHER, "another graph was launched: prove all of a package before")
        prove(home.driver, self._executable, home.regions, self._graph, inputs, expected)


def _why_not(work: Callable[[], None]) -> Reason | None:
    """Do some work, and return why it failed; None if it did not."""
    try:
        work()
    except Refusal as refusal:
        return refusal.reason
    except Exception as error:  # noqa: BLE001 - the engine goes on without the graph
        kinds = (cause for kind, cause in _CAUSES if isinstance(error, kind))
        text = str(error) if isinstance(error, MxError) else f"{type(error).__name__}: {error}"
        return Reason(next(kinds, Cause.OTHER), text)
    return None


def _check_environment(
    graph: Graph,
    here: Mapping[str, str],
    work: Mapping[str, int],
    libraries: Sequence[Path],
    calls: Sequence[EagerCall],
) -> None:
    found = [
        Difference(name, value, here.get(name, ""))
        for name, value in graph.environment
        if here.get(name, "") != value
    ]
    sizes = {place.name: place.nbytes for place in graph.work}
    found += [
        Difference(f"work memory {name}", format_bytes(sizes.get(name, 0)), format_bytes(nbytes))
        for name, nbytes in work.items()
        if sizes.get(name, 0) != nbytes
    ]
    found += library_differences(graph, libraries, calls)
    if found:
        texts = [f"{each.field}: {each.first!r} there, {each.second!r} here" for each in found]
        refuse(Cause.ENVIRONMENT, "; ".join(texts), found)
