"""Checks of transports, GPUs, interfaces, addresses and certificates."""

from __future__ import annotations

import datetime
import os
import resource
import stat
from collections.abc import Iterator

from mx.api.common import known_host
from mx.api.doctor.findings import Finding, Level, Subject
from mx.errors import ConfigError, MxError, NotAllowedError
from mx.source.endpoint import dialled_host
from mx.text import listed, plain
from mx.transport import TlsFiles, Unavailable
from mx.units import count, format_bytes
from mx.wire.address import join_address, read_tls, split_address
from mx.wire.tls import check_client_files, check_server_files

#: Those that a host without a GPU lacks.
_OF_GPUS = ("cuda_ipc", "pcie_p2p")
#: From this speed on, frames of 1,500 bytes cost much CPU.
_FAST_MBIT, _LARGE_MTU = 10_000, 4_000
_DAY_S = 86_400.0
_SOON_DAYS = 14
_VERBS = "usr/lib*/**/libibverbs.so.1"


def transports(subject: Subject) -> Iterator[Finding]:
    """Which transports work here."""
    gpus = subject.topology.place.gpus
    for name, answer in subject.topology.transports.items():
        if not isinstance(answer, Unavailable):
            yield Finding(Level.OK, f"{name} works: {answer.detail}")
        elif name in _OF_GPUS and not gpus:
            yield Finding(Level.NOTE, f"{name} needs a GPU: {answer.reason}")
        else:
            needed = name in ("shm", "tcp", *_OF_GPUS)
            level = Level.WARNING if needed else Level.NOTE
            yield Finding(level, f"{name} does not work here: {answer.reason}")


def gpus(subject: Subject) -> Iterator[Finding]:
    """The GPUs, as NVML shows them; CUDA is not started."""
    found, missing = subject.topology.place.gpus, subject.topology.missing.get("gpus", "")
    has_driver = any(
        (subject.root / each).exists() for each in ("dev/nvidiactl", "proc/driver/nvidia")
    )
    if not found:
        level = Level.WARNING if has_driver else Level.NOTE
        yield Finding(level, f"no GPU: {missing or 'there is none'}")
        return
    if missing:
        yield Finding(Level.WARNING, f"GPUs are missing: {missing}")
    names = sorted({gpu.name or "a GPU" for gpu in found})
    driver = subject.topology.place.driver
    yield Finding(
        Level.OK, f"{count(len(found), 'GPU')} ({', '.join(names)}), driver {driver or 'unknown'}"
    )
    apart = [
        f"gpu{gpu.index}"
        for gpu in found
        if len(found) > 1 and not any(peer.p2p_read for peer in gpu.peers)
    ]
    if apart:
        yield Finding(
            Level.NOTE,
            f"{listed(apart)} can't read another GPU's memory: weights go through the host's",
            "peer access is the driver's and the board's: see `mx topo`",
        )


def rdma(subject: Subject) -> Iterator[Finding]:
    """RDMA devices, and what ucx needs for them."""
    devices = [nic.rdma_device for nic in subject.rdma]
    if not devices:
        yield Finding(Level.NOTE, "no RDMA device: ucx goes over TCP")
        return
    if not subject.works("ucx"):
        yield Finding(
            Level.WARNING,
            f"{listed(devices)} can do RDMA, and ucx is not there to use it",
            "pip install 'mx-peer[cuda12]' (or cuda13)",
        )
        return
    if not any(subject.root.glob(_VERBS)):
        yield Finding(
            Level.WARNING,
            f"{listed(devices)} can do RDMA, and libibverbs is not installed: ucx goes over TCP",
            "apt-get install libibverbs1 librdmacm1 ibverbs-providers",
        )
    if not any(subject.root.glob("dev/infiniband/uverbs*")):
        yield Finding(
            Level.WARNING,
            f"{listed(devices)} can do RDMA, and /dev/infiniband is not here",
            "load ib_uverbs, or give the container the devices",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            Level.WARNING,
            f"this process may lock {format_bytes(soft)} of memory: RDMA locks all that it reads "
            "and writes",
            "LimitMEMLOCK=infinity (systemd), or the ulimit memlock of a container",
        )
    if not subject.settings.trusted_fabric:
        yield Finding(
            Level.NOTE,
            "ucx, and so RDMA, is not used beyond this machine",
            "`trusted_fabric` allows it, if every host on that network is trusted",
        )
    else:
        yield Finding(Level.OK, f"RDMA: {listed(devices)}")


def interfaces(subject: Subject) -> Iterator[Finding]:
    """The network interfaces that carry weights."""
    missing = subject.topology.missing.get("nics", "")
    if missing:
        yield Finding(Level.WARNING, missing)
    usable = [nic for nic in subject.topology.place.nics if nic.addresses and nic.state != "down"]
    if not usable:
        level = Level.FAILURE if subject.remote else Level.NOTE
        yield Finding(level, "there is no network interface but loopback")
    for nic in usable:
        speed = f"{nic.speed_mbit_per_s / 1000:g} Gbit/s, " if nic.speed_mbit_per_s else ""
        text = f"{nic.name}: {speed}MTU {nic.mtu}, {listed(nic.addresses)}"
        if nic.speed_mbit_per_s >= _FAST_MBIT and nic.mtu < _LARGE_MTU:
            yield Finding(
                Level.NOTE,
                f"{text}: frames are small for such a link",
                f"ip link set {nic.name} mtu 9000, if its whole network can do that",
            )
        else:
            yield Finding(Level.OK, text)


def address(subject: Subject) -> Iterator[Finding]:
    """What this host would register as the address at which others dial it."""
    settings = subject.settings
    for coordinator in subject.coordinators:
        try:
            host = dialled_host(settings.listen, settings.advertise, coordinator)
        except ConfigError as error:
            yield Finding(
                Level.WARNING,
                f"a source here could not register: {error.message} (a pull without `hold` can)",
                error.hint,
            )
            return
    port = split_address(settings.advertise or settings.listen)[1]
    where = join_address(host, port) if port else f"{host}, a free port"
    yield Finding(Level.OK, f"a source here registers {where}")
    if settings.advertise and not settings.data_ports:
        yield Finding(
            Level.WARNING,
            "`advertise` is set and `data_ports` is not: where addresses are translated, readers "
            "can't reach the free ports that the weights take",
            "set `data_ports` to a range, and publish it as it is",
        )


def certificates(subject: Subject) -> Iterator[Finding]:
    """The certificates, or what it means that there are none."""
    tls = subject.tls
    if tls is None:
        if not subject.remote:
            yield Finding(Level.OK, "no certificates: nothing leaves this machine")
        elif subject.settings.insecure:
            yield Finding(
                Level.WARNING,
                "`insecure`: weights and all else travel in the clear, and nothing proves who the "
                "other end is",
                "give `tls_cert`, `tls_key` and `tls_ca`",
            )
        else:
            yield Finding(
                Level.FAILURE,
                f"{listed(subject.remote)} is beyond this machine, and there are no certificates",
                "give `tls_cert`, `tls_key` and `tls_ca`, or `insecure`",
            )
        return
    try:
        check_client_files(tls)
        check_server_files(tls, known_host(subject.settings))
    except (ConfigError, NotAllowedError) as error:
        yield Finding(Level.FAILURE, error.message, error.hint)
    yield from _expiry(tls, subject.now_s)
    mode = stat.S_IMODE(os.stat(tls.key).st_mode)
    if mode & 0o007:
        yield Finding(
            Level.WARNING,
            f"every user may read `tls_key` {tls.key}: its mode is {mode:04o}",
            f"chmod 600 {tls.key}",
        )


def _expiry(tls: TlsFiles, now_s: float) -> Iterator[Finding]:
    """Yield how long the certificate and its authorities are still good, and whom it names."""
    from cryptography import x509

    try:
        own, _, authority = read_tls(tls)
        chain = x509.load_pem_x509_certificates(own)
        authorities = x509.load_pem_x509_certificates(authority)
    except (MxError, ValueError) as error:
        yield Finding(Level.FAILURE, f"the certificates can't be read: {plain(str(error))}")
        return
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    for what, found in (("`tls_cert`", chain), ("`tls_ca`", authorities)):
        left_days = min((each.not_valid_after_utc - now).total_seconds() for each in found) / _DAY_S
        if left_days < _SOON_DAYS:
            when = f"expires in {left_days:.1f} days" if left_days > 0 else "has expired"
            yield Finding(
                Level.WARNING if left_days > 0 or what == "`tls_ca`" else Level.FAILURE,
                f"a certificate in {what} {when}",
                "replace the file: processes read it again by themselves",
            )
    names = _names(chain[0])
    kept = (chain[0].not_valid_after_utc - now).days
    yield Finding(
        Level.OK, f"the certificate names {listed(names) or 'nothing'}, good for {kept} days"
    )


def _names(certificate: object) -> list[str]:
    """Return what a certificate's subjectAltName has."""
    from cryptography import x509

    assert isinstance(certificate, x509.Certificate)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [plain(str(each.value)) for each in found.value]
