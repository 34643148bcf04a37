"""What serving and pulling both need of the process and its settings."""

from __future__ import annotations

import functools

from mx import config, registry
from mx.errors import ConfigError
from mx.transport import TlsFiles, Transport

DEFAULT_REVISION = "main"
DEFAULT_VARIANT = "checkpoint"


@functools.cache
def transports() -> dict[str, Transport]:
    """This process's transports: reading every distribution's metadata takes its time."""
    return registry.transports()


def tls_of(settings: config.Settings) -> TlsFiles | None:
    if not settings.tls_cert:
        return None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)


def require_cpu(device: str) -> None:
    if device != "cpu":
        raise ConfigError(
            f"device {device!r} is not supported by this version", hint="use --device cpu"
        )
