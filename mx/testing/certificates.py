"""Certificates for the rule about encryption: that of both sides, and a stranger's. Each is its own
authority, names 127.0.0.1 and localhost, and protects nothing but the suite's own bytes."""

from __future__ import annotations

from pathlib import Path

from mx.transport import TlsFiles

#: Whom each of them names.
PRINCIPAL = "localhost"

_OURS = """\
-----BEGIN CERTIFICATE-----
MIIBtjCCAVugAwIBAgIUT6Fpi2KBhtk9jcI/3WDIHvART5IwCgYIKoZIzj0EAwIw
ITEfMB0GA1UEAwwWY29uZm9ybWFuY2Utc3VpdGUtb3VyczAgFw0yNjExMjMyMTIz
MDdaGA8yMTI2MTAzMDIxMjMwN1owITEfMB0GA1UEAwwWY29uZm9ybWFuY2Utc3Vp
dGUtb3VyczBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABH3YWAuibbPaUdh2JDP3
vxSqVj7olJrsFYKEzyq5Yk2UhwTp3ARpLM/1x4hq6XuL/ScBEJRcz8lMJHDEzOUR
Wp2jbzBtMB0GA1UdDgQWBBRsxLKDZipBMd5SVsnwApRfeGUnoDAfBgNVHSMEGDAW
gBRsxLKDZipBMd5SVsnwApRfeGUnoDAaBgNVHREEEzARhwR/AAABgglsb2NhbGhv
c3QwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEArhqtE5uW9ySk
51Um8FCbtwMu//5s1t4mjDOz/BhGTDcCIQDiKnzF8T1zBJPAjq1ZoSIUCN+W5zKO
jaU0rvvmdi/S7w==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghCMyTlkkyCftIvZ4
LPluPEiebefetv9kCVRgK3cq/7mhRANCAAR92FgLom2z2lHYdiQz978UqlY+6JSa
7BWChM8quWJNlIcE6dwEaSzP9ceIaul7i/0nARCUXM/JTCRwxMzlEVqd
-----END PRIVATE KEY-----
"""
_THEIRS = """\
-----BEGIN CERTIFICATE-----
MIIBuDCCAV+gAwIBAgIUeR5XXePPLzkj686WU6yaCnDS5BAwCgYIKoZIzj0EAwIw
IzEhMB8GA1UEAwwYY29uZm9ybWFuY2Utc3VpdGUtdGhlaXJzMCAXDTI2MTEyMzIx
MjMwN1oYDzIxMjYxMDMwMjEyMzA3WjAjMSEwHwYDVQQDDBhjb25mb3JtYW5jZS1z
dWl0ZS10aGVpcnMwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATPACWfGU+LzAdL
YKnWAbHFXmch1TDABQda0dN0rlOpoCIIXDULjeUNZIMbZbUQTD3bSQBWGPOEIJSC
dWPPQcr/o28wbTAdBgNVHQ4EFgQUejWr4voh37CgVxnvvMv3VQeuDU8wHwYDVR0j
BBgwFoAUejWr4voh37CgVxnvvMv3VQeuDU8wGgYDVR0RBBMwEYcEfwAAAYIJbG9j
YWxob3N0MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDRwAwRAIgDdYw4ZCc
1UvTp2SrOHiRr2e8PrPIwYQ0WaSPZsacj5ACIHpmx6MBZKrUlZY1eD6NFvcu5PQ+
E7UgA5t3/UYjbI8A
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgQCGojXkM5u6xPDxk
aXivp5zDRyAkU6cVZLWBZot3z0ShRANCAATPACWfGU+LzAdLYKnWAbHFXmch1TDA
BQda0dN0rlOpoCIIXDULjeUNZIMbZbUQTD3bSQBWGPOEIJSCdWPPQcr/
-----END PRIVATE KEY-----
"""


def certificates(folder: Path) -> tuple[TlsFiles, TlsFiles]:
    """Write the certificates to a folder, with the keys, readable for this user alone.

    Args:
        folder: It exists.

    Returns:
        The files of both sides, and those of a stranger.
    """
    return _written(folder / "ours.pem", _OURS), _written(folder / "theirs.pem", _THEIRS)


def _written(path: Path, pem: str) -> TlsFiles:
    path.touch(mode=0o600)
    path.write_text(pem)
    return TlsFiles(str(path), str(path), str(path))
