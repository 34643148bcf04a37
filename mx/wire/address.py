"""HOST:PORT as the user writes it, and which of them may go without TLS."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import unquote

from mx.errors import ConfigError
from mx.transport import TlsFiles

#: Every address of this machine.
WILDCARDS = ("0.0.0.0", "::")

# No empty label and none of more than 63 characters: looking such a name up raises UnicodeError.
_LABEL = r"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?=[A-Za-z0-9])(?=.{{1,254}}\Z){_LABEL}(\.{_LABEL})*(?<=[A-Za-z0-9])\.?")


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of HOST:PORT or [IPV6]:PORT; the port is 0 to 65535.

    No name is looked up. Raises ConfigError that says how to write it.
    """
    host, colon, port = address.rpartition(":")
    wrong = ConfigError(
        f"{address!r} is not an address", hint="write HOST:PORT, like 127.0.0.1:7600 or [::1]:7600"
    )
    if not colon or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise wrong
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise wrong from None
    elif not _HOST.fullmatch(host):
        raise wrong
    return host, int(port)


def host_of(address: str) -> str:
    """The host of an address that was dialled; "unix" for unix:PATH."""
    return "unix" if address.startswith("unix:") else split_address(address)[0]


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of_peer(peer: str) -> str:
    """The address in what gRPC calls the other end of a connection, without its port: of IPv6 the
    network of 64 bits, since a host may use any address in it."""
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


def is_local(address: str) -> bool:
    """Does nothing off this machine hear it? True for loopback addresses and unix sockets.

    Names other than localhost count as remote: what they resolve to can change.
    """
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_protection(address: str, *, tls: TlsFiles | None, insecure: bool, verb: str) -> None:
    """Refuse plain text off this machine, unless it was asked for by name.

    `verb` is "listen on" or "talk to". Raises ConfigError.
    """
    if tls is None and not insecure and not is_local(address):
        raise ConfigError(
            f"refusing to {verb} {address} without TLS",
            hint="give `tls_cert`, `tls_key` and `tls_ca`, or say `insecure`",
        )


def read_tls(tls: TlsFiles) -> tuple[bytes, bytes, bytes]:
    """The PEM bytes of (certificate, key, authority). Raises ConfigError naming the file."""
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
    """The IP addresses that HOST:PORT stands for; none where the name is not known. May block."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))
