"""A replica for examples/router.py: a stand-in for an engine that answers while it loads.

It pulls a model, and says that it takes requests once the first layer is there. A request is
computed layer by layer, as a forward is: it waits for each layer that has not arrived yet, so that
the first requests are answered a moment after the last layer, and not only begun then. What it
computes is a checksum over what the layers are called: an engine is not the point here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import zlib

import mx


class Engine:
    """Answers requests over the layers of a pull, as far as they have arrived."""

    def __init__(self, pull: mx.Pull) -> None:
        self.pull = pull
        self.sums: list[int] = []
        self.grown = asyncio.Event()

    async def load(self, port: int) -> None:
        """Take up layers as they become ready; take requests from the first one on."""
        async for event in self.pull.layers_async():
            self.sums.append(zlib.crc32(f"{event.name} {event.nbytes}".encode()))
            self.grown.set()
            if event.index == 0:
                self.pull.accept_requests(port)
        if self.pull.report is None:
            await self.pull

    async def answer(self, prompt: str, layers: int) -> dict[str, object]:
        """Compute over all layers in order, waiting for each."""
        began_s, had = time.monotonic(), len(self.sums)
        value = zlib.crc32(prompt.encode())
        for index in range(layers):
            while len(self.sums) <= index:
                self.grown.clear()
                await self.grown.wait()
            value = zlib.crc32(value.to_bytes(4, "big"), self.sums[index])
        return {
            "answer": f"{value:08x}",
            "layers": layers,
            "layers_at_begin": had,
            "waited_s": round(time.monotonic() - began_s, 3),
        }


async def _answer(engine: Engine, body: bytes) -> dict[str, object] | None:
    """Return the answer to a request's body, None if it is none."""
    try:
        prompt = str(json.loads(body or b"{}").get("prompt", ""))
    except (ValueError, AttributeError):
        return None
    manifest = await asyncio.to_thread(engine.pull.wait_manifest)
    return await engine.answer(prompt, len(manifest.layout.layers))


async def serve(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one POST with a JSON body."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.decode("latin-1").split("\r\n")[1:]:
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                length = min(int(value), 1 << 20)
        status, found = "200 OK", await _answer(engine, await reader.readexactly(length))
        if found is None:
            status, found = "400 Bad Request", {"error": 'the body is not {"prompt": "x"}'}
        body = json.dumps(found).encode()
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
    except (ValueError, OSError, EOFError, asyncio.LimitOverrunError):
        pass  # the client sent no request, or has gone
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def run(coordinator: str, model: str, host: str) -> None:
    """Serve until the process is ended."""
    with mx.pull(model, coordinator=coordinator, transport="tcp", hold=True, wait_s=60) as pull:
        engine = Engine(pull)
        server = await asyncio.start_server(
            lambda reader, writer: serve(engine, reader, writer), host, 0
        )
        async with server:
            await engine.load(server.sockets[0].getsockname()[1])
            await asyncio.to_thread(pull.hold)
            await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(arguments.coordinator, arguments.model, arguments.host))


if __name__ == "__main__":
    main()
