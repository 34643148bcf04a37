"""Processing keys: text and fields, what they refuse, how they differ, which ranks make a whole."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mx
from mx import codec
from mx.core.reference import parse_reference
from mx.core.types import ModelKey
from mx.core.variant import (
    MAX_RANKS,
    SHORT_CHARS,
    VARIANT_CHARS,
    Difference,
    ProcessingKey,
    Rank,
    canonical_variant,
    companion_variant,
    differences,
    document_of,
    members_of,
    membership,
    nearest,
    note_document,
    shortened,
    why_not_a_variant,
)
from mx.errors import ConfigError

ranks = st.integers(1, 16).flatmap(
    lambda size: st.tuples(st.none() | st.integers(0, size - 1), st.just(size))
)
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,10}", fullmatch=True)
versions = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}(\.dev0|rc1|\+cu128)?", fullmatch=True)
extra_names = st.from_regex(r"x[a-z0-9_.-]{0,8}", fullmatch=True)
extra_values = st.text(
    st.characters(categories=["L", "N", "P", "S"], exclude_characters=",=[]@"), min_size=1,
    max_size=10,
)  # fmt: skip
some_fields = st.fixed_dictionaries(
    {},
    optional={
        "engine": words,
        "version": versions,
        "tp": ranks,
        "pp": ranks,
        "ep": ranks,
        "quantization": words,
        "dtype": st.sampled_from(["bf16", "bfloat16", "torch.float16", "fp32", "fp8_e4m3"]),
        "transformers": versions,
    },
)
more_fields = st.dictionaries(extra_names, extra_values, max_size=3)


@st.composite
def keys(draw: st.DrawFn) -> ProcessingKey:
    fields: dict[str, Any] = {**draw(some_fields), **draw(more_fields)}
    return ProcessingKey(**(fields or {"engine": "vllm"}))


@given(keys(), st.randoms(use_true_random=False))
def test_the_text_of_a_key_is_read_back_in_any_order(key: ProcessingKey, random: Any) -> None:
    assert ProcessingKey.parse(str(key)) == key
    parts = str(key).split(",")
    random.shuffle(parts)
    again = ProcessingKey.parse(" , ".join(parts))
    assert (again, hash(again), str(again)) == (key, hash(key), str(key))
    assert dict(again.fields) == dict(key.fields)
    assert pickle.loads(pickle.dumps(key)) == key


@given(keys())
def test_a_key_travels_inside_a_models_name(key: ProcessingKey) -> None:
    model = ModelKey("llama", "main.2", str(key))
    assert parse_reference(str(model)).variant == str(key)
    assert (why_not_a_variant(str(key)) is None) is (not key.names_bundle)
    if key.names_bundle:
        with pytest.raises(ConfigError, match="names all ranks"):
            codec.check_model_key(model)
    else:
        codec.check_model_key(model)
        assert codec.key_from_wire(codec.key_to_wire(model)) == model


@given(keys(), keys())
def test_differences_are_exactly_the_fields_with_other_values(
    first: ProcessingKey, second: ProcessingKey
) -> None:
    found = differences(first, second)
    assert {each.field: (each.first, each.second) for each in found} == {
        name: (first.fields.get(name, ""), second.fields.get(name, ""))
        for name in {*first.fields, *second.fields}
        if first.fields.get(name) != second.fields.get(name)
    }
    assert bool(found) is (first != second)
    assert [Difference(d.field, d.second, d.first) for d in found] == list(
        differences(second, str(first))
    )


@given(keys())
def test_the_ranks_of_a_bundle_are_its_members(key: ProcessingKey) -> None:
    if key.rank_count > 64:
        return
    members = list(key.members())
    assert len(set(members)) == len(members) == key.rank_count
    for member in members:
        assert not member.names_bundle
        assert member.bundle == key.bundle
        assert {d.field for d in differences(member, key.bundle)} == set(key.ranks)
    if key.rank_count > 1:
        assert {membership(str(member)).bundle for member in members} == {str(key.bundle)}
        assert list(members_of(str(key.bundle))) == [str(member) for member in members]
        assert not membership(str(key)).alone
    else:
        assert membership(str(key)).alone


@given(keys(), st.lists(keys(), max_size=6))
def test_nearest_has_the_fewest_differences(
    asked: ProcessingKey, listed: list[ProcessingKey]
) -> None:
    variants = [str(each) for each in listed if not each.names_bundle]
    found = nearest(str(asked), [*variants, "checkpoint", "tp=9/2"])
    if found is None:
        assert not variants
        return
    assert found[1] == differences(found[0], asked)
    assert len(found[1]) == min(len(differences(each, asked)) for each in variants)


@given(st.text(max_size=300))
def test_any_text_is_a_variant_or_has_a_reason(text: str) -> None:
    why = why_not_a_variant(text)
    if "=" not in text:
        assert why is None
    elif why is None:
        assert str(ProcessingKey.parse(text)) == text
    assert membership(text).ranks >= 1


def test_the_order_of_fields_and_the_spelling_of_values() -> None:
    key = mx.ProcessingKey(
        zone="a b", dtype="torch.bfloat16", tp=(0, 2), quantisation="awq", engine="vllm",
        version="0.32.0", pp=Rank(1, 4), transformers="5.23.0.dev0",
    )  # fmt: skip
    assert str(key) == (
        "engine=vllm,version=0.32.0,tp=0/2,pp=1/4,quantization=awq,dtype=bf16,"
        "transformers=5.23.0.dev0,zone=a b"
    )
    assert key["dtype"] == "bf16"
    assert key.ranks == {"tp": Rank(0, 2), "pp": Rank(1, 4)}
    assert key.rank_count == 8
    assert str(key.bundle).split(",")[2:4] == ["tp=*/2", "pp=*/4"]
    assert str(ProcessingKey.parse("tp=00/02,quantisation=awq")) == "tp=0/2,quantization=awq"
    assert str(ProcessingKey(self="x", ep="3/4", dtype=None)) == "ep=3/4,self=x"


@pytest.mark.parametrize("word", ["checkpoint", "rank-0", "tp0of2", "a b", "ü"])
def test_a_plain_word_stays_a_variant(word: str) -> None:
    assert canonical_variant(word) == word
    assert why_not_a_variant(word) is None
    assert membership(word).alone
    assert list(members_of(word)) == [word]
    assert differences(word, "tp=0/2") == (
        Difference("tp", "", "0/2"),
        Difference("variant", word, ""),
    )
    assert nearest(word, ["tp=0/2"]) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp=2/2", "not a rank and a size"),
        ("tp=0/0", "not a rank and a size"),
        ("tp=0", "not a rank and a size"),
        ("tp=-1/2", "not a rank and a size"),
        ("dtype=bf17", "is not a dtype"),
        ("version=latest", "is not a version"),
        ("transformers=v5", "is not a version"),
        ("engine=a b", "not one word"),
        ("quantization=", "not a field"),
        ("=x", "not a field"),
        ("tp=0/2,", "not a field"),
        ("tp=0/2,checkpoint", "not a field"),
        ("Tp=0/2", "can't be a field"),
        ("tp=0/2,tp=1/2", "twice"),
        ("quantization=a,quantisation=b", "twice"),
        ("x=a=b", "can't be the value"),
        ("x=a\x1b", "can't be the value"),
        ("x=" + "a" * VARIANT_CHARS, "characters"),
        (f"tp=0/{MAX_RANKS},pp=0/2", "ranks"),
    ],
)
def test_a_malformed_key_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ProcessingKey.parse(text)
    with pytest.raises(ConfigError, match=why):
        parse_reference("llama", variant=text)
    assert why_not_a_variant(text) is not None


def test_a_key_has_at_least_one_field() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ProcessingKey()


def test_one_variant_may_be_written_in_several_ways() -> None:
    wanted = parse_reference("llama[dtype=bfloat16, tp=0/2]", variant="tp=0/2,dtype=bf16")
    assert wanted.variant == "tp=0/2,dtype=bf16"
    with pytest.raises(ConfigError, match="names the variant"):
        parse_reference("llama[tp=0/2]", variant="tp=1/2")
    assert why_not_a_variant("dtype=bf16,tp=0/2") is not None  # on the wire only one is


MANY: dict[str, object] = {
    "engine": "vllm",
    "version": "0.32.0",
    "tp": (0, 2),
    "quantization": "compressed-tensors",
    "dtype": "torch.bfloat16",
    "transformers": "5.19.0",
    "arch": "+".join(["Qwen3MoeForCausalLM"] * 6),
    "config": "0123abcd",
    "quant_config": "4567cdef",
    "device": "cuda-9.0",
    "state": "processed",
}


def test_a_key_of_many_fields_is_shortened_and_says_which_field_differs() -> None:
    one, other = shortened(MANY), shortened({**MANY, "device": "cuda-8.0"})
    assert len(str(one)) <= SHORT_CHARS and why_not_a_variant(str(one)) is None
    assert [d.field for d in differences(one, other)] == ["device"]
    assert one.bundle == shortened({**MANY, "tp": (1, 2)}).bundle
    few = {"engine": "vllm", "tp": (0, 1)}
    assert shortened(few) == ProcessingKey(**few)  # type: ignore[arg-type]


def test_a_document_is_of_its_key_or_refused() -> None:
    document = document_of(str(shortened(MANY)))
    assert note_document(document) == shortened(MANY)["fields"]
    nested = "[" * 2000
    for wrong in ("", "[]", "{}x", document + " ", nested, '{"tp":"0/2"}', '{"a":"' + "b" * 5000):
        with pytest.raises(ConfigError, match="document of a processing key"):
            note_document(wrong)
    assert document_of("checkpoint") == document_of("engine=vllm") == ""


def test_a_companion_has_no_companions() -> None:
    for variant in ("checkpoint", "word", "dtype=bf16"):
        companion = companion_variant(variant, "a.safetensors")
        with pytest.raises(ConfigError, match="has no companions itself"):
            companion_variant(companion, "b.safetensors")
