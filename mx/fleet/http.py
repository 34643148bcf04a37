"""What routers in other languages ask over HTTP: `/v1/...` of `mx web`, read only, as JSON.

docs/http.md describes it, and `openapi.json` beside this file, which is served, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mx.config import Settings
from mx.core.budget import Budget
from mx.core.estimates import Estimate
from mx.core.holdings import ranges_of
from mx.core.replicas import FleetEvent, Replica
from mx.errors import (
    CapacityError,
    ConfigError,
    MxError,
    NoSourceError,
    NotAllowedError,
    UnknownModelError,
)
from mx.fleet.router import MAX_PLACES, MAX_WATCHES, Router
from mx.fleet.router_watch import Watch
from mx.tasks import end_tasks

_DESCRIPTION = Path(__file__).with_name("openapi.json")
#: A stream says something so often: both ends notice when the other is gone.
TICK_S = 5.0
#: The status of an error; the first that fits. All else is the coordinator's side.
_STATUS: tuple[tuple[type[MxError], int], ...] = (
    (UnknownModelError, 404),
    (NoSourceError, 404),
    (NotAllowedError, 403),
    (CapacityError, 503),
    (ConfigError, 400),
)

Answer = Callable[[Router, Request], Awaitable[object]]


@contextmanager
def applications(settings: Settings, headers: Mapping[str, str]) -> Iterator[dict[str, ASGIApp]]:
    """Ask a coordinator while the block runs.

    Args:
        settings: Which one, and how.
        headers: Those of each answer.

    Yields:
        An ASGI application for each path. What they are asked has been admitted.
    """
    with Router(settings.coordinator, settings=settings) as router:
        found: dict[str, ASGIApp] = {
            path: _Question(router, answer, headers) for path, answer in _ANSWERS.items()
        }
        found["/v1/watch"] = _Stream(router, headers)
        yield found


class _Question:
    def __init__(self, router: Router, answer: Answer, headers: Mapping[str, str]) -> None:
        self._router, self._answer, self._headers = router, answer, dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = await self._answer(self._router, Request(scope))
            answer: Response = JSONResponse(found, headers=self._headers)
        except MxError as error:
            answer = _refused(error, self._headers)
        await answer(scope, receive, send)


class _Stream:
    def __init__(self, router: Router, headers: Mapping[str, str]) -> None:
        self._router, self._headers = router, dict(headers)
        #: The open ones by the address of who reads.
        self._open = Budget(MAX_WATCHES, "{} watches are open")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._open.held((scope.get("client") or ("?", 0))[0]))
                watch = self._router.watch(_one(Request(scope), "model"))
            except MxError as error:
                await _refused(error, self._headers)(scope, receive, send)
                return
            await self._serve(watch, scope, receive, send)

    async def _serve(self, watch: Watch, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            ends = [
                asyncio.create_task(_gone(receive), name="mx-http-gone"),
                asyncio.create_task(
                    self._send(watch, send, is_head=scope["method"] == "HEAD"), name="mx-http-send"
                ),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(*ends)
        finally:
            await asyncio.to_thread(watch.close)

    async def _send(self, watch: Watch, send: Send, *, is_head: bool) -> None:
        names = {**self._headers, "content-type": "text/event-stream; charset=utf-8"}
        headers = [(name.encode(), value.encode()) for name, value in names.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if is_head:
            await send({"type": "http.response.body"})
            return

        async def tell(text: str) -> None:
            # Waits while the reader is slow; what it misses meanwhile the watch tells again.
            body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            await send(body)

        coming = asyncio.ensure_future(watch.next_async())
        try:
            while True:
                await asyncio.wait([coming], timeout=TICK_S)
                if not coming.done():
                    await tell(": tick\n\n")
                    continue
                event = coming.result()
                if event is None:
                    break
                await tell(f"event: {event.kind.value}\ndata: {json.dumps(_event(event))}\n\n")
                coming = asyncio.ensure_future(watch.next_async())
        except MxError as error:
            await tell(f"event: error\ndata: {json.dumps(_error(error))}\n\n")
        finally:
            await end_tasks(coming)
        await send({"type": "http.response.body"})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the questions ---------------------------------------------------------------------------------


async def _replicas(router: Router, request: Request) -> object:
    found = await router.replicas_async(_one(request, "model"))
    return {"replicas": [_replica(each) for each in found]}


async def _estimate(router: Router, request: Request) -> object:
    found = await router.estimate_async(
        _one(request, "model", needed=True),
        _one(request, "at", needed=True),
        variant=_one(request, "variant"),
        attach=_flag(request, "attach"),
    )
    return _estimate_object(found)


async def _place(router: Router, request: Request) -> object:
    hosts = request.query_params.getlist("host")
    if not hosts:
        raise ConfigError("`host` is missing", hint=f"give 1 to {MAX_PLACES} of them")
    found = await router.place_async(
        _one(request, "model", needed=True),
        hosts,
        variant=_one(request, "variant"),
        attach=_flag(request, "attach"),
    )
    return {"estimates": [_estimate_object(each) for each in found]}


async def _described(router: Router, request: Request) -> object:
    return json.loads(_DESCRIPTION.read_text())


_ANSWERS: dict[str, Answer] = {
    "/v1/replicas": _replicas,
    "/v1/estimate": _estimate,
    "/v1/place": _place,
    "/v1/openapi.json": _described,
}


def _one(request: Request, name: str, *, needed: bool = False) -> str:
    found = request.query_params.getlist(name)
    if len(found) > 1 or (needed and not any(found)):
        raise ConfigError(f"`{name}` is to be given once", hint=f"?{name}=...")
    return found[0] if found else ""


def _flag(request: Request, name: str) -> bool:
    text = _one(request, name) or "true"
    if text not in ("true", "false"):
        raise ConfigError(f"`{name}={text}` is not understood", hint="it is true or false")
    return text == "true"


# -- what is answered ------------------------------------------------------------------------------


def _replica(replica: Replica) -> dict[str, object]:
    return {
        "id": replica.replica_id,
        "model": replica.model.name,
        "revision": replica.model.revision,
        "variant": replica.model.variant,
        "host": replica.host,
        "state": replica.state.value,
        "endpoint": replica.endpoint,
        "requests": replica.requests,
        "layers": replica.layers,
        "ready": [list(each) for each in ranges_of(replica.ready_layers)],
        "bytes": replica.nbytes,
        "done_bytes": replica.done_bytes,
        "gb_per_s": round(replica.gb_per_s, 3),
        "origin": replica.origin,
    }


def _event(event: FleetEvent) -> dict[str, object]:
    return {
        "kind": event.kind.value,
        "replica": None if event.replica is None else _replica(event.replica),
        "layers": list(event.layers),
        "reason": event.reason,
        "known_before": event.known_before,
    }


def _estimate_object(found: Estimate) -> dict[str, object]:
    return {
        "model": found.model.name,
        "revision": found.model.revision,
        "variant": found.model.variant,
        "host": found.host,
        "bytes": found.size.nbytes,
        "gb_per_s": round(found.gb_per_s, 3),
        "first_layer_s": found.seconds_to_first_layer,
        "ready_s": found.seconds_to_ready,
        "measured": found.measured,
        "attaches": found.attaches,
        "partial": found.partial,
        "why_none": found.why_none,
        "paths": [
            {"source": path.source.endpoint, "transport": path.transport} for path in found.paths
        ],
        "costs": [
            {
                "source": cost.endpoint,
                "bytes": cost.nbytes,
                "gb_per_s": round(cost.gb_per_s, 3),
                "readers": cost.readers,
                "slowdown": round(cost.slowdown, 3),
            }
            for cost in found.costs
        ],
    }


def _error(error: MxError) -> dict[str, object]:
    said = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"error": said}


def _refused(error: MxError, headers: Mapping[str, str]) -> Response:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 502)
    return JSONResponse(_error(error), status, headers=dict(headers))
