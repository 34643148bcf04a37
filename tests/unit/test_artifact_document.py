"""The document of a set of artefacts: one encoding, everything bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.artifacts import document as documents
from mx.artifacts.document import (
    COMPILE_CACHE,
    CUDA_GRAPH,
    ArtifactFile,
    Blob,
    Document,
    decode,
    encode,
)
from mx.errors import ArtifactError, IntegrityError
from mx.wire.v1 import artifacts_pb2 as pb
from tests.support import artifact_sets

CONTENTS = {"inductor/a/x.py": b"one", "inductor/a/y.so": b"two", "triton/z": b"one"}
GOOD = artifact_sets.document(CONTENTS, environment={"torch": "2.13.0", "isa": "avx2"})

PIN = 64 * "1"
GRAPHS = replace(
    artifact_sets.document({f"graphs/{PIN}/decode": b"graph", f"graphs/{PIN}/images/x": b"cubin"}),
    kind=CUDA_GRAPH,
    pin=PIN,
)

_names = st.text("abcXYZ019_.+-=@,~", min_size=1, max_size=12).filter(
    lambda text: text not in (".", "..")
)
_paths = st.tuples(
    st.sampled_from(["inductor", "triton", "vllm"]), st.lists(_names, min_size=1, max_size=4)
).map(lambda parts: "/".join([parts[0], *parts[1]]))
_models = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(
    contents=st.dictionaries(_paths, st.binary(min_size=1, max_size=20), min_size=1, max_size=8),
    environment=st.dictionaries(
        st.from_regex(r"\A[a-z][a-z0-9_.]{0,31}\Z"), st.text(st.characters(categories=["L", "N"]))
    ),
    model=_models,
)
def test_a_document_is_read_as_it_was_written(
    contents: dict[str, bytes], environment: dict[str, str], model: str
) -> None:
    made = artifact_sets.document(contents, environment=environment, model=model)
    try:
        data = encode(made)
    except IntegrityError:
        return  # two paths that some file system takes for one, or a file that is a folder
    found = decode(data)
    assert replace(found, environment=dict(sorted(environment.items()))) == found
    assert (found.model, found.files, found.blobs) == (model, made.files, made.blobs)
    assert encode(found) == data


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        decode(data)


@given(data=st.data())
def test_a_document_that_was_changed_is_another_or_none(data: st.DataObject) -> None:
    good = encode(GOOD)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(changed))
    except IntegrityError:
        return
    assert encode(found) == bytes(changed)
    assert documents.set_id(bytes(changed)) != documents.set_id(good)


def _file(path: str) -> Document:
    return replace(GOOD, files=sorted([*GOOD.files, ArtifactFile(path, 0)], key=lambda f: f.path))


@pytest.mark.parametrize(
    "path",
    [
        "x", "", "/etc/passwd", "inductor/../../x", "inductor/./x", "inductor//x", "inductor/x/",
        "inductor/a\nb", "inductor/a\0b", "..", "inductor\\..\\x", "inductor/" + 256 * "x",
        "inductor/" + "/".join(600 * "x"), "inductor/\u202egpj.so",
        "inductor/A/x.py",  # another case of one that is there
        "inductor/a/x.py",  # twice
        "inductor/a",  # a folder that is there
        "inductor/a/x.py/z",  # below a file
    ],
)  # fmt: skip
def test_paths_stay_below_the_folder_and_apart(path: str) -> None:
    with pytest.raises(IntegrityError):
        encode(_file(path))


WRONG: dict[str, Callable[[], Document]] = {
    "no model": lambda: replace(GOOD, model=""),
    "a long model": lambda: replace(GOOD, model=214 * "m"),  # it is listed by a longer name
    "a model's revision": lambda: replace(GOOD, model="m:r"),
    "a model's pin": lambda: replace(GOOD, model="m@" + PIN),
    "a model's variant": lambda: replace(GOOD, model="m[v]"),
    "a model with space around": lambda: replace(GOOD, model="m "),
    "a model that moves the cursor": lambda: replace(GOOD, model="m\x1b[A"),
    "another kind": lambda: replace(GOOD, kind="script"),
    "no time": lambda: replace(GOOD, created_s=0),
    "a time far off": lambda: replace(GOOD, created_s=1 << 60),
    "too many fields": lambda: replace(GOOD, environment={f"f{n}": "" for n in range(65)}),
    "a field's name": lambda: replace(GOOD, environment={"A b": "x"}),
    "a field's value": lambda: replace(GOOD, environment={"a": "x\n"}),
    "a long value": lambda: replace(GOOD, environment={"a": 513 * "x"}),
    "a short digest": lambda: replace(GOOD, blobs=[Blob(b"x", 1), *GOOD.blobs[1:]]),
    "too many bytes": lambda: replace(
        GOOD, blobs=[replace(GOOD.blobs[0], nbytes=1 << 62), *GOOD.blobs[1:]]
    ),
    "the same blob twice": lambda: replace(GOOD, blobs=[GOOD.blobs[0], GOOD.blobs[0]]),
    "a blob of no file": lambda: replace(GOOD, blobs=[*GOOD.blobs, Blob(bytes(32), 1)]),
    "a file of no blob": lambda: replace(GOOD, files=[ArtifactFile("triton/b", 2)]),
    "another order": lambda: replace(GOOD, files=GOOD.files[::-1]),
    "caches with a pin": lambda: replace(GOOD, pin=64 * "0"),
    "caches beside graphs": lambda: replace(
        GOOD, files=[ArtifactFile(f"graphs/{PIN}/g", 0), *GOOD.files]
    ),
    "graphs without a pin": lambda: replace(GRAPHS, pin=""),
    "graphs of another pin": lambda: replace(GRAPHS, pin=64 * "2"),
    "graphs with caches": lambda: replace(
        GRAPHS, files=[*GRAPHS.files, ArtifactFile("inductor/x", 0)]
    ),
    "graphs in caches": lambda: replace(GRAPHS, kind=COMPILE_CACHE),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_out_of_bounds_are_refused(what: str) -> None:
    wrong = WRONG[what]()
    with pytest.raises(IntegrityError):
        encode(wrong)
    # Nor are they read, by whomever they were written.
    with pytest.raises(IntegrityError):
        decode(documents._message(wrong).SerializeToString(deterministic=True))


def test_the_longest_name_of_a_model() -> None:
    longest = replace(GOOD, model=213 * "m")
    assert decode(encode(longest)) == longest


def test_graphs_are_a_document_too() -> None:
    assert decode(encode(GRAPHS)) == GRAPHS


@pytest.mark.parametrize("what", ["unknown field", "order of fields", "field twice", "format"])
def test_there_is_one_encoding(what: str) -> None:
    good = encode(GOOD)
    message = pb.ArtifactDocument.FromString(good)
    if what == "unknown field":
        changed = good + b"\xf8\x07\x01"
    elif what == "order of fields":
        changed = good[2:] + good[:2]  # the format's number comes last
    elif what == "field twice":
        message.environment.add(name="torch", value="another")
        changed = message.SerializeToString(deterministic=True)
    else:
        message.format = 2
        changed = message.SerializeToString(deterministic=True)
    with pytest.raises(ArtifactError):
        decode(changed)
    assert decode(good) == decode(good)


def test_more_bytes_than_any_document_has_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(ArtifactError, match="more than 10"):
        decode(encode(GOOD))


@pytest.mark.parametrize("field", ["environment", "blobs", "files"])
def test_what_is_too_much_is_counted_before_it_is_looked_at(field: str) -> None:
    number = pb.ArtifactDocument.DESCRIPTOR.fields_by_name[field].number
    with pytest.raises(ArtifactError, match="has more than"):
        decode(b"\x08\x01" + bytes([number << 3 | 2, 0]) * 30_000)
