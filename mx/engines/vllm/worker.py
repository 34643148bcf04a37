"""Withdraws what a worker lends during its calls that change weights."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mx.engines.replica.lender import ASLEEP, DISCARDED
from mx.engines.replica.loading import RankLoading
from mx.errors import ConfigError, LocalError

#: What `status` is called as a method of vLLM's workers.
STATUS_METHOD = "mx_peer_status"
#: And `freeze`.
FREEZE_METHOD = "mx_peer_freeze"
#: Why weights are withdrawn. Each may last while another begins and ends.
_EXTENSION, _UPDATE, _RELOAD = "an extension", "an update", "a reload"


class _WatchedModel:
    """What one worker loaded, and lends."""

    def __init__(self, loading: RankLoading, vllm_config: Any) -> None:
        self.loading, self.vllm_config = loading, vllm_config
        #: How many blocks of `changing` are open, one in the other, and whether one has failed.
        self.blocks, self.failed = 0, False
        #: Returns the worker, which the last call was of.
        self.worker: Callable[[], Any] = lambda: None
        #: Whether the weights may be others than were loaded.
        self.changed = False
        #: Whether a sleep has discarded weights that nothing is lent of.
        self.discarded = False

    def withdraw(self, reason: str) -> None:
        """Serve the weights to no reader while `reason` lasts."""
        self.changed |= reason not in (ASLEEP, DISCARDED)
        if self.loading.lender is not None:
            self.loading.lender.withdraw(reason)

    def restore(self, reason: str, *, failed: bool = False) -> None:
        """Lend the weights again, as they are now."""
        if self.loading.lender is not None:
            self.loading.lender.restore(reason, failed=failed)
        elif reason == DISCARDED and not failed:
            self.discarded = False

    @contextlib.contextmanager
    def changing(self, reason: str) -> Iterator[None]:
        """Write to all of the weights inside the block, while `reason` lasts."""
        self.withdraw(reason)
        failed = True
        try:
            yield
            self.restore(DISCARDED)
            failed = False
        finally:
            self.restore(reason, failed=failed)

    def refill(self, worker: Any) -> None:
        """Take weights that a sleep has discarded from a peer again, if that was asked for.

        Raises:
            LocalError: That failed: what the worker computes with is not its model.
        """
        lender = self.loading.lender
        if self.loading.wake != "peer":
            return
        if lender is not None:
            lender.refill(lambda: _process_again(worker))
        elif self.discarded:
            raise LocalError(
                f"no weights of {self.loading.name} were lent, so nothing says which ones sleep "
                "has discarded",
                hint="reload the weights before you wake up",
            )

    def written(self, what: str) -> None:
        """Serve the weights to no reader until an update writes them again."""
        if self.loading.lender is not None:
            self.loading.lender.written(what)


_watched: list[_WatchedModel] = []


def _watched_of(worker: Any) -> _WatchedModel | None:
    config = getattr(worker, "vllm_config", None)
    return next((each for each in _watched if each.vllm_config is config), None)


def weights_of(vllm_config: Any) -> tuple[str, str | None]:
    """Return the name of the model that this process's worker has loaded by `mx-peer`, and the
    identity of its weights as they are now, in hexadecimal: "" while they change; None where they
    were not loaded so, or nothing watches them."""
    watched = next((each for each in _watched if each.vllm_config is vllm_config), None)
    if watched is None:
        return "", None
    loading = watched.loading
    if loading.lender is None:
        return loading.name, "" if watched.changed else loading.identity or None
    source = loading.lender.source
    return loading.name, "" if source is None else source.identity_hex


def status(worker: Any) -> dict[str, object]:
    """Return what a worker loaded and lends: `llm.collective_rpc("mx_peer_status")`.

    Args:
        worker: vLLM's worker.

    Returns:
        `model`, `loads` (how often from which state, or by the ordinary loader), `refused` (how
        often another key, or none, was refused), `lending` (the state of lending), `revision`,
        `identity`, `source` (who served what was taken), and `why` if nothing is lent. With
        `MxConnector`, `kv`: how many KV blocks were loaded, failed, stored, not stored. With the
        weight transfer backend `mx`, `update`: the last one's revision, and how long it paused the
        worker.
    """
    watched = _watched_of(worker)
    found: dict[str, object] = {"model": "", "loads": {}, "refused": 0, "lending": "off", "why": ""}
    if watched is not None:
        if watched.loading.lender is not None:
            watched.loading.lender.look(devices=True)  # on the worker's thread: it may use devices
        found = watched.loading.status()
    if (counts := getattr(_connector(), "counts", None)) is not None:
        found["kv"] = dict(counts)
    if (update := getattr(_transfer_of(worker), "updated", None)) is not None:
        found["update"] = dict(update)
    return found


def _transfer_of(worker: Any) -> Any:
    """Return a worker's engine of weight transfer; None if it has none."""
    return getattr(worker, "weight_transfer_engine", None)


def _connector() -> Any:
    """Return this process's connector for KV blocks; None if it has none."""
    # vLLM imports it for an engine with a connector.
    kv_transfer = sys.modules.get("vllm.distributed.kv_transfer")
    if kv_transfer is None or not kv_transfer.has_kv_transfer_group():
        return None
    return kv_transfer.get_kv_transfer_group()


def freeze(worker: Any, folder: str, kv_bytes: str = "") -> dict[str, object]:
    """Write what a worker lends to a snapshot, of which it is one rank:
    `llm.collective_rpc("mx_peer_freeze", args=(folder,))`.

    Args:
        worker: vLLM's worker.
        folder: The snapshot's, the same for all ranks.
        kv_bytes: How much of KV blocks is written, too, such as "2GiB": those of the prompts of use
            last that `MxConnector` has in this worker's pool.

    Returns:
        The fields of `mx.FreezeReport`.

    Raises:
        ConfigError: Nothing is lent, or there is no such pool.
        MxError: As `mx.freeze`.
    """
    watched = _watched_of(worker)
    if watched is None or watched.loading.lender is None:
        raise ConfigError("this worker lends nothing", hint="load by `mx-peer`, with `lend`")
    return dict(vars(watched.loading.lender.freeze(folder, kv_bytes=kv_bytes or 0)))


@contextlib.contextmanager
def changing(worker: Any) -> Iterator[None]:
    """Write to a worker's weights inside the block, for worker extensions that do so themselves.

    vLLM's own updates need no such block. Of nested blocks the outermost counts. If an extension
    writes outside of one, that is noticed: the weights are withdrawn, and lent again after the next
    update, or block, which may be empty.

    Args:
        worker: vLLM's worker, `self` in an extension.
    """
    watched = _watched_of(worker)
    if watched is None:
        yield
        return
    if not watched.blocks:
        watched.withdraw(_EXTENSION)
        watched.failed = False
    watched.blocks += 1
    try:
        yield
    except BaseException:
        watched.failed = True
        raise
    finally:
        watched.blocks -= 1
        if not watched.blocks:
            if not watched.failed:
                watched.restore(DISCARDED)
            watched.restore(_EXTENSION, failed=watched.failed)


def watch(loading: RankLoading, vllm_config: Any) -> None:
    """Withdraw what this process lends around the worker's calls that change it.

    Args:
        loading: What a worker is about to load.
        vllm_config: The worker's configuration.
    """
    for each in [each for each in _watched if each.vllm_config is vllm_config]:
        _close(each)  # the worker loads its model anew
    _watched.append(_WatchedModel(loading, vllm_config))
    module, _, name = str(vllm_config.parallel_config.worker_cls).rpartition(".")
    worker = getattr(sys.modules.get(module), name, None)
    if worker is None or FREEZE_METHOD in vars(worker):
        return
    setattr(worker, STATUS_METHOD, status)
    setattr(worker, FREEZE_METHOD, freeze)
    for method, around in _AROUND.items():
        original = getattr(worker, method, None)
        if original is not None:
            setattr(worker, method, _wrapped(original, around))


Call = Callable[[], Any]


def _process_again(worker: Any) -> None:
    from mx.engines.vllm.processed import process_again

    process_again(worker.get_model(), worker.vllm_config)


def _plainly(call: Call) -> Any:
    from mx.engines.vllm.processed import plain_linears

    with plain_linears(True):
        return call()


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(worker: Any, *arguments: Any, **named: Any) -> Any:
        watched = _watched_of(worker)
        call = functools.partial(original, worker, *arguments, **named)
        if watched is None:
            return call()
        watched.worker = weakref.ref(worker)
        if watched.loading.plain:  # an update processes the weights as loading did
            call = functools.partial(_plainly, call)
        return around(watched, call, *arguments, **named)

    return method


def _sleep(watched: _WatchedModel, call: Call, level: int = 1, *_: Any, **__: Any) -> Any:
    return _fall_asleep(watched, call, discards=level >= 2)


def _discard(
    watched: _WatchedModel, call: Call, tags: Iterable[str] = (), *_: Any, **__: Any
) -> Any:
    return _fall_asleep(watched, call, discards=True) if "weights" in tags else call()


def _fall_asleep(watched: _WatchedModel, call: Call, *, discards: bool) -> Any:
    """Withdraw the weights until they are awake, also if `call` fails: it may have unmapped them
    before, as where vLLM finds that another process has taken what it freed."""
    if discards and watched.loading.wake and watched.loading.lender is not None:
        watched.loading.lender.look(devices=True)  # what was written to must not come back
    watched.withdraw(ASLEEP)
    if discards:
        watched.discarded = watched.loading.lender is None
        watched.withdraw(DISCARDED)
    return call()


def _wake_up(watched: _WatchedModel, call: Call, tags: list[str] | None = None, **_: Any) -> Any:
    result = call()
    if tags is None or "weights" in tags:
        watched.restore(ASLEEP)
        watched.refill(watched.worker())
    return result


def _begin_update(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    if getattr(watched.worker(), "_weight_update_active", False):
        return call()  # vLLM refuses, and the other update goes on
    watched.withdraw(_UPDATE)
    return _go_on(watched, call)


def _reset(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    watched.written("the worker's `reset_weights` was called")
    return call()


def _go_on(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    try:
        return call()
    except BaseException:
        # mx's own backend says whether it has written anything.
        failed = getattr(_transfer_of(watched.worker()), "has_written", True)
        watched.restore(_UPDATE, failed=failed)
        raise


def _end_update(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    result = _go_on(watched, call)
    watched.restore(DISCARDED)
    watched.restore(_UPDATE)
    return result


def _reload(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    with watched.changing(_RELOAD):
        return call()


def _compile(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    result = call()  # the last of what compiles before requests come
    if watched.loading.caches is not None:
        watched.loading.caches.compiled()
    return result


def _shut_down(watched: _WatchedModel, call: Call, *_: Any, **__: Any) -> Any:
    _close(watched)
    return call()


def _close(watched: _WatchedModel) -> None:
    if watched.loading.lender is not None:
        watched.loading.lender.close()
    if watched.loading.caches is not None:
        watched.loading.caches.close()
    _watched.remove(watched)


_AROUND: dict[str, Callable[..., Any]] = {
    "compile_or_warm_up_model": _compile,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "discard": _discard,
    "reload_weights": _reload,
    "reset_weights": _reset,
    "start_weight_update": _begin_update,
    # A draft model may share weights with the model that it drafts for.
    "start_draft_weight_update": _begin_update,
    "update_weights": _go_on,
    "finish_weight_update": _end_update,
    "shutdown": _shut_down,
}
