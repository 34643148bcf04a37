"""Helpers that serving and pulling share: transports, TLS files, device names."""

from __future__ import annotations

import functools

from mx import config, plugins
from mx.codec import MAX_PORT
from mx.core.variant import ProcessingKey
from mx.errors import ConfigError
from mx.transport import Transport
from mx.wire.address import WILDCARDS, is_local, join_address, split_address, tls_of
from mx.wire.client import CoordinatorClient

DEFAULT_REVISION = "main"
DEFAULT_VARIANT = "checkpoint"


@functools.cache
def transports() -> dict[str, Transport]:
    """Return this process's transports by name; cached, since finding them is slow."""
    return plugins.transports()


def client_of(settings: config.Settings, coordinator: str | None) -> CoordinatorClient:
    """Return a client of a coordinator, None for that of the settings; on the loop. Raises as the
    client does."""
    return CoordinatorClient(
        coordinator or settings.coordinator,
        tls=tls_of(settings),
        insecure=settings.insecure,
        timeout_s=settings.connect_timeout_s,
    )


def check_type(name: str, value: object, kind: type | tuple[type, ...], hint: str) -> None:
    """Check the type of an argument of the Python API.

    Args:
        name: The argument's.
        value: What was given.
        kind: What it must be an instance of.
        hint: What to give in its place.

    Raises:
        ConfigError: It is of another type.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"`{name}={value!r}` is of type {type(value).__name__}", hint=hint)


def checked_port(port: object) -> int:
    """Return the argument `port`: where an engine takes requests, 0 for nowhere.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= MAX_PORT:
        raise ConfigError(f"`port={port!r}` is not a port", hint=f"it is 1 to {MAX_PORT}, or 0")
    return port


def known_host(settings: config.Settings) -> str:
    """Return the host at which others reach this process, as far as the settings tell; "" if they
    name every address, or one that only this machine reaches."""
    host, _ = split_address(settings.advertise or settings.listen)
    return "" if host in WILDCARDS or is_local(join_address(host, 1)) else host


def variant_text(variant: object) -> str:
    """Return the text of the argument `variant`.

    Raises:
        ConfigError: It is neither text nor a `ProcessingKey`.
    """
    if isinstance(variant, ProcessingKey):
        return str(variant)
    check_type("variant", variant, str, "it must be text or an mx.ProcessingKey")
    return str(variant)


def resolve_device(device: str) -> str:
    """Return the device's key: "cpu", or "cuda:UUID" for "cuda:N", "cuda" and "cuda:GPU-...".

    Raises:
        ConfigError: There is no such device, or no usable GPU; the message lists the GPUs.
    """
    if device == "cpu":
        return device
    check_type("device", device, str, "it is cpu or cuda:N")
    if device != "cuda" and not device.startswith("cuda:"):
        raise ConfigError(f"there is no device {device!r}", hint="use cpu or cuda:N")
    from mx.cuda.device import device_key, find_ordinal
    from mx.cuda.driver import load
    from mx.cuda.errors import CudaUnavailableError

    try:
        driver = load()
    except CudaUnavailableError as error:
        hint = f"{error.hint}; or use `device=cpu`" if error.hint else "use `device=cpu`"
        raise ConfigError(f"{device} can't be used: {error.message}", hint=hint) from error
    return device_key(driver.device_uuid(find_ordinal(driver, device)))


def torch_device(device: str) -> str:
    """Return the device as torch names it: "cpu" or "cuda:N". Raises as `resolve_device`."""
    key = resolve_device(device)
    if key == "cpu":
        return key
    from mx.cuda.device import find_ordinal
    from mx.cuda.driver import load

    return f"cuda:{find_ordinal(load(), key)}"
