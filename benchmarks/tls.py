"""Measures verified pulls over TLS against bare `ssl` sockets that hash, as a row of the table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mx import api, config

from . import harness
from .references.sockets import RawSockets

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_SETTINGS = ("tls_cert", "tls_key", "tls_ca")
BAR = 0.8


def certificates(folder: Path) -> tuple[str, str, str]:
    """Make a CA, and a certificate of 127.0.0.1 for both ends, with the openssl command.

    Returns:
        The PEM files: certificate, key, CA.
    """

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    authority = ("-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=bench-ca", *authority)
    openssl("req", *_KEY, "-subj", "/CN=bench", "-keyout", "bench.key", "-out", "bench.csr")
    (folder / "bench.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "bench.ext")
    openssl("x509", "-req", "-days", "2", *signing, "-in", "bench.csr", "-out", "bench.crt")
    return str(folder / "bench.crt"), str(folder / "bench.key"), str(folder / "ca.crt")


def rows(
    checkpoint: Path,
    memfd: Callable[[int], int],
    nbytes: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[harness.Row]:
    """Return the row; none, with the reason to `say`, without the openssl command.

    Args:
        checkpoint: The model.
        memfd: Makes a filled memfd of so many bytes, which is closed here.
        nbytes: The model's payload.
        rounds: How many.
        say: Reports what is left out.
    """
    if shutil.which("openssl") is None:
        say("tls is left out: it needs the openssl command")
        return []
    with tempfile.TemporaryDirectory() as folder:
        files = certificates(Path(folder))
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
