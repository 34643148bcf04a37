"""Stores on loopback: the little of S3, of the Hugging Face hub and of nginx that clients ask for,
with faults to switch on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Store:
    """A folder that is served. `requests` are those so far, as (method, path, range)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str, str]] = []
        self.sent_nbytes = 0
        self.serving = True  # False: requests get no answer
        self.failing = 0  # so many requests get 503
        self.status = 0  # what all requests get; 0: what is right
        self.version = ""  # a part of all entity tags
        self.honours_conditions = True
        self.short = False  # bodies end before their length
        self.slow_nbytes_per_s = 0  # how fast bodies are sent; 0: at once
        self.after: tuple[int, str, object] | None = None  # a fault, after so many ranged reads
        self.silent_from: int | None = None  # ranges that begin there or later get no answer
        self.silent = 0  # how many got none
        self.login = ""  # the header that requests must have
        self.lies_nbytes = 0  # added to the sizes that are listed
        self.url = ""
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def etag(self, path: Path) -> str:
        """Return the entity tag of a file."""
        text = f"{path.relative_to(self.folder)} {path.stat().st_size} {self.version}"
        return f'"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"'

    def asked(self, method: str, path: str, span: str) -> bool:
        """Count a request, and switch on the fault that is due. Returns whether it gets an answer,
        which no later request changes."""
        with self._lock:
            self.requests.append((method, path, span))
            if self.after is not None and span and not span.startswith("bytes=0-"):
                count, name, value = self.after
                self.after = (count - 1, name, value)
                if count <= 0:
                    self.after = None
                    setattr(self, name, value)
            begin = re.match(r"bytes=(\d+)-", span)
            if self.silent_from is not None and begin and int(begin[1]) >= self.silent_from:
                self.silent += 1
                return False
            return self.serving

    def until(self, found: Callable[[], bool], what: str) -> None:
        """Wait until something is so, for a minute."""
        for _ in range(1200):
            if found():
                return
            time.sleep(0.05)
        raise AssertionError(f"no {what}")

    def until_stopped(self) -> None:
        """Wait until requests get no answer any more."""
        self.until(lambda: not self.serving, "stop")

    def files(self) -> list[Path]:
        """Return all files, sorted."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        store, parts = self.store, urlsplit(self.path)
        span = self.headers.get("Range", "")
        if not store.asked(self.command, unquote(parts.path), span):
            store.ended.wait()
            self.close_connection = True
            return
        if store.failing:
            store.failing -= 1
            self._send(503, b"busy", {}, body=body)
        elif store.status:
            self._send(store.status, b"no", {}, body=body)
        else:
            self.found(unquote(parts.path), parse_qs(parts.query), span, body=body)

    def found(self, path: str, query: dict[str, list[str]], span: str, *, body: bool) -> None:
        raise NotImplementedError

    def file(self, path: Path, span: str, more: dict[str, str], *, body: bool) -> None:
        """Send a file, or a range of it."""
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {}, body=body)
            return
        etag = self.store.etag(path)
        if_match = self.headers.get("If-Match")
        if self.store.honours_conditions and if_match not in (None, etag):
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>", {}, body=body)
            return
        size, status = path.stat().st_size, 200
        begin, end = 0, size
        modified = "Mon, 05 Jan 2026 10:00:00 GMT"
        headers = {"ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes"} | more
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", span):
            begin, end = int(match[1]), int(match[2]) + 1 if match[2] else size
            end, status = min(end, size), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin) if body else b""
        self._send(status, data, headers, body=body, nbytes=end - begin)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str], *, body: bool, nbytes: int = -1
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if nbytes < 0 else nbytes))
        self.end_headers()
        if body and self.store.short and status == 206:
            data, self.close_connection = data[: len(data) // 2], True
        if body:
            self._write(data)

    def _write(self, data: bytes) -> None:
        step_nbytes = 64 * 1024
        for at in range(0, len(data), step_nbytes):
            part = data[at : at + step_nbytes]
            if pace := self.store.slow_nbytes_per_s:
                self.store.ended.wait(len(part) / pace)
            try:
                self.wfile.write(part)
            except ConnectionError:  # the client has ended
                self.close_connection = True
                return
            self.store.sent_nbytes += len(part)


class _Bucket(_Handler):
    """S3 with one bucket of any name, whose root is the folder."""

    def found(self, path: str, query: dict[str, list[str]], span: str, *, body: bool) -> None:
        _, _, key = path[1:].partition("/")
        if key:
            self.file(self.store.folder / key, span, {}, body=body)
            return
        prefix = query.get("prefix", [""])[0]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{each.stat().st_size}</Size>"
            f"<ETag>{escape(self.store.etag(each))}</ETag>"
            "<LastModified>2026-01-05T10:00:00.000Z</LastModified></Contents>"
            for each in self.store.files()
            if (name := str(each.relative_to(self.store.folder))).startswith(prefix)
        )
        listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        self._send(200, listing.encode(), {"Content-Type": "application/xml"}, body=body)


class _Hub(_Handler):
    """The hub, with one model of any id, whose files are the folder's."""

    def found(self, path: str, query: dict[str, list[str]], span: str, *, body: bool) -> None:
        names = [str(each.relative_to(self.store.folder)) for each in self.store.files()]
        about: object = None
        if "/revision/" in path:
            repository = path.partition("/revision/")[0].removeprefix("/api/models/")
            siblings = [{"rfilename": name} for name in names]
            about = {"id": repository, "sha": COMMIT, "siblings": siblings}
        elif "/tree/" in path:
            sizes = {name: (self.store.folder / name).stat().st_size for name in names}
            about = [
                {"type": "file", "path": name, "size": sizes[name], "oid": f"{number:040x}"}
                for number, name in enumerate(names)
            ]
        if about is not None or path.startswith("/api/"):
            headers = {"Content-Type": "application/json"}
            self._send(200, json.dumps(about).encode(), headers, body=body)
            return
        name = path.partition("/resolve/")[2].partition("/")[2]
        self.file(self.store.folder / name, span, {"X-Repo-Commit": COMMIT}, body=body)


class _Web(_Handler):
    """A folder as nginx serves it with `autoindex_format json`."""

    def found(self, path: str, query: dict[str, list[str]], span: str, *, body: bool) -> None:
        where = self.store.folder / path.strip("/")
        if self.store.login and self.headers.get("Authorization") != self.store.login:
            self._send(401, b"who?", {}, body=body)
        elif path.endswith("/") and where.is_dir():
            entries = [
                {"name": each.name, "type": "directory", "mtime": modified(each)}
                if each.is_dir()
                else {
                    "name": each.name,
                    "type": "file",
                    "mtime": modified(each),
                    "size": each.stat().st_size + self.store.lies_nbytes,
                }
                for each in sorted(where.iterdir())
            ]
            self._send(200, json.dumps(entries).encode(), {}, body=body)
        elif where.is_file() and self.headers.get("If-Unmodified-Since") not in (
            None,
            modified(where),
        ):
            self._send(412, b"changed", {}, body=body)
        else:
            self.file(where, span, {}, body=body)


def modified(path: Path) -> str:
    """Return when a file was changed, as HTTP has it."""
    return formatdate(path.stat().st_mtime, usegmt=True)


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file's bytes; its time differs by more than HTTP's second."""
    before_s = path.stat().st_mtime
    path.write_bytes(data)
    os.utime(path, (before_s + 10, before_s + 10))


@contextmanager
def _serving(folder: Path, handler: type[_Handler]) -> Iterator[Store]:
    store = Store(folder)
    bound = type(handler.__name__, (handler,), {"store": store, "timeout": 30})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = False
    store.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="store")
    thread.start()
    try:
        yield store
    finally:
        store.ended.set()
        server.shutdown()
        thread.join()
        server.socket.close()
        server.server_close()


@contextmanager
def bucket(folder: Path) -> Iterator[Store]:
    """Serve a folder as an S3 bucket."""
    with _serving(folder, _Bucket) as store:
        yield store


@contextmanager
def web(folder: Path) -> Iterator[Store]:
    """Serve a folder as a web server does."""
    with _serving(folder, _Web) as store:
        yield store


@contextmanager
def hub(folder: Path) -> Iterator[Store]:
    """Serve a folder as a model on the hub."""
    with _serving(folder, _Hub) as store:
        yield store


def s3_environment(store: Store) -> dict[str, str]:
    """Return the variables by which obstore finds the bucket."""
    return {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }
