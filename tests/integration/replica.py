"""A replica for the tests of routers: pulls a model, says that it takes requests, and stays.

    python replica.py COORDINATOR MODEL MODE ACCEPT_AT_LAYER

It prints a line for each layer, and at the end. MODE is "plain", "hold", "attach",
"only" (one layer), "alone" (the blocks, which it gives to no others) or "callback" (which says so).
"""

from __future__ import annotations

import sys
import time

import mx

PORT = 8123


def main() -> None:
    coordinator, model, mode, accept_at = sys.argv[1:]
    pull = mx.pull(
        model,
        coordinator=coordinator,
        attach=mode == "attach",
        transport=None if mode == "attach" else "tcp",
        hold=mode == "hold",
        only={"only": "*layers.0.*", "alone": "*layers.*"}.get(mode),
        wait_s=60,  # one that was stopped goes on
    )
    with pull:
        if mode == "callback":
            pull.on_layer(lambda event: pull.accept_requests(PORT))
        for event in pull.layers():
            print(f"layer {event.index}", flush=True)
            if event.index == int(accept_at) and mode != "callback":
                pull.accept_requests(PORT)
        pull.wait()
        if mode == "hold":
            pull.hold()
        print("loaded", flush=True)
        for line in sys.stdin:
            if line.strip() == "stop":
                pull.accept_requests(0)
            else:
                break
        time.sleep(0.01)


if __name__ == "__main__":
    main()
