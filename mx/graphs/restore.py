"""Makes a published graph launchable in this process, and proves that it computes the same.

Nothing here raises what an engine would have to handle: where a graph can't be used there is a
reason, and the engine captures as always.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3

from mx import trace
from mx.core.variant import Difference
from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import load
from mx.cuda.errors import CudaError
from mx.cuda.graphs import GraphCalls
from mx.cuda.vmm import OccupiedError
from mx.errors import CapacityError, MxError
from mx.graphs.build import build
from mx.graphs.eager import EagerCall, library_differences, loaded_by
from mx.graphs.export import device_fields, replayed
from mx.graphs.message import decode
from mx.graphs.package import Graph, GraphError, GraphPlace, Input, Kernel
from mx.graphs.region import Region, clear_others
from mx.graphs.states import Cause, GraphProgress, GraphStep, Reason, Refusal, State, refuse
from mx.graphs.tensors import RegionTensor
from mx.text import listed

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
    message: bytes,
    get_image: Callable[[str], bytes],
    *,
    device: int | str = 0,
    regions: Sequence[Region] = (),
    pin: str = "",
    environment: Mapping[str, str] | None = None,
    calls: Sequence[EagerCall] = (),
) -> RestoredGraph:
    """Load a graph of a publisher that this process trusts, up to being instantiated.

    The weights need not have arrived: `tensors()` of what this returns are their places.

    Args:
        message: The graph, from a document whose signature was checked.
        get_image: Returns an image by its blake3 in hexadecimal; it may raise.
        device: The GPU, "cuda:N", "cuda:GPU-..." or N.
        regions: Memory that was opened for this graph before; by default it is opened here.
        pin: That of the weights which are pulled.
        environment: This process's fields beyond those of its GPU.
        calls: What loads kernels of libraries, by the names that the publisher used.

    Returns:
        The graph: its `state` says whether it was restored, its `reason` why not. The caller closes
        it. This raises nothing.
    """
    made = RestoredGraph()
    with trace.span("graphs.restore") as span:
        done = made._attempt(
            GraphStep.RESTORE,
            lambda: made._restore(
                message, get_image, device, regions, pin, environment or {}, calls
            ),
        )
        span.set(restored=done)
    return made


class RestoredGraph:
    """A graph on its way into an engine. Use `restore` to make one.

    `state` says what may be done, `reason` why it is refused. Not thread-safe: one thread restores,
    proves and launches.
    """

    def __init__(self) -> None:
        self._progress = GraphProgress()
        self._graph: Graph | None = None
        self._regions: list[Region] = []
        self._memory = contextlib.ExitStack()  # regions and the device: weights may be arriving
        self._loaded = contextlib.ExitStack()  # modules and the graph
        self._executable = 0

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
        found: dict[str, RegionTensor] = {}
        for index, region in enumerate(self._regions):
            assert self._graph is not None
            found |= region.tensors(self._graph, index)
        return found

    def inputs(self) -> dict[str, RegionTensor]:
        """Return views of what a replay reads, by name."""
        graph = self._graph
        return {} if graph is None else self._views([each.place for each in graph.inputs])

    def outputs(self) -> dict[str, RegionTensor]:
        """Return views of what a replay writes, by name."""
        graph = self._graph
        return {} if graph is None else self._views([each.place for each in graph.outputs])

    def _views(self, places: Sequence[GraphPlace]) -> dict[str, RegionTensor]:
        if not self._regions:
            return {}
        return {place.name: self._regions[place.region].tensor(place) for place in places}

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
            with self._regions[0].device.current():
                self._driver.replay(self._executable, stream)
        except CudaError as error:
            self._refuse(Reason(Cause.DRIVER, str(error)))
            return False
        self._progress.take(GraphStep.LAUNCH)
        if first:
            _count(State.LAUNCHED.value)
        return True

    def close(self) -> None:
        """Free the graph, its kernels and the regions that were opened for it. Idempotent."""
        self._progress.take(GraphStep.CLOSE)
        self._unload()
        self._regions = []
        self._memory.close()

    def __enter__(self) -> RestoredGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the steps ---------------------------------------------------------------------------------

    def _attempt(self, step: GraphStep, work: Callable[[], None]) -> bool:
        try:
            work()
        except Refusal as refusal:
            self._refuse(refusal.reason)
        except Exception as error:  # noqa: BLE001 - the engine goes on without the graph
            kinds = (cause for kind, cause in _CAUSES if isinstance(error, kind))
            text = str(error) if isinstance(error, MxError) else f"{type(error).__name__}: {error}"
            self._refuse(Reason(next(kinds, Cause.OTHER), text))
        else:
            self._progress.take(step)
            _count(self.state.value)
            return True
        return False

    def _refuse(self, reason: Reason) -> None:
        if self._progress.refuse(reason):
            _count(f"refused: {reason.cause.value}")
            _log.warning("the CUDA graph is not used, and has to be captured here: %s", reason)
        self._unload()

    def _unload(self) -> None:
        """Free what was loaded. The regions stay: a pull may be filling them."""
        self._executable = 0
        if not self._regions:
            return
        try:
            with self._regions[0].device.current():
                self._loaded.close()
        except CudaError as error:
            _log.warning("the CUDA graph's kernels were not given back: %s", error)

    def _restore(
        self,
        message: bytes,
        get_image: Callable[[str], bytes],
        device: int | str,
        regions: Sequence[Region],
        pin: str,
        environment: Mapping[str, str],
        calls: Sequence[EagerCall],
    ) -> None:
        graph = self._graph = decode(message)
        name = f"cuda:{device}" if isinstance(device, int) else device
        opened = self._memory.enter_context(Device.open(load(), name))
        _check_environment(graph, {**environment, **device_fields(opened)}, calls)
        if graph.pin and graph.pin != pin:
            refuse(Cause.PIN, f"the graph is of the weights {graph.pin}, not {pin or 'any others'}")
        self._open(graph, regions, opened)
        images = [_image(get_image, each.digest, each.nbytes) for each in graph.images]
        with opened.current():
            self._driver = GraphCalls()
            modules = [self._load(image) for image in images]
            functions = self._functions(graph, modules, calls, opened)
            made = build(self._driver, graph, functions, opened.context)
            self._loaded.callback(self._driver.graph_destroy, made)
            self._executable = self._driver.instantiate(made)
            self._loaded.callback(self._driver.executable_destroy, self._executable)

    def _prove(
        self, inputs: Mapping[str, bytes | memoryview], expected: Mapping[str, bytes | memoryview]
    ) -> None:
        assert self._graph is not None
        prove(self._driver, self._executable, self._regions, self._graph, inputs, expected)

    def _open(self, graph: Graph, regions: Sequence[Region], device: Device) -> None:
        if regions and [region.spec for region in regions] != list(graph.regions):
            where = listed([f"{each.nbytes} bytes at {each.base:#x}" for each in graph.regions])
            refuse(Cause.OCCUPIED, f"the graph needs {where}, and other regions were given")
        for spec in [] if regions else graph.regions:
            made = Region(spec.nbytes, spec.base, device)
            self._regions.append(self._memory.enter_context(made))
        self._regions += regions
        for region in self._regions:
            if region.device.key != device.key:
                refuse(Cause.OCCUPIED, f"a region is on {region.device.key}, not {device.key}")

    def _load(self, image: bytes) -> int:
        module = self._driver.module_load(image)
        self._loaded.callback(self._driver.module_unload, module)
        return module

    def _functions(
        self, graph: Graph, modules: Sequence[int], calls: Sequence[EagerCall], device: Device
    ) -> list[int]:
        """Return the function of each kernel, after checking its parameters."""
        by_name: dict[tuple[str, str], set[int]] = defaultdict(set)
        needed = {graph.calls[k.call].name for k in graph.kernels if k.call is not None}
        for call in calls:
            if call.name in needed:
                for found in loaded_by(self._driver, device, call):
                    by_name[found.call, found.name].add(found.function)
        functions = []
        for kernel in graph.kernels:
            if kernel.image is not None:
                try:
                    function = self._driver.module_function(modules[kernel.image], kernel.name)
                except CudaError as error:
                    if error.code == "CUDA_ERROR_NOT_FOUND":
                        refuse(Cause.KERNEL, f"{kernel.name} is not in its image")
                    raise
            else:
                assert kernel.call is not None
                call_name = graph.calls[kernel.call].name
                several = by_name[call_name, kernel.name]
                if len(several) != 1:
                    what = "loads two kernels of that name" if several else "does not load it"
                    refuse(Cause.KERNEL, f"{kernel.name}: the call {call_name} {what}")
                (function,) = several
            self._check_parameters(kernel, function)
            functions.append(function)
        return functions

    def _check_parameters(self, kernel: Kernel, function: int) -> None:
        # The driver reads as many bytes as the kernel has parameters, whatever it is given.
        found = self._driver.parameters(function)
        if found != kernel.parameters:
            refuse(
                Cause.KERNEL,
                f"{kernel.name} has {len(found)} parameters here, other than the "
                f"{len(kernel.parameters)} of the graph",
            )


def _check_environment(graph: Graph, here: Mapping[str, str], calls: Sequence[EagerCall]) -> None:
    found = [
        Difference(name, value, here.get(name, ""))
        for name, value in graph.environment
        if here.get(name, "") != value
    ]
    found += library_differences(graph.libraries, graph.calls, calls)
    if found:
        texts = [f"{each.field}: {each.first!r} there, {each.second!r} here" for each in found]
        refuse(Cause.ENVIRONMENT, "; ".join(texts), found)


def _image(get_image: Callable[[str], bytes], digest: bytes, nbytes: int) -> bytes:
    try:
        image = bytes(get_image(digest.hex()))
    except Exception as error:  # noqa: BLE001 - it is the caller's, and a reason
        refuse(Cause.IMAGE, f"{digest.hex()} is not there: {type(error).__name__}: {error}")
    if len(image) != nbytes or blake3(image).digest() != digest:
        refuse(Cause.IMAGE, f"the image {digest.hex()} has other bytes than its hash says")
    return image


# -- compares what a restored graph computes with what it has to compute ---------------------------


def prove(
    driver: GraphCalls,
    executable: int,
    regions: Sequence[Region],
    graph: Graph,
    inputs: Mapping[str, bytes | memoryview],
    expected: Mapping[str, bytes | memoryview],
) -> None:
    """Replay the golden inputs, then others, and compare all outputs.

    Args:
        driver: The calls.
        executable: The instantiated graph.
        regions: The graph's memory. What is not a weight is zero before each replay, and
        afterwards.
        graph: The graph.
        inputs: Other bytes for each input, by name.
        expected: What each output has to be for them.

    Raises:
        Refusal: Some output differs, or an argument is wrong.
        CudaError: The driver fails.
    """
    unseen = _matched(graph, inputs, expected)
    outputs = [each.place for each in graph.outputs]
    device = regions[0].device
    with device.current(), CudaStream(device) as stream:
        for cause, given in ((Cause.GOLDEN, graph.inputs), (Cause.UNSEEN, unseen)):
            clear_others(regions, graph.weights)
            values = replayed(driver, executable, stream, regions, given, outputs)
            for output, value in zip(graph.outputs, values, strict=True):
                name = output.place.name
                right = (
                    blake3(value).digest() == output.digest
                    if cause is Cause.GOLDEN
                    else value == _plain(expected[name])
                )
                if not right:
                    refuse(cause, f"a replay gives other bytes of the output {name}")
        clear_others(regions, graph.weights)


def _plain(value: bytes | memoryview) -> bytes:
    return bytes(memoryview(value).cast("B"))


def _matched(
    graph: Graph,
    inputs: Mapping[str, bytes | memoryview],
    expected: Mapping[str, bytes | memoryview],
) -> list[Input]:
    """Return the inputs of a proof, which have to be complete, and others than the golden ones."""
    golden = {each.place.name: each for each in graph.inputs}
    outputs = {each.place.name: each.place for each in graph.outputs}
    for what, given, known in (("inputs", inputs, golden), ("outputs", expected, outputs)):
        if set(given) != set(known):
            refuse(Cause.OTHER, f"the {what} of the graph are {listed(sorted(known))}")
    for name, place in outputs.items():
        if len(_plain(expected[name])) != place.nbytes:
            refuse(Cause.UNSEEN, f"the output {name} has {place.nbytes} bytes")
    unseen = []
    for name, each in golden.items():
        value = _plain(inputs[name])
        if len(value) != each.place.nbytes:
            refuse(Cause.OTHER, f"the input {name} has {each.place.nbytes} bytes")
        unseen.append(Input(each.place, value))
    if golden and all(each.value == golden[each.place.name].value for each in unseen):
        refuse(Cause.UNSEEN, "the inputs are the golden ones, which prove nothing more")
    return unseen
