"""Measures verified pulls over TLS against bare `ssl` sockets that hash, as a row of the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mx import api, config
from mx.testing.certificates import certificates

from . import harness
from .references.sockets import RawSockets

_SETTINGS = ("tls_cert", "tls_key", "tls_ca")
BAR = 0.8


def rows(
    checkpoint: Path,
    memfd: Callable[[int], int],
    nbytes: int,
    rounds: int,
) -> list[harness.Row]:
    """Return the row.

    Args:
        checkpoint: The model.
        memfd: Makes a filled memfd of so many bytes, which is closed here.
        nbytes: The model's payload.
        rounds: How many.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours, _ = certificates(Path(folder))
        files = (ours.certificate, ours.key, ours.authority)
        settings = config.load(dict(zip(_SETTINGS, files, strict=True)))
        variables = {
            f"MX_PEER_{name.upper()}": file for name, file in zip(_SETTINGS, files, strict=True)
        }
        serving = ("serve", str(checkpoint), "--model", "tls", "--listen", "127.0.0.1:0", "--json")
        source = subprocess.Popen(
            [sys.executable, "-m", "mx", *serving],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert source.stdout is not None
        fd = memfd(nbytes)
        sockets = RawSockets(fd, nbytes, files)
        try:
            endpoint = json.loads(source.stdout.readline())["endpoint"]

            def pull() -> float:
                with api.pull("tls", peer=endpoint, transport="tcp", settings=settings) as pulling:
                    return pulling.wait(120).seconds

            samples = harness.interleave(
                {
                    "mx": pull,
                    **{f"ssl: {k}": lambda k=k: sockets.receive(k) for k in (1, 2, 4)},  # type: ignore[misc]
                },
                rounds,
                fresh_nbytes=nbytes,
            )
        finally:
            sockets.close()
            os.close(fd)
            source.terminate()
            source.communicate()
    name, reference_s = harness.best(samples, "ssl")
    own_s = harness.median(samples, "mx")
    value = reference_s / own_s
    gb = nbytes / 1e9
    detail = f"{gb / own_s:.2f} GB/s against {gb / reference_s:.2f} ({name} sockets)"
    work = "tcp over TLS, verified / ssl sockets that hash"
    return [harness.Row(work, round(value, 3), "x", f">= {BAR:g} x", value >= BAR, detail, samples)]
