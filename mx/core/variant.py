"""What a variant is named by: a plain word such as `checkpoint`, or a processing key. Pure.

A processing key has named fields: `engine=vllm,version=0.32.0,tp=0/2,dtype=bf16`. Its text is
canonical: the known fields in the order of `KNOWN_FIELDS`, then the others sorted, values as
`ProcessingKey` spells them. So two texts are equal exactly if the keys are.

The fields `tp`, `pp` and `ep` say rank and size: `tp=0/2` is the first of two tensor-parallel
ranks. Each is an axis of its own: the *bundle* of a key has as many ranks as the product of the
sizes. `tp=*/2` stands for all ranks of the axis; a key in which every axis has `*` names a bundle.

A key of more fields than a variant has room for (`shortened`) names the first of them, and has a
digest of all in the field `fields`. Its *document* is the JSON of all fields: a source sends it
with its registration, so that a reader can say which field differs. The digest proves it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mx.core.digest import document_digest
from mx.core.types import CHECKPOINT
from mx.errors import ConfigError

#: The most characters of a variant, and so of a processing key's text.
VARIANT_CHARS = 256
#: A key is shortened to this many, so that a field and long ranks can be added to it.
SHORT_CHARS = 200
#: The field that names a companion, by its path.
COMPANION = "companion"
#: The field of a shortened key that has the digest of all its fields.
FIELDS = "fields"
#: The most bytes of the document of a shortened key.
DOCUMENT_BYTES = 4096
_MAX_FIELDS = 64
_DIGEST_CHARS = 32
_MAX_DOCUMENTS = 1024
#: The most ranks of one bundle.
MAX_RANKS = 4096

RANK_FIELDS = ("tp", "pp", "ep", "part")
KNOWN_FIELDS = ("engine", "version", *RANK_FIELDS, "quantization", "dtype", "transformers")

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", re.ASCII)
_VERSION = re.compile(r"[0-9]+[A-Za-z0-9_.!+-]{0,63}", re.ASCII)
_RANK = re.compile(r"([0-9]{1,4}|\*)/([0-9]{1,4})", re.ASCII)
#: These end a value, or the variant, in the text of a model's name.
_NOT_IN_VALUES = ",=[]@"
_EXAMPLE = "write NAME=VALUE,NAME=VALUE, such as engine=vllm,tp=0/2,dtype=bf16"

_DTYPES = (
    "bf16", "fp16", "fp32", "fp64", "fp8", "fp8_e4m3", "fp8_e5m2", "fp6", "fp4", "mxfp8", "mxfp4",
    "nvfp4", "int8", "uint8", "int4", "uint4", "mixed",
)  # fmt: skip
#: The same dtypes as torch, transformers and the engines spell them.
_DTYPE_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_NAME_ALIASES = {"quantisation": "quantization"}


class Rank(NamedTuple):
    """One rank of an axis of parallelism, or with `rank` None all of them."""

    rank: int | None
    size: int

    def __str__(self) -> str:
        return f"{'*' if self.rank is None else self.rank}/{self.size}"


class Difference(NamedTuple):
    """A field in which two variants differ, with both values; "" stands for an absent field."""

    field: str
    first: str
    second: str


class ProcessingKey:
    """The named fields of a variant: one rank's weights as an engine holds them. Immutable.

    `str(key)` is its canonical text, which `parse` reads.
    """

    __slots__ = ("_fields", "_ranks", "_text")

    def __init__(
        self,
        /,
        *,
        engine: str = "",
        version: str = "",
        tp: Rank | tuple[int | None, int] | str | None = None,
        pp: Rank | tuple[int | None, int] | str | None = None,
        ep: Rank | tuple[int | None, int] | str | None = None,
        quantization: str = "",
        dtype: object = "",
        transformers: str = "",
        **others: object,
    ) -> None:
        """Check the fields. At least one must be given; "" and None leave one out.

        Args:
            engine: The engine that holds the weights, such as "vllm".
            version: The engine's version.
            tp: The tensor-parallel rank and size, as (0, 2) or "0/2"; the rank None for all.
            pp: The pipeline-parallel rank and size.
            ep: The expert-parallel rank and size, where experts are an axis of their own.
            quantization: The quantisation method, such as "awq".
            dtype: The weights' dtype, such as "bf16", "bfloat16" or `torch.bfloat16`.
            transformers: The version of transformers.
            others: Further fields of any name; their values are text or numbers.

        Raises:
            ConfigError: A field has a wrong value, or the text would be too long.
        """
        given: dict[str, object] = {
            "engine": engine,
            "version": version,
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "quantization": quantization,
            "dtype": dtype,
            "transformers": transformers,
        }
        self._fields = _checked({**given, **others})
        if not self._fields:
            raise ConfigError("a processing key has at least one field", hint=_EXAMPLE)
        self._ranks = {n: _rank(n, v) for n, v in self._fields.items() if n in RANK_FIELDS}
        self._text = _text(self._fields)
        if len(self._text) > VARIANT_CHARS:
            raise ConfigError(
                f"the processing key {self._text[:60]}… has {len(self._text)} characters, more "
                f"than {VARIANT_CHARS}",
                hint="leave out fields that do not tell variants apart",
            )
        if self.rank_count > MAX_RANKS:
            raise ConfigError(
                f"{self._text} is one of {self.rank_count} ranks; {MAX_RANKS} are the most",
                hint="leave out an axis whose rank follows from the others",
            )

    @classmethod
    def parse(cls, text: str) -> ProcessingKey:
        """Return the key that a text describes: fields in any order, in any known spelling.

        Args:
            text: FIELD=VALUE,FIELD=VALUE …

        Raises:
            ConfigError: It is not such a text; the message says what is wrong with it.
        """
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            name = _NAME_ALIASES.get(name, name)
            if not equals or not name or not value:
                raise ConfigError(
                    f"{part.strip()[:80]!r} is not a field of a processing key", hint=_EXAMPLE
                )
            if name in fields:
                raise ConfigError(f"the processing key {text[:80]!r} has `{name}` twice")
            fields[name] = value
        return cls(**fields)

    @property
    def fields(self) -> Mapping[str, str]:
        """All fields, in the order of the text."""
        return MappingProxyType(self._fields)

    @property
    def ranks(self) -> Mapping[str, Rank]:
        """The axes of parallelism: `tp`, `pp` and `ep`, as far as they are given."""
        return MappingProxyType(self._ranks)

    @property
    def rank_count(self) -> int:
        """How many ranks make a whole: the product of the sizes, 1 without any."""
        return math.prod(each.size for each in self._ranks.values())

    @property
    def names_bundle(self) -> bool:
        """True if an axis has no rank: the key names several variants, not one."""
        return any(each.rank is None for each in self._ranks.values())

    @property
    def bundle(self) -> ProcessingKey:
        """The key without its ranks: with `*` in their place, but with their sizes."""
        return self._with_ranks({name: None for name in self._ranks})

    def members(self) -> Iterator[ProcessingKey]:
        """Yield the keys of all ranks of the bundle, in order; the last axis varies fastest."""
        axes = [range(each.size) for each in self._ranks.values()]
        for ranks in itertools.product(*axes):
            yield self._with_ranks(dict(zip(self._ranks, ranks, strict=True)))

    def _with_ranks(self, ranks: Mapping[str, int | None]) -> ProcessingKey:
        fields: dict[str, Any] = dict(self._fields)
        for name, rank in ranks.items():
            fields[name] = Rank(rank, self._ranks[name].size)
        return ProcessingKey(**fields)

    def __getitem__(self, field: str) -> str:
        return self._fields[field]

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"ProcessingKey.parse({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, ProcessingKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessingKey.parse, (self._text,)


def shortened(fields: Mapping[str, object]) -> ProcessingKey:
    """Return the key of some fields; if they are too many, one that names a few of them.

    Args:
        fields: As for `ProcessingKey`. `state`, the ranks and the known fields are always named.

    Raises:
        ConfigError: A field has a wrong value, or even the few fields are too long.
    """
    found = _checked(fields)
    if len(_text(found)) <= SHORT_CHARS:
        return ProcessingKey(**found)
    document = _document(found)
    if len(document.encode()) > DOCUMENT_BYTES or len(found) > _MAX_FIELDS:
        raise ConfigError(f"a processing key has {len(found)} fields in {len(document)} characters")
    named = {n: v for n, v in found.items() if n in (*KNOWN_FIELDS, "state")}
    return ProcessingKey(**named, **{FIELDS: note_document(document)})


def note_document(document: str) -> str:
    """Keep the document of a shortened key, for `differences` and `document_of`.

    Args:
        document: The JSON of all its fields but the ranks.

    Returns:
        Its digest, as the key has it.

    Raises:
        ConfigError: It is not such a document.
    """
    digest = document_digest(document.encode()).hex()[:_DIGEST_CHARS]
    if digest not in _documents:
        _documents[digest] = document, _read(document)
        while len(_documents) > _MAX_DOCUMENTS:
            _documents.popitem(last=False)
    return digest


def document_of(variant: str) -> str:
    """Return the document of a shortened key; "" if none is known here."""
    found = _documents.get(_fields_of_text(variant).get(FIELDS, "")) if "=" in variant else None
    return "" if found is None else found[0]


#: By digest the documents that were made or read here: content-addressed, and bounded.
_documents: OrderedDict[str, tuple[str, Mapping[str, str]]] = OrderedDict()


def _document(fields: Mapping[str, str]) -> str:
    rest = {name: value for name, value in fields.items() if name not in RANK_FIELDS}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"))


def _read(document: str) -> Mapping[str, str]:
    """Return the fields of a document. Raises ConfigError."""
    wrong = ConfigError("the document of a processing key is not a JSON object of its fields")
    if len(document.encode()) > DOCUMENT_BYTES:
        raise wrong
    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(found, dict) or len(found) > _MAX_FIELDS or set(found) & set(RANK_FIELDS):
        raise wrong
    fields = _checked(found)
    if _document(fields) != document:
        raise wrong
    return fields


def _expanded(fields: Mapping[str, str]) -> Mapping[str, str]:
    """Return all fields of a shortened key, if its document is known; else the fields it names."""
    known = _documents.get(fields.get(FIELDS, ""))
    if known is None:
        return fields
    return {**known[1], **{name: value for name, value in fields.items() if name != FIELDS}}


def _checked(given: Mapping[str, object]) -> dict[str, str]:
    """Return fields as the canonical text has them, in its order. Raises ConfigError."""
    named = {_NAME_ALIASES.get(name, name): value for name, value in given.items()}
    found = {name: _value(name, v) for name, v in named.items() if v is not None and v != ""}
    known = [name for name in KNOWN_FIELDS if name in found]
    extra = sorted(found.keys() - set(KNOWN_FIELDS))
    return {name: found[name] for name in (*known, *extra)}


def _text(fields: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in fields.items())


def canonical_variant(variant: str | ProcessingKey) -> str:
    """Return a variant's text as `ModelKey.variant` has it: a key's canonical text, or the word.

    Args:
        variant: A key, its text, or a plain word. A text with "=" is a key.

    Raises:
        ConfigError: It is a malformed key.
    """
    if isinstance(variant, ProcessingKey) or "=" not in variant:
        return str(variant)
    return str(ProcessingKey.parse(variant))


@functools.lru_cache(maxsize=8192)  # the same few arrive again and again
def why_not_a_variant(variant: str) -> str | None:
    """Return why a text can't be the variant of one rank, or None if it can.

    Characters that no name may have are not looked at.
    """
    if "=" not in variant:
        return None
    try:
        key = ProcessingKey.parse(variant)
    except ConfigError as error:
        return str(error)
    if str(key) != variant:
        return f"the variant {variant!a} is written {str(key)!a}"
    if key.names_bundle:
        return f"{variant} names all ranks of a bundle: name one of them, such as {_first(key)}"
    return None


def companion_variant(variant: str, path: str) -> str:
    """Return the variant of a companion, a further tensor file of a checkpoint.

    Args:
        variant: The main weights' variant.
        path: The file's path.

    Raises:
        ConfigError: The text would be too long, or that variant is a companion itself.
    """
    if variant == CHECKPOINT:
        return str(ProcessingKey(**{COMPANION: path}))
    fields = _fields_of_text(variant) if "=" in variant else {"beside": variant}
    if COMPANION in fields:
        raise ConfigError(
            f"{variant[:80]} is the variant of a companion, which has no companions itself",
            hint=f"leave out `{COMPANION}`, or serve that one file alone",
        )
    return str(ProcessingKey(**fields, **{COMPANION: path}))


def companion_path(variant: str) -> str:
    """Return the path of the companion that a variant is; "" if it is none. A malformed key counts
    as a plain word."""
    if f"{COMPANION}=" not in variant or len(variant) > VARIANT_CHARS:
        return ""
    try:
        return _fields_of_text(variant).get(COMPANION, "")
    except ConfigError:
        return ""


def main_variant(variant: str) -> str:
    """Return the variant of the main weights that a companion lies beside; "" for "checkpoint"."""
    fields = dict(_fields_of_text(variant))
    del fields[COMPANION]
    return fields.get("beside", "") or _text(fields)


class Membership(NamedTuple):
    """What a variant is a rank of: the text of its bundle, and how many ranks that has.

    A variant that is not a rank of several is a bundle by itself.
    """

    bundle: str
    ranks: int

    @property
    def alone(self) -> bool:
        """True if the variant is a whole by itself."""
        return self.ranks == 1


def membership(variant: str) -> Membership:
    """Return what a variant is a rank of. A malformed key counts as a plain word."""
    if "=" in variant and len(variant) <= VARIANT_CHARS:
        return _membership(variant)
    return Membership(variant, 1)


@functools.lru_cache(maxsize=8192)
def _membership(variant: str) -> Membership:
    try:
        key = ProcessingKey.parse(variant)
    except ConfigError:
        return Membership(variant, 1)
    return (
        Membership(str(key.bundle), key.rank_count)
        if key.rank_count > 1
        else Membership(variant, 1)
    )


def members_of(bundle: str) -> Iterator[str]:
    """Yield the variants of a bundle, in order of their ranks.

    Args:
        bundle: As `Membership.bundle`.
    """
    if membership(bundle).alone:
        yield bundle
        return
    yield from map(str, ProcessingKey.parse(bundle).members())


def differences(first: str | ProcessingKey, second: str | ProcessingKey) -> tuple[Difference, ...]:
    """Return the fields in which two variants differ, in the order of a key's text.

    Of a shortened key all fields are compared where its document is known.

    Args:
        first: A key, its text, or a plain word, which counts as a field named `variant`.
        second: Another.

    Raises:
        ConfigError: One of them is a malformed key.
    """
    here, there = _fields_of(first), _fields_of(second)
    full = _expanded(here), _expanded(there)
    if not any(FIELDS in each for each in full):
        here, there = full
    extra = sorted((here.keys() | there.keys()) - set(KNOWN_FIELDS))
    return tuple(
        Difference(name, here.get(name, ""), there.get(name, ""))
        for name in (*KNOWN_FIELDS, *extra)
        if here.get(name, "") != there.get(name, "")
    )


def nearest(asked: str, listed: Iterable[str]) -> tuple[str, tuple[Difference, ...]] | None:
    """Return the listed key that differs from `asked` in the fewest fields, and those fields.

    Args:
        asked: The variant that was asked for.
        listed: The variants to choose from; those that are not keys are left out.

    Returns:
        None if `asked` is not a key, or none is listed. Differences have the listed value first.
    """
    if "=" not in asked or len(asked) > VARIANT_CHARS:
        return None
    try:
        _fields_of_text(asked)
    except ConfigError:
        return None
    keys = sorted({each for each in listed if "=" in each and why_not_a_variant(each) is None})
    found = [(each, differences(each, asked)) for each in keys]
    return min(found, key=lambda each: len(each[1]), default=None)


def _fields_of(variant: str | ProcessingKey) -> Mapping[str, str]:
    return _fields_of_text(variant) if isinstance(variant, str) else variant.fields


@functools.lru_cache(maxsize=8192)
def _fields_of_text(variant: str) -> Mapping[str, str]:
    return ProcessingKey.parse(variant).fields if "=" in variant else {"variant": variant}


def _first(key: ProcessingKey) -> str:
    return str(next(key.members()))


def _value(name: str, value: object) -> str:
    """Return a field's value as the canonical text has it. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:40]!r} can't be a field of a processing key",
            hint="a field's name has at most 32 lower-case letters, digits and _.-, a letter first",
        )
    if name in RANK_FIELDS:
        return str(_rank(name, value))
    text = str(value)
    if name == "dtype":
        text = text.removeprefix("torch.").lower()
        text = _DTYPE_ALIASES.get(text, text)
        if text not in _DTYPES:
            raise ConfigError(
                f"`dtype={text[:40]}` is not a dtype", hint="it is " + _one_of(_DTYPES)
            )
    elif name in ("version", "transformers"):
        if not _VERSION.fullmatch(text):
            raise ConfigError(
                f"`{name}={text[:40]}` is not a version", hint="write it as 0.32.0 or 5.23.0.dev0"
            )
    elif name in ("engine", "quantization"):
        if not _WORD.fullmatch(text):
            raise ConfigError(
                f"`{name}={text[:40]}` is not one word",
                hint="it has letters, digits and _.+-, at most 64",
            )
    elif not text.isprintable() or text != text.strip() or set(text) & set(_NOT_IN_VALUES):
        raise ConfigError(
            f"`{name}={text[:40]!a}` can't be the value of a field",
            hint=f"it has no control characters, no outer spaces and none of {_NOT_IN_VALUES}",
        )
    return text


def _rank(name: str, value: object) -> Rank:
    """Return a rank and a size from a `Rank`, a pair or a text. Raises ConfigError."""
    if isinstance(value, tuple) and len(value) == 2:
        value = Rank(*value)
    match = _RANK.fullmatch(str(value))
    if match is not None:
        rank, size = None if match[1] == "*" else int(match[1]), int(match[2])
        if size >= 1 and (rank is None or rank < size):
            return Rank(rank, size)
    raise ConfigError(
        f"`{name}={str(value)[:40]}` is not a rank and a size",
        hint=f"write RANK/SIZE, from {name}=0/2 to {name}=1/2 for two ranks",
    )


def _one_of(texts: Iterable[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} or {last}"
