"""A small router: sends requests to replicas while they still load, and shows how they load.

    python examples/router.py                                    # a demonstration on this machine
    python examples/router.py MODEL --coordinator HOST:PORT --allow 10.0.0.0/8   # for your own

    GET  /            the timeline of each replica, as a page that follows along
    GET  /replicas    what is known of each replica, as JSON
    GET  /events      every event as it comes, as server-sent events
    GET  /estimate    how long another replica would take at ?at=HOST, and from whom, as JSON
    GET  /metrics     for Prometheus
    POST /generate    a request, which goes to the best replica that takes requests

The demonstration starts a coordinator, a source that serves 4 MB/s, and a replica, which answers
before it is loaded; then a second replica, and ends the first. It serves until Ctrl-C, or for
`--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import router_http as http
from router_demo import Demo
from router_state import Replicas

import mx

PAGE = Path(__file__).with_name("router.html")
#: How long a replica gets for its answer; it may have to wait for layers.
ANSWER_S = 120.0
KEEP_ALIVE_S = 15.0


class Service:
    """The routes. `replicas` follows a watch, which `follow` reads."""

    def __init__(self, router: mx.Router, model: str) -> None:
        self.router = router
        self.model = model
        self.replicas = Replicas(model)

    async def follow(self) -> None:
        """Take up the events of the model's replicas, until the router is closed."""
        async for event in self.router.watch(self.model):
            self.replicas.take(event)

    async def handle(self, request: http.Request) -> http.Answer:
        """Answer one request."""
        match request.method, request.path:
            case "GET", "/":
                return http.Answer(PAGE.read_bytes(), "text/html; charset=utf-8")
            case "GET", "/replicas":
                return http.json_answer(self.replicas.objects())
            case "GET", "/events":
                return http.Answer(self.stream(), "text/event-stream")
            case "GET", "/estimate":
                return await self.estimate(request.query.get("at", ""))
            case "GET", "/metrics":
                text = self.replicas.metrics()
                return http.Answer(text.encode(), "text/plain; version=0.0.4; charset=utf-8")
            case "POST", "/generate":
                return await self.generate(request)
        known = {"/", "/replicas", "/events", "/estimate", "/metrics", "/generate"}
        status = 405 if request.path in known else 404
        return http.json_answer({"error": f"no {request.method} {request.path}"}, status)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield what is there, then each event, as server-sent events."""
        with self.replicas.subscribed() as queue:
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        text = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if text is None:  # it was read too slowly: the browser connects again
                    return
                yield f"data: {text}\n\n".encode()

    async def estimate(self, at: str) -> http.Answer:
        """Answer with how long another replica would take."""
        try:
            found = await self.router.estimate_async(self.model, at, attach=False)
        except mx.MxError as error:
            return http.json_answer({"error": str(error)}, 400)
        return http.json_answer(
            {
                "host": found.host,
                "seconds_to_first_layer": found.seconds_to_first_layer,
                "seconds_to_ready": found.seconds_to_ready,
                "gb_per_s": found.gb_per_s,
                "measured": found.measured,
                "paths": [f"{path.label} from {path.source.endpoint}" for path in found.paths],
                "why_none": found.why_none,
            }
        )

    async def generate(self, request: http.Request) -> http.Answer:
        """Pass a request to a replica; to the next one if that does not take it."""
        tried: set[str] = set()
        while (replica := self.replicas.choose(tried)) is not None:
            tried.add(replica.replica_id)
            answer = await self._asked(replica, request)
            if answer is not None:
                return answer
        return http.json_answer(
            {"error": f"no replica of {self.model} takes requests now"}, 503, {"Retry-After": "1"}
        )

    async def _asked(self, replica: mx.Replica, request: http.Request) -> http.Answer | None:
        """Return a replica's answer, which is passed on as it comes; None if it does not take the
        request. What it says of the request itself (4xx) is an answer, too."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.replicas.in_flight(replica))
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = await stack.enter_async_context(
                        http.posted(replica.requests, request.path, request.body)
                    )
                    first = await anext(reply.parts, b"")
            except (OSError, EOFError, ValueError, TimeoutError):
                self.replicas.failed(replica)
                return None
            if reply.status == 429:  # it has enough to do, and nothing is wrong with it
                return None
            if not 200 <= reply.status < 500:
                self.replicas.failed(replica)
                return None
            body = self._passed_on(replica, reply, first, stack.pop_all())
            headers = {**reply.framing, "X-Replica": replica.replica_id}
            return http.Answer(body, reply.kind, reply.status, headers)

    async def _passed_on(
        self,
        replica: mx.Replica,
        reply: http.Reply,
        first: bytes,
        stack: contextlib.AsyncExitStack,
    ) -> AsyncIterator[bytes]:
        """Yield the parts of an answer. One that breaks off ends the connection of the client, who
        can tell it by the framing."""
        async with stack:
            part = first
            try:
                while part:
                    yield part
                    async with asyncio.timeout(ANSWER_S):
                        part = await anext(reply.parts, b"")
            except (OSError, EOFError, TimeoutError):
                self.replicas.failed(replica)
                return
            self.replicas.answered(replica)


async def run(
    model: str, coordinator: str, allow: list[str], listen: str, seconds: float, demo: bool
) -> None:
    """Serve until cancelled, or for so many seconds."""
    task = asyncio.current_task()
    assert task is not None
    # So that the processes of the demonstration end, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        if demo:
            demonstration = await stack.enter_async_context(Demo(model))
            coordinator = demonstration.coordinator
        router = await stack.enter_async_context(mx.Router(coordinator, allow=allow))
        service = Service(router, model)
        server = await stack.enter_async_context(http.serving(service.handle, listen))
        address = http.address_of(server)
        print(f"the page: http://{address}/", flush=True)
        print(f"requests: POST http://{address}/generate", flush=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(service.follow())]
            if demo:
                running.append(tasks.create_task(demonstration.play(address)))
            if seconds:
                await asyncio.sleep(seconds)
            else:
                await asyncio.Event().wait()
            for task in running:
                task.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--coordinator", help="HOST:PORT; without it a demonstration is started")
    parser.add_argument(
        "--allow",
        action="append",
        metavar="HOST",
        help="send requests only there: a network, an address or a name; again for more "
        "(by default this machine)",
    )
    parser.add_argument("--listen", default="127.0.0.1:0", help="where to serve HTTP")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so long")
    given = parser.parse_args()
    demo = given.coordinator is None
    try:
        allow = given.allow or ["127.0.0.0/8", "::1"]
        asyncio.run(
            run(given.model, given.coordinator or "", allow, given.listen, given.seconds, demo)
        )
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    except mx.MxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ExceptionGroup as group:  # of the tasks
        error = group.exceptions[0]
        if not isinstance(error, mx.MxError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
