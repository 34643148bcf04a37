"""A source that may lie about where it is and where its data is, and a port that counts
connections; each in a process of its own.

`python -m tests.integration.liar serve COORDINATOR HOST LIES` serves the model "m" of `lying` on
HOST and prints its endpoint. LIES is a JSON object: "place", fields of the place; "addresses", what
its tcp tickets name; "source_id".
`python -m tests.integration.liar count HOST` prints the port that it listens on, and "connected"
for each connection.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from mx import api, config, plugins, runtime
from mx.core.topology import Nic
from mx_transports.tcp.exposure import TcpExposure
from tests.support.lying import held_model


def serve(coordinator: str, host: str, lies: Mapping[str, Any]) -> None:
    settings = config.load(environ={"HOME": "/nonexistent"})
    options = replace(api.source_options(settings), listen=f"{host}:0", insecure=True)
    loop = runtime.acquire()
    server = loop.run(api.start_source(options, plugins.transports()))
    place = dict(lies.get("place", {}))
    if "nics" in place:
        nics = [Nic(**nic) for nic in place["nics"]]
        place["nics"] = tuple(replace(nic, addresses=tuple(nic.addresses)) for nic in nics)
    if "addresses" in place:
        place["addresses"] = tuple(place["addresses"])
    held = held_model("m")
    held.source_id = lies.get("source_id", held.source_id)
    loop.run(server.offer(held))
    server._place = replace(server._place, **place)
    if "addresses" in lies:
        exposures = server._servicer.models[held.source_id].exposures
        tcp = cast(TcpExposure, exposures["tcp"])
        tcp.listeners = tcp.listeners._replace(fields={"addresses": lies["addresses"]})
    loop.run(server.register(coordinator))
    print(server.endpoint, flush=True)
    threading.Event().wait()


def count(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            listener.accept()[0].close()
            print("connected", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        count(sys.argv[2])
