"""An engine of `make starts`: it loads, lends, sleeps and is updated by mx's own parts for engines.

It is a program. Its argument says what to load, and at which points to wait for a line on standard
input; what it says is JSON on standard output, a line each. After it has started it does what the
lines ask for, until there are no more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import mx
from mx.engines.replica.configuration import check_configuration
from mx.engines.replica.names import meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.registries import undone_unless_kept
from mx.engines.replica.run import LOADED, PROCESSED, GivenUpError, RankRun
from mx.engines.replica.tensors import replace, slots_of
from mx.engines.vllm import worker as watching
from tests.starts import model as models
from tests.starts.schedule import ASLEEP, CHECKPOINT, LAYERS, ORDINARY
from tests.support.leftovers import Holdings

#: How long what an engine has ended may take to be gone.
GONE_S = 60.0


def say(event: str, **more: Any) -> None:
    """Say something to the campaign."""
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


def told(error: BaseException | None) -> dict[str, str]:
    """Return an error as the campaign judges it."""
    if error is None:
        return {}
    kind = type(error)
    shown = "".join(traceback.format_exception(error))[-6000:]
    return {"type": kind.__name__, "module": kind.__module__, "text": str(error), "shown": shown}


class Messages(logging.Handler):
    """The lines that the engine's user sees."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


class Worker:
    """The calls of a worker that mx watches. Its weights are those of `engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.vllm_config = engine, engine.configuration

    def sleep(self, level: int = 1) -> None:
        """Free the weights: of level 2 nothing is kept."""
        self.engine.fall_asleep(keep=level == 1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Have memory for the weights again, with what was kept."""
        self.engine.awake()

    def start_weight_update(self) -> None: ...

    def update_weights(self) -> None:
        models.updated(self.engine.model)

    def finish_weight_update(self) -> None: ...

    def reload_weights(self) -> None:
        """Load from disk again."""
        self.engine.reload()

    def shutdown(self) -> None: ...


class Engine:
    """Loads as vLLM's loader does, and keeps to what its campaign says."""

    def __init__(self, spec: dict[str, Any], messages: Messages) -> None:
        self.spec, self.messages = spec, messages
        self.folder = Path(spec["folder"])
        self.configuration = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_cls=f"{__name__}.Worker")
        )
        self.worker = Worker(self)
        self.choices: list[str] = []
        self.failed: dict[str, dict[str, str]] = {}
        self.loading: Any = None
        self._model: models.Small | None = None
        self._kept: list[torch.Tensor] | None = None
        self._points: Counter[str] = Counter()

    @property
    def model(self) -> models.Small:
        assert self._model is not None
        return self._model

    def point(self, state: str, what: str, numbered: bool = False) -> None:
        """Come by a point; wait there for a line if the campaign wants so."""
        name = f"{state}:{what}"
        if numbered:
            name, count = f"{name}:{self._points[name]}", name
            self._points[count] += 1
        self.wait_at(name)

    def wait_at(self, name: str) -> None:
        if name in self.spec["stops"]:
            self.spec["stops"].remove(name)
            say("at", point=name)
            sys.stdin.readline()

    # -- what vLLM's loader does ------------------------------------------------------------------

    def load(self) -> None:
        """Load the model, and begin to lend it."""
        group: Any = SimpleNamespace(rank_in_group=0, world_size=1)
        options = LoaderOptions.read(self.spec["options"])
        states = [] if options.state == CHECKPOINT else [PROCESSED, LOADED]
        if options.state in states:
            states = [options.state]
        with RankRun(
            "Engine",
            meant_by(self.spec["called"], given=options.model),
            options,
            {
                state: mx.ProcessingKey(engine="small", dtype="fp32", state=state)
                for state in states
            },
            Ranks(group, group, (0, 1)),
            self.folder,
        ) as run:
            self.loading = run.loading
            watching.watch(run.loading, self.configuration)
            while self._model is None:
                with contextlib.suppress(GivenUpError):
                    self._try(run)
            if run.lends == PROCESSED:
                run.lend(slots_of(self.model, non_persistent=True), before_processing=False)
            run.loaded(self.model)
            self.point(self.choices[-1], "started")

    def _try(self, run: RankRun) -> None:
        state = run.choice.state or ORDINARY
        self.choices.append(state)
        self.point(state, "chosen")
        load = self._load_processed if state == PROCESSED else self._load_and_process
        with undone_unless_kept("tests.starts") as keep:
            self._model = load(run, state)
            if self._model is not None:
                keep()

    def _load_processed(self, run: RankRun, state: str) -> models.Small | None:
        model = None
        try:
            with run.pull(hold=False) as pull:
                with torch.device("meta"):
                    model = models.Small()
                for layer in pull.layers():
                    self.point(state, "layer", numbered=True)
                    for _ in run.compared(layer.tensors().items()):
                        pass
                self.point(state, "filled")
                replace(model, pull.state_dict(), torch.device("cpu"))
        except Exception as error:  # noqa: BLE001 - as the loaders of engines do
            run.error, model = error, None
            self.failed[state] = told(error)
        return model if run.agreed(model is not None) else None

    def _load_and_process(self, run: RankRun, state: str) -> models.Small:
        model = models.Small()
        if state == ORDINARY:
            model.load_weights(self._arriving(state, self._on_disk()))
        else:
            run.load(lambda: self._fill(run, state, model))
        run.lend_loaded(slots_of(model, non_persistent=False))
        for block in model.layers:
            self.point(state, "processing", numbered=True)
            assert isinstance(block, models.Block)
            block.process()
        return model

    def _fill(self, run: RankRun, state: str, model: models.Small) -> None:
        try:
            self._filled(run, state, model)
            self.point(state, "filled")
        except Exception as error:
            self.failed[state] = told(error)
            raise

    def _filled(self, run: RankRun, state: str, model: models.Small) -> None:
        if state == LOADED:
            run.fill(
                slots_of(model, non_persistent=False),
                lambda _: self.point(state, "layer", numbered=True),
            )
            return
        pull = run.pull(hold=False)
        if (theirs := pull.files().get("config.json")) is not None:
            check_configuration(models.CONFIG, theirs)
        for layer in pull.layers():
            self.point(state, "layer", numbered=True)
            model.load_weights(run.compared(layer.tensors().items()))
        pull.wait()

    def _on_disk(self) -> Iterable[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        return load_file(str(self.folder / "model.safetensors")).items()

    def _arriving(
        self, state: str, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for number, each in enumerate(tensors):
            if number < 2 * LAYERS and not number % 2:
                self.point(state, "layer", numbered=True)
            yield each

    # -- what a worker does -----------------------------------------------------------------------

    def fall_asleep(self, *, keep: bool) -> None:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._kept = [each.detach().clone() for each in tensors] if keep else None
        for each in tensors:
            each.data.fill_(float("nan"))

    def awake(self) -> None:
        if self._kept is not None:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            for each, kept in zip(tensors, self._kept, strict=True):
                each.data.copy_(kept)

    def reload(self) -> None:
        model = models.Small()
        model.load_weights(self._on_disk())
        for here, there in zip(self.model.layers, model.layers, strict=True):
            assert isinstance(here, models.Block) and isinstance(there, models.Block)
            there.process()
            here.proj.weight.data.copy_(there.proj.weight)
            here.norm.data.copy_(there.norm)
            for name, buffer in there.proj.named_buffers():
                getattr(here.proj, name).data.copy_(buffer)
        self.model.embed_tokens.weight.data.copy_(model.embed_tokens.weight)

    def status(self) -> dict[str, Any]:
        """Return what the engine has, and what it says of it."""
        said = watching.status(self.worker)
        return {
            "choices": self.choices,
            "failed": self.failed,
            "digest": models.digest_of(self.model),
            "status": said,
            "lines": self.messages.lines,
        }

    def until_lent(self) -> None:
        """Wait until what is lent is lent, or is not."""
        lender = None if self.loading is None else self.loading.lender
        while lender is not None and lender.state == "starting":
            time.sleep(0.02)

    def obey(self) -> None:
        """Do what the campaign asks for."""
        for line in sys.stdin:
            do, error = json.loads(line)["do"], None
            try:
                self._calls()[do]()
            except Exception as raised:  # noqa: BLE001 - reported
                error = raised
            say("done", do=do, error=told(error), **self.status())
            error = None

    def _calls(self) -> dict[str, Callable[[], object]]:
        worker = self.worker

        def update() -> None:
            worker.start_weight_update()
            worker.update_weights()
            worker.finish_weight_update()

        def sleep() -> None:
            worker.sleep(1)
            self.wait_at(ASLEEP)

        def discard() -> None:
            worker.sleep(2)
            self.wait_at(ASLEEP)

        return {
            "sleep": sleep,
            "discard": discard,
            "wake": worker.wake_up,
            "update": update,
            "write": lambda: models.updated(self.model),
            "reload": worker.reload_weights,
            "status": self.until_lent,
        }

    def close(self) -> None:
        """End lending, as vLLM's worker does when it shuts down."""
        if self.loading is not None:
            self.worker.shutdown()
        self._model = self._kept = None


def _left(before: Holdings) -> list[str]:
    """Return what is held that was not before, once it had time to go."""
    until_s = time.monotonic() + GONE_S
    while True:
        gc.collect()
        found = [each for each in Holdings.now().beyond(before) if _is_ours(each)]
        if not found or time.monotonic() > until_s:
            return found
        time.sleep(0.05)


def _is_ours(held: str) -> bool:
    """Return False for what libraries keep for a process's life."""
    kept = ("anon_inode:", "pipe:", "/dev/urandom", "/dev/null")
    return not held.startswith("level ") and not any(each in held for each in kept)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the program."""
    spec = json.loads(sys.argv[1])
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(1)
    messages = Messages()
    logger = logging.getLogger("engine.mx_peer")
    logger.setLevel(logging.INFO)
    logger.addHandler(messages)
    setattr(watching, "_process_again", lambda worker: None)  # vLLM's own  # noqa: B010
    before, code = Holdings.now(), 0
    engine = Engine(spec, messages)
    ended: BaseException | None = None
    say("ready")
    try:
        try:
            engine.load()
            engine.until_lent()
            say("loaded", **engine.status())
            engine.obey()
        finally:
            engine.close()
    except Exception as error:  # noqa: BLE001 - reported
        say("failed", error=told(error), choices=engine.choices, failed=engine.failed,
            lines=messages.lines)  # fmt: skip
        code = 3
        traceback.clear_frames(error.__traceback__)
    except BaseException as error:  # noqa: BLE001 - raised again
        traceback.clear_frames(error.__traceback__)
        ended = error.with_traceback(None)
        ended.__context__ = None
    del engine
    say("left", left=_left(before), interrupted=ended is not None)
    if ended is not None:
        raise ended
    sys.exit(code)
