"""Measures grpc alone: a connection and a call to one server, then a connection to another one, as
a pull asks the coordinator and then connects to a source.

Both servers are in a process of their own, and answer at once. The client's loop runs all the
while, as that of mx does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import grpc.aio

_METHOD = "/bare/Call"
#: Else a channel uses the connection of an earlier one.
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def _serve() -> None:
    async def answer(request: bytes, _context: object) -> bytes:
        return request

    methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    servers = [grpc.aio.server() for _ in range(2)]
    for server in servers:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


class BareCalls:
    """The servers, and a client's loop. Close it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ports = [self._process.stdout.readline().strip() for _ in range(2)]
        self._addresses = [f"127.0.0.1:{port}" for port in ports]
        self._runner = asyncio.Runner()

    def connect_and_call(self, *, both: bool = False) -> float:
        """Return the seconds of two connections and one call; `both`: a call on each."""
        return self._runner.run(self._timed(both))

    async def _timed(self, both: bool) -> float:
        begin_s = time.perf_counter()
        first, second = (
            grpc.aio.insecure_channel(address, options=_OWN_CONNECTION)
            for address in self._addresses
        )
        async with first, second:
            await first.unary_unary(_METHOD, None, None)(b"")
            if both:
                await second.unary_unary(_METHOD, None, None)(b"")
            else:
                await second.channel_ready()
            return time.perf_counter() - begin_s

    def close(self) -> None:
        """End both."""
        self._runner.close()
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(_serve())
