"""Whom certificates name, and what a policy allows them."""

from __future__ import annotations

import contextlib
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mx.core.policy import (
    MOST_CHARACTERS,
    MOST_WILDCARDS,
    Policy,
    Right,
    Rule,
    Subject,
    read_policy,
    subject_of,
)
from mx.errors import ConfigError, NotAllowedError

LABELS = st.text("abcxyz0189-", min_size=1, max_size=6)
RIGHTS = st.sampled_from(Right)


def subject(name: str) -> Subject:
    return Subject(name, (name,), ())


def allows(principal: str, name: str) -> bool:
    policy = Policy((Rule((principal,), frozenset([Right.PULL])),))
    return policy.of(subject(name)).allow([Right.PULL], "m")


def test_the_uri_is_the_principal_and_others_are_where_it_is() -> None:
    one = subject_of(["SPIFFE://Example.com/ns/A"], ["Gpu1.example.com."], ["0:0:0:0:0:0:0:1"])
    assert one == Subject(
        "spiffe://example.com/ns/A", ("spiffe://example.com/ns/A",), ("gpu1.example.com", "::1")
    )
    several = subject_of([], ["b.example", "a.example"], ["10.0.0.1"])
    assert several.name == "b.example"
    assert several.names == several.hosts == ("b.example", "a.example", "10.0.0.1")
    assert subject_of([], [], ["10.0.0.1"]).name == "10.0.0.1"


@pytest.mark.parametrize(
    ("uris", "dns"),
    [(["a://b", "a://c"], []), ([], []), (["a://b\n"], []), ([], ["a\x00.b"]), ([], ["urn:mx:a"])],
)
def test_certificates_that_name_no_one_process(uris: list[str], dns: list[str]) -> None:
    with pytest.raises(NotAllowedError, match="subjectAltName"):
        subject_of(uris, dns, [])


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://e.com/ns/../sa/trainer",
        "spiffe://e.com/ns/./sa",
        "spiffe://e.com/..",
        "spiffe://e.com/ns//sa",
        "spiffe://e.com/ns/",
        "spiffe://e.com/ns/%2e%2e",
        "spiffe://e.com/ns/a b",
        "spiffe://e.com/ns/a?b",
        "spiffe://e.com/ns/a#b",
        "spiffe://e.com/ns/a\\b",
        "spiffe://root@e.com/ns/a",
        "spiffe://root:x@e.com/ns/a",
        "spiffe://e.com:443/ns/a",
        "spiffe:///ns/a",
        "spiffe://",
        "spiffe:e.com/ns/a",
        "SPIFFE:/e.com/ns/a",
        "spiffe://e.com/ns/\u0430",
        "https://e.com/\u212aa",
    ],
)
def test_ids_that_are_not_well_formed_name_no_process(uri: str) -> None:
    with pytest.raises(NotAllowedError, match="subjectAltName"):
        subject_of([uri], ["a.example"], [])


def test_no_name_becomes_another_one_in_lower_case() -> None:
    """As that of KELVIN SIGN does."""
    for uris, dns in ((["spiffe://\u212a8s.example/a"], []), ([], ["\u212a8s.example"])):
        with pytest.raises(NotAllowedError, match="subjectAltName"):
            subject_of(uris, dns, [])


@pytest.mark.parametrize(
    "uri",
    ["spiffe://e.com", "spiffe://e_1.com/a", "spiffe://e.com/ns/A-b_c.d/...", "https://u@e/../a"],
)
def test_ids_that_are(uri: str) -> None:
    assert subject_of([uri], [], []).name == uri


def test_hosts_that_a_certificate_names() -> None:
    one = subject_of([], ["*.pods.example", "a.example"], ["10.0.0.1", "FD00:0::1"])
    for host in ("x.pods.example", "A.example.", "10.0.0.1", "[fd00::1]"):
        assert one.is_at(host)
    for host in ("pods.example", "x.y.pods.example", "b.example", "10.0.0.2", "", "*"):
        assert not one.is_at(host)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("spiffe://e.com/ns/*/sa/t", "spiffe://e.com/ns/a/sa/t", True),
        ("spiffe://e.com/ns/*/sa/t", "spiffe://e.com/ns/a/b/sa/t", False),
        ("spiffe://e.com/ns/*", "spiffe://e.com/ns/a.b:c", True),
        ("spiffe://e.com/ns/*", "spiffe://e.com/ns/", False),
        ("spiffe://*/ns/a", "spiffe://x.com/ns/a", False),
        ("spiffe://*.com/ns/a", "spiffe://x.com/ns/a", True),
        ("spiffe://E.com/ns/a", "spiffe://e.com/ns/a", True),
        ("spiffe://e.com/ns/a", "spiffe://e.com/ns/A", False),
        ("spiffe://e.com/**", "spiffe://e.com/a/b", True),
        ("*.e.com", "a.e.com", True),
        ("*.e.com", "a.b.e.com", False),
        ("gpu*.e.com", "gpu12.e.com", True),
        ("gpu*.e.com", "gpu.e.com", False),
        ("E.com", "e.com", True),
        ("a.com", "axcom", False),
        ("10.0.0.*", "10.0.0.7", True),
        ("10.0.*", "10.0.0.7", False),
        ("**", "spiffe://e.com/a", True),
        ("*", "spiffe://e.com/a", False),
        ("*", "host", True),
        ("urn:mx:ns:*", "urn:mx:ns:Trainer.1", True),
        ("urn:mx:ns:*", "urn:mx:ns:a:b", False),
        ("urn:mx:ns:*", "urn:mx:ns:a/b", False),
        ("urn:mx:**", "urn:mx:ns:a/b", True),
        ("URN:MX:Ns:A", "urn:mx:Ns:A", True),
        ("urn:mx:Ns:A", "urn:mx:ns:a", False),
        ("tag:e.com,2026:*", "tag:e.com,2026:replica", True),
        ("fd00::*", "fd00::7", True),
        ("FD00::*", "fd00::7:8", False),
        ("**/sa/t*r", "spiffe://e.com/sa/t/sa/trainer", True),
        ("**/sa/t*r", "spiffe://e.com/sa/trainer/sa", False),
    ],
)
def test_patterns_of_principals(pattern: str, name: str, expected: bool) -> None:
    assert allows(pattern, name) is expected


@given(st.lists(LABELS, min_size=2, max_size=5), st.data())
def test_a_star_stays_within_its_label_or_segment(parts: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(parts) - 1))
    more = data.draw(LABELS)
    starred = [*parts[:at], "*", *parts[at + 1 :]]
    grown = [*parts[:at], more, *parts[at:]]
    for first, between in (("", "."), ("spiffe://e.com/", "/")):
        assert allows(first + between.join(starred), first + between.join(parts))
        assert not allows(first + between.join(starred), first + between.join(grown))
        assert not allows(first + between.join(starred), first + between.join(parts[:-1]))


@given(LABELS, LABELS, st.lists(st.tuples(LABELS, st.sets(RIGHTS, min_size=1), LABELS)))
def test_only_what_a_rule_says_is_allowed(
    name: str, model: str, rules: list[tuple[str, set[Right], str]]
) -> None:
    policy = Policy(tuple(Rule((p,), frozenset(r), (m,)) for p, r, m in rules))
    for right in Right:
        said = any(p == name and right in r and m == model for p, r, m in rules)
        assert policy.of(subject(name)).allow([right], model) is said
        anywhere = any(p == name and right in r for p, r, _ in rules)
        assert policy.of(subject(name)).allow([right]) is anywhere


@given(st.lists(LABELS, min_size=1, max_size=4), LABELS)
def test_models_match_any_characters(parts: list[str], other: str) -> None:
    rule = Rule(("p",), frozenset([Right.PULL]), ("/".join(parts) + "/*",))
    rights = Policy((rule,)).of(subject("p"))
    assert rights.allow([Right.PULL], "/".join([*parts, other, other]))
    assume(not other.startswith(parts[0]))
    assert not rights.allow([Right.PULL], other)


@given(st.text("ab*", max_size=8), st.text("ab", max_size=10))
def test_models_match_as_globs_do(pattern: str, name: str) -> None:
    rights = Policy((Rule(("p",), frozenset([Right.PULL]), (pattern,)),)).of(subject("p"))
    assert rights.allow([Right.PULL], name) is fnmatchcase(name, pattern)


def _matches(tokens: list[str], name: str, stops: str) -> bool:
    """As `mx.core.policy`, one character at a time: which tokens may come next."""

    def skipped(found: set[int]) -> set[int]:  # what `**` may leave out
        more = {at + 1 for at in found if at < len(tokens) and tokens[at] == "**"}
        return found if more <= found else skipped(found | more)

    at, repeats = skipped({0}), set[int]()  # `*` may go on
    for character in name:
        after, going_on = set[int](), set[int]()
        for each in at | repeats:
            token = tokens[each] if each < len(tokens) else ""
            if token == "**":
                after |= {each}
            elif token == "*" and character not in stops:
                after |= {each + 1}
                going_on |= {each}
            elif token == character:
                after |= {each + 1}
        at, repeats = skipped(after), going_on
    return len(tokens) in at


TOKENS = st.lists(st.sampled_from(["a", "b", "*", "**", ":", "."]), max_size=12)


@given(TOKENS, st.text("ab:.", max_size=14))
def test_patterns_match_as_a_simple_matcher_does(tokens: list[str], rest: str) -> None:
    # Two single stars in a row are one `**`.
    assume(not any(one == "*" and "*" in two for one, two in pairwise(tokens)))
    for before, stops, mark in (("urn:x:", ":", ":"), ("spiffe://e/", "/", "/"), ("h", ".", ".")):
        name = before + rest.replace(":", mark)
        pattern = [*before, *(each.replace(":", mark) for each in tokens)]
        if before != "h" or pattern[-1] != ".":  # a host's last dot does not count
            assert allows("".join(pattern), name) is _matches(pattern, name, stops)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*a" * MOST_WILDCARDS, "a" * (MOST_CHARACTERS - 1) + "b"),
        ("spiffe://e/" + "*a" * MOST_WILDCARDS, "spiffe://e/" + "a" * 500 + "b"),
        ("**a*b" * 2 + "**a*a", "spiffe://e/" + "a" * 500 + "c"),
        ("urn:x:" + "**a*" * 2 + "b", "urn:x:" + "a" * 500 + "c"),
    ],
)
def test_no_principal_takes_long_to_compare(pattern: str, name: str) -> None:
    assert not allows(pattern, name)  # hours, if each way was tried


def test_no_name_takes_long_to_compare() -> None:
    rule = Rule(("p",), frozenset([Right.PULL]), ("*a" * MOST_WILDCARDS + "b",))
    rights = Policy((rule,)).of(subject("p"))
    assert not rights.allow([Right.PULL], "a" * MOST_CHARACTERS)  # hours, if each way was tried
    assert not rights.allow([Right.PULL], "a" * MOST_CHARACTERS + "b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[allow]\n", "not TOML.*line 1"),
        ("[[allow]]\nprincipal = 'a'\nmay = 'fly'\n", "line 1: there is no right 'fly'"),
        ("\n\n[[allow]]\nmay = 'pull'\n", "line 3: `principal` is missing"),
        ("[[allow]]\nprincipal = 'a'\n", "line 1: `may` is missing"),
        ("[[allow]]\nprincipal = ''\nmay = 'pull'\n", "line 1: `principal` has ''"),
        ("[[allow]]\nprincipal = 'a'\nmay = []\n", "`may` has no text"),
        ("[[allow]]\nprincipal = 'a'\nmay = 'pull'\nmodels = 5\n", "`models`"),
        ("[[allow]]\nprincipal = 'a'\nmay = 'pull'\nmodel = 'm'\n", "there is no 'model'"),
        ("[[allow]]\nprincipal = 'a'\nmay = 'pull'\n\n[[deny]]\n", "line 5: there is no 'deny'"),
        ("", "0 rules"),
        ("allow = 5\n", "`allow` is not a list"),
        (f"[[allow]]\nprincipal = '{'a*' * 9}'\nmay = 'pull'\n", "beyond 512 characters or 8"),
    ],
)
def test_what_is_wrong_with_a_policy(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_policy(text)


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert read_policy(text).rules


def test_a_policy_as_it_is_written() -> None:
    policy = read_policy(
        "[[allow]]\nprincipal = ['a', '*.b']\nmay = ['serve', 'take-requests']\nmodels = 'llama*'\n"
    )
    rights = frozenset([Right.SERVE, Right.TAKE_REQUESTS])
    assert policy == Policy((Rule(("a", "*.b"), rights, ("llama*",)),))


def test_a_number_with_too_many_digits_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        read_policy(f"x = {'9' * 5000}")


def test_a_host_is_no_uri() -> None:
    with pytest.raises(NotAllowedError, match="like a URI"):
        subject_of([], ["spiffe://example.com/ns/prod/sa/trainer"], [])
