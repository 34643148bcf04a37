"""Who may do what: the principals that certificates name, and the rules of a policy file. Pure.

A certificate's *principal* is the one URI of its subjectAltName (a SPIFFE id), else its first DNS
name, else its first address. A policy is a list of rules in TOML:

    [[allow]]
    principal = "spiffe://example.com/ns/*/sa/trainer"
    may = ["serve", "take-requests"]
    models = ["llama-*"]

What no rule allows is refused.
"""

from __future__ import annotations

import enum
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mx.errors import ConfigError, NotAllowedError
from mx.text import has_control, shown

#: The most rules of a policy, and the most characters of a pattern.
MOST_RULES, MOST_CHARACTERS = 2_000, 512
#: The most wildcards of a pattern: matching takes a time that grows with each.
MOST_WILDCARDS = 8
#: A SPIFFE id, as its standard has it.
_SPIFFE = re.compile(r"spiffe://[a-z0-9._-]+(/(?!\.{1,2}(/|$))[A-Za-z0-9._-]+)*")
_OPAQUE = re.compile(r"(?![0-9a-f]{1,4}:)[a-z][a-z0-9+.-]*:(?!//)", re.IGNORECASE)
#: What stands for `**`, and for `*` of a DNS name or an address.
_ANY, _OF_LABEL = ".*?", "[^./:]+?"
_HEADER = re.compile(r"\s*\[\[\s*allow\s*\]\]")
_KEYS = ("principal", "may", "models")


class Right(enum.Enum):
    """What a rule allows."""

    SERVE = "serve"
    PULL = "pull"
    TAKE_REQUESTS = "take-requests"
    OBSERVE = "observe"


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate names.

    Attributes:
        name: The principal: what quotas and logs name, and grants belong to.
        names: What a policy's patterns are compared with: the URI alone, else all DNS names and
            addresses.
        hosts: The DNS names and addresses: where its processes may be dialled.
    """

    name: str
    names: tuple[str, ...]
    hosts: tuple[str, ...]

    def is_at(self, host: str) -> bool:
        """Return True if the certificate names a host; `*.example.com` names a.example.com."""
        wanted = plain_host(host)
        _, dot, parent = wanted.partition(".")
        return wanted in self.hosts or (bool(dot) and f"*.{parent}" in self.hosts)


def subject_of(uris: Iterable[str], dns: Iterable[str], addresses: Iterable[str]) -> Subject:
    """Return whom the subjectAltName of a certificate names.

    Args:
        uris: Its URIs.
        dns: Its DNS names.
        addresses: Its IP addresses.

    Raises:
        NotAllowedError: It has several URIs, no name at all, one with control characters or
            beyond ASCII, or a SPIFFE id that is not well-formed, which no authority should sign.
    """
    uris, said = tuple(uris), (*dns, *addresses)
    # Beyond ASCII there are letters that are in lower case those of another name.
    if any(has_control(each) or not each.isascii() for each in (*uris, *said)):
        raise NotAllowedError("has a name that is not ASCII text in its subjectAltName")
    uris = tuple(map(_plain_uri, uris))
    hosts = tuple(dict.fromkeys(map(plain_host, said)))
    names = uris or hosts
    if len(uris) > 1:
        raise NotAllowedError(
            f"has {len(uris)} URIs in its subjectAltName, and one at most names a process",
            hint="give each process a certificate with one URI",
        )
    if any(each.startswith("spiffe:") and not _SPIFFE.fullmatch(each) for each in uris):
        raise NotAllowedError(
            f"has {shown(uris[0])} in its subjectAltName, which is not a SPIFFE id",
            hint="write spiffe://DOMAIN/PATH, each part of letters, digits, '-', '_' and '.'",
        )
    if not names or not names[0]:
        raise NotAllowedError(
            "has no subjectAltName, by which processes are known",
            hint="docs/tls.md shows how certificates are made",
        )
    if any("/" in host or _is_opaque(host) for host in hosts):  # it would be taken for a URI
        raise NotAllowedError("has a host like a URI in its subjectAltName")
    if any(len(name) > MOST_CHARACTERS for name in (*names, *hosts)):
        raise NotAllowedError("has a very long name in its subjectAltName")
    return Subject(names[0], names, hosts)


def subject_shown(certificate: Mapping[str, object]) -> Subject:
    """Return whom a verified certificate names.

    Args:
        certificate: What `getpeercert` of Python's `ssl` returns.

    Raises:
        NotAllowedError: As `subject_of`.
    """
    named: dict[str, list[str]] = {"URI": [], "DNS": [], "IP Address": []}
    entries = certificate.get("subjectAltName", ())
    for kind, value in entries if isinstance(entries, tuple) else ():
        if kind in named:
            named[kind].append(value)
    return subject_of(*named.values())


def plain_host(host: str) -> str:
    """Return a host as hosts are compared: the shortest form of an address, names in lower case."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host.lower().rstrip(".")


def is_own_host(header: str, names: Iterable[str]) -> bool:
    """Return True if a request's Host is an IP address, which no other site can come to mean, or
    one of a server's own names.

    Args:
        header: The header's value.
        names: The names, as certificates have them: `*.example.com`, too.
    """
    host, _, port = header.rpartition(":")
    host = host if port.isdigit() else header
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return Subject("", (), tuple(map(plain_host, names))).is_at(host)
    return True


def _is_opaque(text: str) -> bool:
    """Return True for a URI without an authority, such as a urn, or a pattern of such; False for
    an address, whose first part is of hexadecimal digits."""
    return _OPAQUE.match(text) is not None


def _plain_uri(text: str) -> str:
    """Return a URI with scheme and authority, or a urn's namespace, in lower case."""
    if _is_opaque(text):
        scheme, rest = text.split(":", 1)
        space, colon, name = rest.partition(":")
        is_urn = scheme.lower() == "urn"
        return f"{scheme.lower()}:{space.lower() if is_urn else space}{colon}{name}"
    scheme, mark, rest = text.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme.lower()}{mark}{authority.lower()}{slash}{path}" if mark else text


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as written."""

    principals: tuple[str, ...]
    rights: frozenset[Right]
    models: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class _CompiledRule:
    principals: tuple[re.Pattern[str], ...]
    rights: frozenset[Right]
    models: tuple[re.Pattern[str], ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a policy."""

    rules: tuple[Rule, ...]
    _compiled: tuple[_CompiledRule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = tuple(
            _CompiledRule(
                tuple(map(_principal_pattern, rule.principals)),
                rule.rights,
                tuple(map(_model_pattern, rule.models)),
            )
            for rule in self.rules
        )
        object.__setattr__(self, "_compiled", compiled)

    def of(self, subject: Subject) -> Rights:
        """Return what a principal may do."""
        return Rights(
            tuple(
                (rule.rights, rule.models)
                for rule in self._compiled
                if any(each.fullmatch(name) for each in rule.principals for name in subject.names)
            )
        )


@dataclass(frozen=True, slots=True)
class Rights:
    """What one principal may do: rights, and the models that they are for."""

    rules: tuple[tuple[frozenset[Right], tuple[re.Pattern[str], ...]], ...]

    def allow(self, rights: Iterable[Right], model: str | None = None) -> bool:
        """Return True if it has one of these rights.

        Args:
            rights: The rights.
            model: The name of the model; None for any model.
        """
        if model is not None and len(model) > MOST_CHARACTERS:
            return False
        wanted = frozenset(rights)
        return any(
            not wanted.isdisjoint(has)
            and (model is None or any(each.fullmatch(model) for each in models))
            for has, models in self.rules
        )


def read_policy(text: str) -> Policy:
    """Return the policy that a file's text has.

    Raises:
        ConfigError: The text is not a policy; the message has the line.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:  # a TOMLDecodeError, or that of a number with too many digits
        raise ConfigError(f"it is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError("it is not TOML that can be read: it is nested too deeply") from None
    lines = text.splitlines()
    for name in document:
        if name != "allow":
            written = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[=.\]]""")
            line = next((n for n, at in enumerate(lines, 1) if written.match(at)), 0)
            where = f"line {line}: " if line else ""
            raise ConfigError(f"{where}there is no {name!r}; write rules as [[allow]]")
    entries = document.get("allow", [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ConfigError("`allow` is not a list of rules; write each as [[allow]]")
    if not 0 < len(entries) <= MOST_RULES:  # a file that is being written has none
        raise ConfigError(f"it has {len(entries)} rules; 1 to {MOST_RULES} are possible")
    headers = [number for number, line in enumerate(lines, 1) if _HEADER.match(line)]
    places = headers if len(headers) == len(entries) else []
    rules = []
    for number, entry in enumerate(entries):
        where = f"line {places[number]}" if places else f"rule {number + 1}"
        try:
            rules.append(_rule(entry))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return Policy(tuple(rules))


def _rule(entry: dict[str, object]) -> Rule:
    """Return the rule of one entry. Raises ValueError."""
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ValueError(f"there is no {unknown[0]!r}; a rule has {', '.join(_KEYS)}")
    principals = _texts(entry, "principal")
    models = _texts(entry, "models") if "models" in entry else ("*",)
    rights = []
    for name in _texts(entry, "may"):
        try:
            rights.append(Right(name))
        except ValueError:
            known = ", ".join(right.value for right in Right)
            raise ValueError(f"there is no right {name!r}; there are {known}") from None
    return Rule(principals, frozenset(rights), models)


def _texts(entry: dict[str, object], key: str) -> tuple[str, ...]:
    """Return the texts of a key: one, or a list of them. Raises ValueError."""
    value = entry.get(key)
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise ValueError(f"`{key}` is missing" if value is None else f"`{key}` has no text")
    for each in found:
        if not isinstance(each, str) or not each or has_control(each):
            raise ValueError(f"`{key}` has {each!r}, which is not text that names anything")
        if len(each) > MOST_CHARACTERS or each.count("*") > MOST_WILDCARDS:
            raise ValueError(
                f"`{key}` has a pattern beyond {MOST_CHARACTERS} characters or {MOST_WILDCARDS} *"
            )
    return tuple(found)


def _principal_pattern(text: str) -> re.Pattern[str]:
    """Return what a pattern of principals matches: `*` is one or more characters of a DNS label,
    of a segment of a URI's path, or between the colons of an opaque URI; `**` is any characters."""
    if _is_opaque(text):
        return _pattern(_split(_plain_uri(text), "[^:/?#]+?"))
    if "://" not in text:
        return _pattern(_split(plain_host(text), _OF_LABEL))
    scheme, mark, rest = _plain_uri(text).partition("://")
    authority, slash, path = rest.partition("/")
    *before, last = _split(scheme + mark + authority, _OF_LABEL)
    first, *after = _split(slash + path, "[^/?#]+?")
    return _pattern([*before, last + first, *after])


def _model_pattern(text: str) -> re.Pattern[str]:
    """Return what a pattern of model names matches: `*` is any characters."""
    return _pattern(_split(text.replace("*", "**"), ""))


def _split(text: str, one: str) -> list[str]:
    """Return what `_pattern` takes: `one` stands for `*`."""
    parts: Sequence[str] = re.split(r"(\*\*|\*)", text)
    wild = {"*": one, "**": _ANY}
    return [wild.get(part) or re.escape(part) for part in parts]


def _pattern(parts: Sequence[str]) -> re.Pattern[str]:
    """Return an expression of texts and, between them, what stands for wildcards.

    No name, which others choose, takes long to compare. The first place of a text after `*` will
    do: `*` of another place can't begin where that of the first could not go on to. So will the
    first place of what lies between two `**`. The last ones end where the name does.
    """
    stretches, last = [parts[0]], len(parts) - 2
    for at in range(1, len(parts), 2):
        wild, text = parts[at : at + 2]
        if wild == _ANY:
            stretches.append(text)
        else:
            stretches[-1] += wild + text if at == last else f"(?>{wild}{text})"
    first, *rest = stretches
    found = first + "".join(f"(?>{_ANY}{each})" for each in rest[:-1])
    return re.compile(found + "".join(_ANY + each for each in rest[-1:]), re.DOTALL)
