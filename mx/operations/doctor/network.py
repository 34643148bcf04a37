"""Checks of transports, GPUs, interfaces, addresses and certificates."""

from __future__ import annotations

import datetime
import os
import resource
import stat
from collections.abc import Iterator

from mx.api.common import known_host
from mx.errors import ConfigError, MxError, NotAllowedError, install_hint
from mx.operations.doctor.findings import ExaminedHost, Finding, failure, note, ok, warning
from mx.operations.doctor.host import registering
from mx.source.endpoint import dialled_host
from mx.text import listed, plain
from mx.transport import TlsFiles, Unavailable
from mx.units import count, format_bytes
from mx.wire.address import join_address, read_tls, split_address
from mx.wire.tls import check_client_files, check_server_files

#: Those that a host without a GPU lacks.
_OF_GPUS = ("cuda_ipc", "pcie_p2p")
_DRIVER = ("dev/nvidiactl", "proc/driver/nvidia")
#: From this speed on, frames of 1,500 bytes cost much CPU.
_FAST_MBIT, _LARGE_MTU = 10_000, 4_000
_DAY_S = 86_400.0
_SOON_DAYS = 14
_VERBS = "usr/lib*/**/libibverbs.so.1"
_FILES = "give `tls_cert`, `tls_key` and `tls_ca`"


def transports(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield which transports work here."""
    for name, answer in subject.topology.transports.items():
        if not isinstance(answer, Unavailable):
            yield ok(f"{name} works: {answer.detail}")
        elif name in _OF_GPUS and not subject.topology.place.gpus:
            yield note(f"{name} needs a GPU: {answer.reason}")
        else:
            say = warning if name in ("shm", "tcp", *_OF_GPUS) else note
            yield say(f"{name} does not work here: {answer.reason}")


def gpus(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on the GPUs, as NVML shows them; CUDA is not started."""
    found, missing = subject.topology.place.gpus, subject.topology.missing.get("gpus", "")
    if not found:
        has_driver = any((subject.root / each).exists() for each in _DRIVER)
        yield (warning if has_driver else note)(f"no GPU: {missing or 'there is none'}")
        return
    if missing:
        yield warning(f"GPUs are missing: {missing}")
    names = ", ".join(sorted({gpu.name or "a GPU" for gpu in found}))
    driver = subject.topology.place.driver or "unknown"
    yield ok(f"{count(len(found), 'GPU')} ({names}), driver {driver}")
    alone = [f"gpu{g.index}" for g in found if not any(peer.p2p_read for peer in g.peers)]
    if alone and len(found) > 1:
        yield note(
            f"{listed(alone)} can't read another GPU's memory: weights go through the host's",
            "peer access is the driver's and the board's: see `mx topo`",
        )
    yield from registering(subject)


def rdma(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on RDMA devices, and what ucx needs for them."""
    devices = [nic.rdma_device for nic in subject.topology.place.nics if nic.rdma_device]
    can = f"{listed(devices)} can do RDMA, and"
    if not devices:
        yield note("no RDMA device: ucx goes over TCP")
        return
    if isinstance(subject.topology.transports.get("ucx", Unavailable("")), Unavailable):
        yield warning(f"{can} ucx is not there to use it", install_hint("cuda12", "cuda13"))
        return
    if not any(subject.root.glob(_VERBS)):
        yield warning(
            f"{can} libibverbs is not installed: ucx goes over TCP",
            "apt-get install libibverbs1 librdmacm1 ibverbs-providers",
        )
    if not any(subject.root.glob("dev/infiniband/uverbs*")):
        yield warning(
            f"{can} /dev/infiniband is not here",
            "load ib_uverbs, or give the container the devices",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        yield warning(
            f"{can} this process may lock {format_bytes(soft)} of memory: RDMA locks all it moves",
            "LimitMEMLOCK=infinity (systemd), or the ulimit memlock of a container",
        )
    if not subject.settings.trusted_fabric:
        yield note(
            "ucx, and so RDMA, is not used beyond this machine",
            "`trusted_fabric` allows it, if every host on that network is trusted",
        )


def interfaces(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on the network interfaces that carry weights."""
    missing = subject.topology.missing.get("nics", "")
    if missing:
        yield warning(missing)
    usable = [nic for nic in subject.topology.place.nics if nic.addresses and nic.state != "down"]
    if not usable:
        say = failure if subject.remote else note
        yield say("there is no network interface but loopback")
    for nic in usable:
        speed = f"{nic.speed_mbit_per_s / 1000:g} Gbit/s, " if nic.speed_mbit_per_s else ""
        text = f"{nic.name}: {speed}MTU {nic.mtu}, {listed(nic.addresses)}"
        if nic.speed_mbit_per_s >= _FAST_MBIT and nic.mtu < _LARGE_MTU:
            fix = f"ip link set {nic.name} mtu 9000, if its whole network can do that"
            yield note(f"{text}: frames are small for such a link", fix)
        else:
            yield ok(text)


def address(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the address that this host would register, at which others dial it."""
    settings = subject.settings
    try:
        for each in subject.coordinators:
            host = dialled_host(settings.listen, settings.advertise, each)
    except ConfigError as error:
        text = f"a source here could not register: {error.message} (a pull without `hold` can)"
        yield warning(text, error.hint)
        return
    port = split_address(settings.advertise or settings.listen)[1]
    where = join_address(host, port) if port else f"{host}, a free port"
    yield ok(f"a source here registers {where}")
    if settings.advertise and not settings.data_ports:
        yield warning(
            "`advertise` is set and `data_ports` is not: where addresses are translated, readers "
            "can't reach the free ports that the weights take",
            "set `data_ports` to a range, and publish it as it is",
        )


def certificates(subject: ExaminedHost) -> Iterator[Finding]:
    """Yield the findings on the certificates, or what it means that there are none."""
    tls = subject.tls
    if tls is not None:
        yield from _files(subject, tls)
    elif not subject.remote:
        yield ok("no certificates: nothing leaves this machine")
    elif subject.settings.insecure:
        yield warning(
            "`insecure`: all travels in the clear, and nothing proves who the other end is", _FILES
        )
    else:
        beyond = f"{listed(subject.remote)} is beyond this machine"
        yield failure(f"{beyond}, and there are no certificates", f"{_FILES}, or `insecure`")


def _files(subject: ExaminedHost, tls: TlsFiles) -> Iterator[Finding]:
    """Yield what others would refuse, how long the files are good, and whom they name."""
    from cryptography import x509

    try:
        check_client_files(tls)
        check_server_files(tls, known_host(subject.settings))
    except (ConfigError, NotAllowedError) as error:
        yield failure(error.message, error.hint)
    mode = stat.S_IMODE(os.stat(tls.key).st_mode)
    if mode & 0o007:
        text = f"every user may read `tls_key` {tls.key}: its mode is {mode:04o}"
        yield warning(text, f"chmod 600 {tls.key}")
    try:
        pem, _, authority_pem = read_tls(tls)
        own = x509.load_pem_x509_certificates(pem)
        authority = x509.load_pem_x509_certificates(authority_pem)
    except (MxError, ValueError) as error:
        yield failure(f"the certificates can't be read: {plain(str(error))}")
        return
    now = datetime.datetime.fromtimestamp(subject.now_s, datetime.UTC)
    for what, found in (("`tls_cert`", own), ("`tls_ca`", authority)):
        left_days = min((each.not_valid_after_utc - now).total_seconds() for each in found) / _DAY_S
        if left_days < _SOON_DAYS:
            when = f"expires in {left_days:.1f} days" if left_days > 0 else "has expired"
            say = warning if left_days > 0 or what == "`tls_ca`" else failure
            fix = "replace the file: processes read it again by themselves"
            yield say(f"a certificate in {what} {when}", fix)
    try:
        names = own[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        text = listed([plain(str(each.value)) for each in names])
    except (x509.ExtensionNotFound, ValueError):
        text = "nothing"
    yield ok(
        f"the certificate names {text}; it is good until {own[0].not_valid_after_utc:%Y-%m-%d}"
    )
