"""Around the calls of a worker that change weights: what is lent is withdrawn meanwhile."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mx.engines.replica.lender import Lender

#: What `status` is called as a method of vLLM's workers.
STATUS_METHOD = "mx_peer_status"


class Loading:
    """What one worker loaded, and lends."""

    def __init__(self, name: str, vllm_config: Any) -> None:
        self.name, self.vllm_config = name, vllm_config
        self.lender: Lender | None = None
        self.refused = 0
        self.loads: Counter[str] = Counter()
        #: True between a sleep that discards the weights and the update that writes them again.
        self.discarded = False

    def count(self, how: str) -> None:
        """Count a load: from "processed", "loaded" or "checkpoint", or "ordinary"."""
        self.loads[how] += 1

    def withdraw(self, reason: str) -> None:
        """Give the weights to no reader while `reason` lasts."""
        if self.lender is not None:
            self.lender.withdraw(reason)

    def restore(self, reason: str, *, failed: bool = False) -> None:
        """Lend the weights again, as they are now."""
        if self.lender is not None:
            self.lender.restore(reason, failed=failed)


_loadings: list[Loading] = []


def loading_of(worker: Any) -> Loading | None:
    """Return what a worker loaded with mx, or None."""
    config = getattr(worker, "vllm_config", None)
    return next((each for each in _loadings if each.vllm_config is config), None)


def status(worker: Any) -> dict[str, object]:
    """Return what a worker loaded and lends: `llm.collective_rpc("mx_peer_status")`.

    Args:
        worker: vLLM's worker.

    Returns:
        `model`, `loads` (how often from which state, or by the ordinary loader), `refused` (how
        often another key, or none, was refused), `lending` (the state of lending), `revision`,
        `identity`, and `why` if nothing is lent.
    """
    loading = loading_of(worker)
    if loading is None:
        return {"model": "", "loads": {}, "refused": 0, "lending": "off", "why": ""}
    lender = loading.lender
    source = None if lender is None else lender.source
    return {
        "model": loading.name,
        "variant": "" if lender is None else str(lender.key),
        "loads": dict(loading.loads),
        "refused": loading.refused,
        "lending": "off" if lender is None else lender.state,
        "revision": "" if source is None else source.model.revision,
        "identity": "" if source is None else source.identity_hex,
        "why": "" if lender is None else lender.why,
    }


@contextlib.contextmanager
def changing(worker: Any) -> Iterator[None]:
    """Write to a worker's weights inside the block, for worker extensions that do so themselves.

    vLLM's own updates need none.

    Args:
        worker: vLLM's worker, `self` in an extension.
    """
    loading = loading_of(worker)
    if loading is None:
        yield
        return
    loading.withdraw("an extension")
    failed = True
    try:
        yield
        failed = False
    finally:
        loading.restore("an extension", failed=failed)


def watch(loading: Loading) -> None:
    """Withdraw what this process lends around the worker's calls that change it.

    Args:
        loading: What a worker is about to load.
    """
    _loadings[:] = [each for each in _loadings if each.vllm_config is not loading.vllm_config]
    _loadings.append(loading)
    module, _, name = str(loading.vllm_config.parallel_config.worker_cls).rpartition(".")
    worker = getattr(sys.modules.get(module), name, None)
    if worker is None or STATUS_METHOD in vars(worker):
        return
    setattr(worker, STATUS_METHOD, status)
    for method, around in _AROUND.items():
        original = getattr(worker, method, None)
        if original is not None:
            setattr(worker, method, _wrapped(original, around))


Call = Callable[[], Any]


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(worker: Any, *arguments: Any, **named: Any) -> Any:
        loading = loading_of(worker)
        call = functools.partial(original, worker, *arguments, **named)
        if loading is None:
            return call()
        return around(loading, call, *arguments, **named)

    return method


def _sleep(loading: Loading, call: Call, level: int = 1, *_: Any, **__: Any) -> Any:
    loading.withdraw("sleep")
    result = call()
    loading.discarded = loading.discarded or level >= 2
    return result


def _discard(loading: Loading, call: Call, *_: Any, **__: Any) -> Any:
    loading.withdraw("sleep")
    loading.discarded = True
    return call()


def _wake_up(loading: Loading, call: Call, tags: list[str] | None = None, **_: Any) -> Any:
    result = call()
    if (tags is None or "weights" in tags) and not loading.discarded:
        loading.restore("sleep")
    return result


def _begin_update(loading: Loading, call: Call, *_: Any, **__: Any) -> Any:
    loading.withdraw("an update")
    try:
        return call()
    except BaseException:
        loading.restore("an update", failed=True)
        raise


def _go_on(loading: Loading, call: Call, *_: Any, **__: Any) -> Any:
    try:
        return call()
    except BaseException:
        loading.restore("an update", failed=True)
        raise


def _end_update(loading: Loading, call: Call, *arguments: Any, **named: Any) -> Any:
    result = _go_on(loading, call)
    _written(loading)
    loading.restore("an update")
    return result


def _reload(loading: Loading, call: Call, *arguments: Any, **named: Any) -> Any:
    _begin_update(loading, call)
    _written(loading)
    loading.restore("an update")


def _written(loading: Loading) -> None:
    """The weights are written again: what sleep discarded is there."""
    if loading.discarded:
        loading.discarded = False
        loading.restore("sleep")


def _shut_down(loading: Loading, call: Call, *_: Any, **__: Any) -> Any:
    if loading.lender is not None:
        loading.lender.close()
    return call()


_AROUND: dict[str, Callable[..., Any]] = {
    "sleep": _sleep,
    "wake_up": _wake_up,
    "discard": _discard,
    "reload_weights": _reload,
    "start_weight_update": _begin_update,
    "update_weights": _go_on,
    "finish_weight_update": _end_update,
    "shutdown": _shut_down,
}
