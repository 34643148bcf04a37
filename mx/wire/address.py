"""HOST:PORT as users write it, and the rule for addresses that need TLS."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
from urllib.parse import unquote

from mx.config import Settings
from mx.errors import ConfigError
from mx.transport import TlsFiles

_log = logging.getLogger(__name__)

#: Every address of this machine.
WILDCARDS = ("0.0.0.0", "::")

# No empty label and none of more than 63 characters: resolving such a name raises UnicodeError.
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?=[A-Za-z0-9])(?=.{{1,254}}\Z){_LABEL}(\.{_LABEL})*(?<=[A-Za-z0-9])\.?")


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [IPV6]:PORT, without resolving names.

    Returns:
        (host, port); the port is 0 to 65535, an IPv6 host has no brackets.

    Raises:
        ConfigError: The address is malformed; the hint says how to write it.
    """
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    well_formed = bool(colon) and digits and int(port) <= 65535
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            well_formed = False
    elif not _HOST.fullmatch(host):
        well_formed = False
    if not well_formed:
        raise ConfigError(
            f"{address!r} is not an address",
            hint="write HOST:PORT, like 127.0.0.1:7600 or [::1]:7600",
        )
    return host, int(port)


def tls_of(settings: Settings) -> TlsFiles | None:
    """Return the TLS files that the settings name; None if they name no certificate."""
    if not settings.tls_cert:
        return None
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_crl)
    return TlsFiles(*files, connection_age_s=settings.connection_age_s)


def each_address(text: str) -> tuple[str, ...]:
    """Return the addresses of "HOST:PORT,HOST:PORT", each once; unix:PATH is one address."""
    found = [text] if text.startswith("unix:") else [each.strip() for each in text.split(",")]
    return tuple(dict.fromkeys(found))


def host_of(address: str) -> str:
    """Return the host of a dialled address; "unix" for unix:PATH."""
    return "unix" if address.startswith("unix:") else split_address(address)[0]


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of_peer(peer: str) -> str:
    """Return the IP address in gRPC's name of a connection's other end.

    Args:
        peer: As `context.peer()` returns it, such as "ipv4:10.0.0.1:5000".

    Returns:
        The address without its port; of IPv6 the network of 64 bits, since a host may use any
        address in it; for other kinds of connections the kind, such as "unix".
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    host = unquote(rest).rpartition(":")[0].strip("[]")
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def host_of_peer(peer: str) -> str:
    """Return the host at which a connection's other end can be dialled, "" if it has none.

    Args:
        peer: As for `address_of_peer`.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    try:
        found = ipaddress.ip_address(unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def is_local(address: str) -> bool:
    """Return True if an address, or each of several, stays on this machine: loopback addresses and
    unix sockets.

    Names other than localhost count as remote, since they may resolve to another address later.
    """
    if address.startswith("unix:"):
        return True
    if "," in address:
        return all(map(is_local, each_address(address)))
    host, _ = split_address(address)
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_protection(address: str, *, tls: TlsFiles | None, insecure: bool, verb: str) -> None:
    """Refuse plain text beyond this machine without `insecure`; with it, log what that means.

    Args:
        address: The address to use.
        tls: The certificates, None for plain text.
        insecure: Allow plain text.
        verb: What is refused: "listen on" or "connect to".

    Raises:
        ConfigError: `address` is beyond this machine, and neither `tls` nor `insecure` is given.
    """
    if tls is not None or is_local(address):
        return
    if not insecure:
        raise ConfigError(
            f"refusing to {verb} {address} without TLS",
            hint="give `tls_cert`, `tls_key` and `tls_ca`, or `insecure`",
        )
    _say_once(verb, address)


_said = threading.Event()


def _say_once(verb: str, address: str) -> None:
    """Say, once in a process, what plain text means."""
    if not _said.is_set():
        _said.set()
        _log.warning(
            "`insecure`: the weights, and all else, travel in the clear between machines and are "
            "not authenticated (to %s %s); give `tls_cert`, `tls_key` and `tls_ca` to protect them",
            verb,
            address,
        )


def read_tls(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """Return the PEM bytes of (certificate, key, authority). Reads the files.

    Raises:
        ConfigError: A file cannot be read or is not PEM; the message names it.
    """
    contents = []
    for flag, path in (
        ("`tls_cert`", tls.certificate),
        ("`tls_key`", tls.key),
        ("`tls_ca`", tls.authority),
    ):
        try:
            with open(path, "rb") as file:
                data = file.read(1 << 20)
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from error
        if b"-----BEGIN " not in data:
            raise ConfigError(f"{flag} {path} is not a PEM file")
        contents.append(data)
    return contents[0], contents[1], contents[2]


def resolve(address: str) -> tuple[str, ...]:
    """Return the IP addresses of HOST:PORT; none if the name is unknown. May block."""
    host, port = split_address(address)
    try:
        name = host.strip("[]")
        # A name of ASCII needs none of the tables for others, which take 2 ms to import.
        wanted = name.encode() if name.isascii() else name
        found = socket.getaddrinfo(wanted, port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))
