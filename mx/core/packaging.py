"""The rules for files that travel beside the tensors, and for their names.

A source leaves out files that break the rules. A target refuses them: a manifest comes from a
peer, and its paths decide which files `--out` creates.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from mx.text import has_control
from mx.units import MIB

MAX_SIDE_FILE_BYTES = 64 * MIB
MAX_SIDE_FILES = 1000
#: All side files together: sources hold them in memory, and tokenizers are large.
MAX_SIDE_FILES_BYTES = 256 * MIB
MAX_PATH_BYTES = 512
#: Further tensor files beside the main weights, and the most characters of the path of one, which
#: names its variant.
MAX_COMPANIONS = 256
MAX_COMPANION_CHARS = 160
_NOT_IN_VARIANTS = ",=[]@"
#: Of a tensor and of a layer.
MAX_NAME_CHARS = 1024
TENSOR_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
#: The configuration of an adapter of PEFT, and its weights.
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Digests beside the weights of a folder (`mx.snapshots.digests`), which do not travel as a file.
DIGESTS = "digests/weights.mx"
#: In a folder that is one rank of a snapshot (`mx.snapshots.container`): what it holds. It is
#: hidden, so that no peer can have a pull write one.
RANK = ".mx-rank.json"

# SECURITY.md has these as a table.
_OLDER_SUFFIXES = (".json", ".txt", ".md", ".jinja", ".tiktoken", ".bpe", ".vocab")
TEXT_SUFFIXES = (*_OLDER_SUFFIXES, ".codes", ".tokenizer", ".sig")
TEXT_NAMES = ("license", "licence", "notice", "copying")
# SentencePiece's binary files, and Mistral's (tokenizer.model.v3). ".model" alone may be anything
# (gensim pickles under it), so the name must say tokenizer too.
_BINARY = re.compile(r".*(\.model(\.v\d+\w*)?|\.spm)", re.ASCII | re.S)
_BINARY_STEMS = ("token", "spiece", "sentencepiece", "spm", "source", "target")
# What a content-addressed store calls a file: its digest, maybe without the first digits.
_DIGEST = re.compile(r"[0-9a-f]{30,128}", re.ASCII)
# The first bytes of a pickle (protocol 2 and up), zip (torch.save), gzip, ELF, script and PEM key.
_NEVER_MAGIC = (b"\x80", b"PK\x03\x04", b"\x1f\x8b", b"\x7fELF", b"#!", b"-----BEGIN ")
_MAGIC_BYTES = max(map(len, _NEVER_MAGIC))
# Characters that no text has, in whatever encoding of single bytes.
_NOT_TEXT = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


def bad_path(path: str) -> str | None:
    """Return why `path` must not be created below a folder, or None if it may be.

    A good path is relative and printable, has forward slashes and no hidden part, and does not
    leave the folder.
    """
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid text"
    if not path or len(encoded) > MAX_PATH_BYTES:
        return "is empty or too long"
    if not path.isprintable() or "\\" in path or ":" in path:
        return "holds a character that is not allowed in paths"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "is absolute or leaves the folder"
        if part.startswith("."):
            return "is hidden"
        if len(part.encode()) > 255:
            return "is too long"
    return None


def bad_side_path(path: str) -> str | None:
    """Return why a side file of this name must not travel, or None if it may."""
    reason = bad_path(path)
    if reason is not None:
        return reason
    name = path.rpartition("/")[2].lower()
    if _is_named_as_text(name):
        return None
    if _BINARY.fullmatch(name):
        return None if any(s in name for s in _BINARY_STEMS) else "is not known to be a tokenizer"
    return "is not JSON, text or a tokenizer"


def is_index(path: str) -> bool:
    """Return True for an index of safetensors files, whatever variant of the weights it is of."""
    return path.endswith(".index.json") and f"{TENSOR_SUFFIX}." in path


def bad_companion_path(path: str) -> str | None:
    """Return why a tensor file of this path must not be a companion, or None if it may."""
    reason = bad_path(path)
    if reason is None and not path.endswith(TENSOR_SUFFIX):
        reason = f"does not end in {TENSOR_SUFFIX}"
    if reason is None and (
        len(path) > MAX_COMPANION_CHARS or path != path.strip() or set(path) & set(_NOT_IN_VARIANTS)
    ):
        reason = f"has a name that is too long, or holds one of {_NOT_IN_VARIANTS}"
    return reason


def bad_link_target(path: str) -> str | None:
    """Return why a side file must not be a link to a file of this path below a folder that links
    may lead to, or None if it may. A name that is a digest says nothing, and may be one."""
    if _DIGEST.fullmatch(path.rpartition("/")[2]):
        return bad_path(path)
    return bad_side_path(path)


def is_newer(path: str, data: bytes) -> bool:
    """Return True if a release that reads only the first list of a packaging's side files refuses
    this one, which may travel."""
    name = path.rpartition("/")[2].lower()
    if not name.endswith(_OLDER_SUFFIXES):
        return not name.endswith((".model", ".spm"))
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def _is_named_as_text(name: str) -> bool:
    return name.endswith(TEXT_SUFFIXES) or name in TEXT_NAMES


class SideContent:
    """Checks a side file's bytes, a piece at a time, against what its name promises."""

    def __init__(self, path: str) -> None:
        name = path.rpartition("/")[2].lower()
        text = _is_named_as_text(name)
        self._decoder = codecs.getincrementaldecoder("utf-8")() if text else None
        self._begins = b""
        self._is_text = True
        # Old vocabularies are in Latin-1 or the like, JSON never is.
        self._may_be_bytes = not name.endswith(".json")

    def update(self, data: bytes) -> None:
        """Check the next bytes."""
        if len(self._begins) < _MAGIC_BYTES:
            self._begins += data[:_MAGIC_BYTES]
        if self._decoder is not None and self._may_be_bytes:
            self._may_be_bytes = len(data.translate(None, _NOT_TEXT)) == len(data)
        self._decode(data, final=False)

    def finish(self) -> str | None:
        """Return why the bytes must not travel, or None if they may."""
        if self._begins.startswith(_NEVER_MAGIC):
            return "is a program, an archive, a pickle or a key"
        self._decode(b"", final=True)
        return None if self._is_text or self._may_be_bytes else "is not text"

    def _decode(self, data: bytes, *, final: bool) -> None:
        if self._decoder is not None and self._is_text:
            try:
                self._decoder.decode(data, final)
            except UnicodeDecodeError:
                self._is_text = False


def bad_side_content(path: str, data: bytes) -> str | None:
    """Return why these bytes are not what a side file's name promises, or None if they are."""
    content = SideContent(path)
    content.update(data)
    return content.finish()


def bad_path_set(paths: Iterable[str]) -> str | None:
    """Return why these paths cannot all be created in one folder, or None if they can."""
    seen: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        folded = path.casefold()  # on some file systems these are one file
        if folded in seen:
            return f"there are two {path!r}"
        seen.add(folded)
        parts = folded.split("/")
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
    clash = seen & folders
    return f"{min(clash)!r} is both a file and a folder" if clash else None


def bad_tensor_name(name: str) -> str | None:
    """Return why a tensor must not have this name, or None if it may. safetensors accepts more."""
    if not name or len(name) > MAX_NAME_CHARS:
        return "is empty or too long"
    if has_control(name):
        return "holds a control character"
    if name == "__metadata__":
        return "has another meaning in a header"
    if ".." in name and ".." in name.replace("\\", "/").split("/"):
        return "holds '..' as a path does"
    return None
