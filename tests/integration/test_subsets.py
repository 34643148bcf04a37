"""Pulls of some tensors, and of slices of them, from real processes."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mx
from benchmarks.checkpoints import write_checkpoint
from mx import api, config
from mx.errors import (
    EXIT_CONFIG,
    ConfigError,
    DigestError,
    IncompleteError,
    IntegrityError,
)
from mx.transport import host_view
from mx.units import MIB
from tests.support.commands import Run, serve
from tests.support.lying import held_model, offering
from tests.support.outcomes import error_of, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LAYER = "model.layers.0.mlp"
#: Larger than blocks, with sizes that fit no block: slices begin and end inside blocks.
SHAPES = {
    f"{LAYER}.rows": (3001, 701),
    f"{LAYER}.columns": (1003, 1502),
    f"{LAYER}.middle": (3, 1203, 607),
    f"{LAYER}.inner": (7, 11, 3001),
    f"{LAYER}.bias": (7,),
    "model.layers.1.mlp.bias": (9,),
    "model.embed_tokens.weight": (1200, 701),
    "lm_head.weight": (1200, 701),
}
SLICES: dict[str, Any] = {
    "*.rows": (0, 600, 2203),
    "*.columns": mx.Shard(-1, 1, 2),
    "*.middle": (1, 100, 1100),
    "*.inner": mx.Shard(1, 10, 11),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    torch.manual_seed(3)
    save_file({name: torch.randn(shape) for name, shape in SHAPES.items()}, path)
    return path


def expected(weights: Path) -> dict[str, torch.Tensor]:
    """What `only="model.layers.*"` and SLICES give."""
    whole = load_file(weights)
    return {
        f"{LAYER}.rows": whole[f"{LAYER}.rows"][600:2203],
        f"{LAYER}.columns": whole[f"{LAYER}.columns"][:, 751:],
        f"{LAYER}.middle": whole[f"{LAYER}.middle"][:, 100:1100],
        f"{LAYER}.inner": whole[f"{LAYER}.inner"][:, 10:],
        f"{LAYER}.bias": whole[f"{LAYER}.bias"],
        "model.layers.1.mlp.bias": whole["model.layers.1.mlp.bias"],
    }


def check(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].shape == tensor.shape, name
        bits = (each.contiguous().view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(*bits), name


def blank(right: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7.0).contiguous() for name, tensor in right.items()}


WHAT: dict[str, Any] = {"only": "model.layers.*", "slices": SLICES}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("into", [False, True], ids=["new", "into"])
def test_slices_along_every_dimension(
    run: Run, coordinator: str, weights: Path, transport: str, into: bool
) -> None:
    serve(run, weights, "m", coordinator)
    right = expected(weights)
    here = blank(right) if into else None
    with api.pull("m", coordinator=coordinator, transport=transport, into=here, **WHAT) as pull:
        report = pull.wait(30)
        check(pull.state_dict(), right)
        layers = {event.name: event for event in pull.layers()}
        assert list(layers) == ["embed", "model.layers.0", "model.layers.1", "head"]
        assert layers["embed"].tensors() == {}
        of_layer = {name: tensor for name, tensor in right.items() if name.startswith(LAYER)}
        check(pull.layer_state_dict(1), of_layer)
        assert layers["model.layers.0"].nbytes >= sum(tensor.nbytes for tensor in of_layer.values())
        subset = pull.subset
    if here is not None:
        check(here, right)
    own = sum(tensor.nbytes for tensor in right.values())
    assert subset is not None
    assert report.bytes == subset.own_nbytes == own
    assert report.moved_bytes == sum(path.bytes for path in report.paths) == subset.moved_nbytes
    assert own < subset.moved_nbytes < 2.2 * own
    assert report.verified == {"tcp": "digest", "shm": "xxh3"}[transport]
    planned = api.plan("m", coordinator=coordinator, **WHAT)
    assert planned.subset is not None and planned.nbytes == subset.moved_nbytes
    assert planned.subset.amplification == subset.amplification


def test_verify_strong_allows_no_shortcut(run: Run, coordinator: str, weights: Path) -> None:
    serve(run, weights, "m", coordinator)
    options: dict[str, Any] = {"transport": "shm", "verify": "strong"}
    with api.pull("m", coordinator=coordinator, **options, **WHAT) as pull:
        assert pull.wait(30).verified == "strong"
        check(pull.state_dict(), expected(weights))


def test_a_destination_that_does_not_fit_is_not_touched(
    run: Run, coordinator: str, weights: Path
) -> None:
    serve(run, weights, "m", coordinator)
    here = blank(expected(weights))
    here[f"{LAYER}.rows"] = torch.full((3001, 701), 7.0)  # as in the whole model
    here["more"] = here.pop(f"{LAYER}.bias")
    with api.pull("m", coordinator=coordinator, into=here, **WHAT) as pull:
        error = error_of(pull)
    assert isinstance(error, ConfigError)
    for said in ("the selection", "[3001, 701] here", "[1603, 701]", "more", f"{LAYER}.bias"):
        assert said in str(error)
    assert all((tensor == 7).all() for tensor in here.values())


def test_the_disk_gives_the_same(weights: Path, coordinator: str) -> None:
    right = expected(weights)
    with api.pull("m", path=weights, **WHAT) as pull:
        check(pull.state_dict(), right)
        identity = pull.wait().identity
    here = blank(right)
    with api.pull("m", coordinator=coordinator, fallback=weights, into=here, **WHAT) as pull:
        report = pull.wait(30)
        assert (report.fallback, report.identity) == ("disk", identity)
        assert report.bytes == sum(tensor.nbytes for tensor in right.values())
        check(pull.state_dict(), right)
    check(here, right)
    with api.pull(f"m@{identity}", path=weights, **WHAT) as pull:
        check(pull.state_dict(), right)


def test_a_few_of_50_000_tensors(run: Run, coordinator: str, tmp_path: Path) -> None:
    names = {f"model.layers.{n // 1000}.experts.{n}.weight": (16, 8) for n in range(50_000)}
    write_checkpoint(tmp_path / "model.safetensors", names)
    serve(run, tmp_path / "model.safetensors", "m", coordinator)
    only = ["model.layers.7.experts.71??.weight", "model.layers.49.experts.49999.weight"]
    slices = {"*49999*": (1, 3, 5)}
    with api.pull("m", coordinator=coordinator, only=only, slices=slices) as pull:
        report = pull.wait(60)
        found = pull.state_dict()
        assert pull.pages is not None
        assert pull.pages.get(7) is not None and pull.pages.get(8) is None
    whole = load_file(tmp_path / "model.safetensors")
    right = {name: tensor for name, tensor in whole.items() if ".71" in name and ".7." in name}
    right |= {only[1]: whole[only[1]][:, 3:5]}
    assert len(found) == 101
    check(found, right)
    assert report.moved_bytes == 101 * 16 * 8 * 2


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "lent"])
def test_ties_of_a_live_module(coordinator: str, copy: bool) -> None:
    """A source in memory, which may be lent where it is, and whose head is its embedding."""
    embed = torch.randn(1001, 700)
    live = {
        "model.embed_tokens.weight": embed,
        "model.layers.0.mlp.weight": torch.randn(700, 900),
        "model.layers.1.mlp.weight": torch.randn(700, 900).t(),
        "lm_head.weight": embed,
    }
    share = mx.Shard(0, 6, 7)
    with api.serve(live, model="m", coordinator=coordinator, copy=copy):
        head = api.load("m", coordinator=coordinator, only="lm_head.*", slices={"*": share})
        check(head, {"lm_head.weight": embed[858:]})
        tied = api.load(
            "m",
            coordinator=coordinator,
            only=["lm_head.weight", "model.embed*", "*.1.*"],
            slices={"lm_head.weight": share, "*embed*": share},
        )
        names = ("model.embed_tokens.weight", "lm_head.weight")
        turned = "model.layers.1.mlp.weight"
        check(tied, dict.fromkeys(names, embed[858:]) | {turned: live[turned]})
        assert tied[names[0]].data_ptr() == tied[names[1]].data_ptr()
        assert tied[turned].stride() == live[turned].stride()
        with pytest.raises(ConfigError, match="stored with the strides"):
            api.load("m", coordinator=coordinator, slices={turned: mx.Shard(0, 0, 2)})


# -- faults ---------------------------------------------------------------------------------------

LIAR = "model.layers.2.mlp.weight"  # 2 MiB of U8
#: Both blocks of it are read aside.
PART = {LIAR: (0, 100, MIB + 100)}


def flip(view: memoryview) -> None:
    """Change the first byte of the second block."""
    view[5 * MIB] ^= 0x10


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_lie_in_a_block_that_is_read_aside_is_not_written(
    coordinator: str, transport: str
) -> None:
    honest = held_model("liar")
    right = bytes(host_view(honest.arena.view))[4 * MIB + 100 : 5 * MIB + 100]
    here = {LIAR: torch.full((MIB,), 0xAA, dtype=torch.uint8)}
    options: dict[str, Any] = {
        "coordinator": coordinator, "only": LIAR, "slices": PART, "into": here,
        "transport": transport,
    }  # fmt: skip
    with offering(held_model("liar", corrupt=flip), coordinator) as lying, ExitStack() as later:
        with api.pull("liar", **options) as pull:
            error = error_of(pull)
            assert isinstance(error, DigestError) and error.peer == lying
            assert "do not use it before" in str(error)
        assert (here[LIAR][-100:] == 0xAA).all()
        with api.pull("liar", **options, wait_s=60) as pull:
            until(lambda: pull.progress().retries >= 2, "two lies", 30)
            assert (here[LIAR][-100:] == 0xAA).all()
            giving = later.enter_context(offering(honest, coordinator))
            report = pull.wait(60)
    assert bytes(here[LIAR].numpy()) == right
    assert giving in {path.source for path in report.paths}
    assert [left.source for left in report.left] == [lying]


#: So fast that a pull of the large checkpoint takes two seconds.
SLOWLY = ("--max-bandwidth", "200MB/s")


def test_another_source_takes_over(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    sources = [serve(run, large_checkpoint, "m", coordinator, *SLOWLY) for _ in range(2)]
    slices = {"*o_proj*": mx.Shard(1, 0, 2), "*down_proj*": mx.Shard(1, 0, 2)}
    with api.pull("m", coordinator=coordinator, transport="tcp", slices=slices) as pull:
        next(pull.layers())
        by_endpoint = {source.json()["endpoint"]: source for source in sources}
        first = pull.progress().sources[0]
        by_endpoint[first].signal(signal.SIGKILL)
        report = pull.wait(60)
        found = pull.state_dict()
    right = load_file(large_checkpoint)
    for name, tensor in right.items():
        if "o_proj" in name or "down_proj" in name:
            right[name] = tensor[:, : tensor.shape[1] // 2]
    check(found, right)
    assert len(report.paths) == 2


def test_the_only_source_dies(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, *SLOWLY)
    slices = {"*down_proj*": mx.Shard(1, 0, 2)}
    with api.pull("m", coordinator=coordinator, transport="tcp", slices=slices) as pull:
        next(pull.layers())
        source.signal(signal.SIGKILL)
        error = error_of(pull)
    assert isinstance(error, IncompleteError) and not isinstance(error, IntegrityError)
    assert "of 34 layers" in str(error)


def test_beside_pulls_that_share_what_they_read(
    run: Run, coordinator: str, coordinated: None, large_checkpoint: Path
) -> None:
    """A subset takes no part in their swarm, and neither side is held up."""
    serve(run, large_checkpoint, "m", coordinator)
    at = ("--coordinator", coordinator, "--transport", "tcp", "--json")
    others = [run("pull", "m", *at) for _ in range(2)]
    always = config.load(environ={"HOME": "/nonexistent", "MX_PEER_COORDINATED_READING": "always"})
    slices = {"*down_proj*": mx.Shard(1, 0, 2)}
    for _ in range(2):
        with api.pull(
            "m", coordinator=coordinator, transport="tcp", slices=slices, settings=always
        ) as pull:
            pull.wait(60)
            assert not pull._job.edition.reader_id
            found = pull.layer_state_dict(3)["model.layers.2.mlp.down_proj.weight"]
    right = load_file(large_checkpoint)["model.layers.2.mlp.down_proj.weight"]
    check({"": found}, {"": right[:, : right.shape[1] // 2]})
    assert all(other.json()["layers"] == 34 for other in others)


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"out": "there"}, {"hold": True}, {"follow": True}], ids=["out", "hold", "follow"]
)
def test_what_goes_with_whole_models_only_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}`"):
        api.pull("m", coordinator="127.0.0.1:1", only="x", **options)


def test_a_subset_is_no_model_to_reuse(run: Run, coordinator: str, weights: Path) -> None:
    serve(run, weights, "m", coordinator)
    with api.pull("m", coordinator=coordinator, only="lm_head.weight") as some:
        some.wait(30)
        with pytest.raises(ConfigError, match="whole model"):
            api.pull("m", coordinator=coordinator, reuse=some)


def test_an_unknown_tensor_and_a_slice_that_does_not_fit(
    run: Run, coordinator: str, weights: Path
) -> None:
    serve(run, weights, "m", coordinator)
    uneven = {f"{LAYER}.rows": mx.Shard(0, 0, 2)}
    for options, said in (
        ({"only": ["lm_head.weight", "nothing"]}, "no tensor 'nothing'"),
        ({"slices": uneven}, "3001 elements, of which 2 ranks"),
    ):
        for fallback in (None, weights):
            where: dict[str, Any] = {"coordinator": coordinator, "fallback": fallback}
            with api.pull("m", **where, **options) as pull:
                error = error_of(pull)
            assert isinstance(error, ConfigError) and said in str(error)


def test_from_the_command_line(run: Run, coordinator: str, weights: Path) -> None:
    serve(run, weights, "m", coordinator)
    at = ("--coordinator", coordinator)
    only = ("--only", "lm_head.weight", "--only", "*.bias")
    own = SHAPES["lm_head.weight"][0] * SHAPES["lm_head.weight"][1] * 4 + (7 + 9) * 4
    planned = run("plan", "m", *at, *only, "--json").json()
    assert planned["subset"] == {
        "tensors": 3, "own_bytes": own, "moved_bytes": own, "amplification": 1.0,
    }  # fmt: skip
    said = run("plan", "m", *at, *only)
    assert said.wait() == 0 and "1.00 times as much" in said.out
    slices = ("--slice", "*.columns=1:1/2", "--slice", "*.rows=-2:0-3000")
    shares = run("plan", "m", *at, *slices, "--only", "*.columns", "--only", "*.rows", "--json")
    parts = shares.json()["subset"]
    own_nbytes, moved_nbytes = (1003 * 751 + 3000 * 701) * 4, (1003 * 1502 + 3001 * 701) * 4
    assert (parts["own_bytes"], parts["moved_bytes"]) == (own_nbytes, moved_nbytes)
    for wrong in ("*.rows", "*.rows=1", "*.rows=0:1/2/3"):
        refused = run("plan", "m", *at, "--slice", wrong)
        assert refused.wait() == EXIT_CONFIG and f"--slice {wrong} is not" in refused.err
    report = run("pull", "m", *at, *only, "--json").json()
    assert (report["bytes"], report["moved_bytes"]) == (own, own)
    shown = run("pull", "m", *at, *only)
    assert shown.wait() == 0 and "moved for these tensors" in shown.out
    refused = run("pull", "m", *at, "--only", "*.nothing")
    assert refused.wait() == EXIT_CONFIG and "--only: the model has no tensor" in refused.err
    refused = run("pull", "m", *at, *only, "--hold")
    assert refused.wait() == EXIT_CONFIG and "--hold" in refused.err


# -- tensor parallelism ---------------------------------------------------------------------------

RANKS = 2


def llama_of(ranks: int) -> Any:
    """A Llama with a rank's share of heads and of the intermediate dimension, in fp32."""
    t: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=8 // ranks,
            num_key_value_heads=4 // ranks,
            head_dim=32,
            intermediate_size=640 // ranks,
            vocab_size=512,
            tie_word_embeddings=False,
        )
    ).eval()


def logits_of(ranks: list[Any], tokens: torch.Tensor) -> torch.Tensor:
    """As the ranks compute them together: what attention and MLP give is summed over them."""
    first = ranks[0].model
    hidden = first.embed_tokens(tokens)
    places = torch.arange(tokens.shape[1])[None]
    turned = first.rotary_emb(hidden, places)
    for layers in zip(*(rank.model.layers for rank in ranks), strict=True):
        normed = layers[0].input_layernorm(hidden)
        hidden = hidden + sum(
            layer.self_attn(normed, position_embeddings=turned, attention_mask=None)[0]
            for layer in layers
        )
        normed = layers[0].post_attention_layernorm(hidden)
        hidden = hidden + sum(layer.mlp(normed) for layer in layers)
    found = ranks[0].lm_head(first.norm(hidden))
    assert isinstance(found, torch.Tensor)
    return found


def test_two_ranks_of_a_llama_compute_what_the_whole_model_does(
    run: Run, coordinator: str, tmp_path: Path
) -> None:
    whole = llama_of(1)
    whole.save_pretrained(tmp_path / "llama")
    serve(run, tmp_path / "llama", "llama", coordinator)
    ranks = []
    for rank in range(RANKS):
        share = mx.Shard(0, rank, RANKS), mx.Shard(1, rank, RANKS)
        slices = {f"*.{name}_proj.weight": share[0] for name in ("q", "k", "v", "gate", "up")}
        slices |= {f"*.{name}_proj.weight": share[1] for name in ("o", "down")}
        model = llama_of(RANKS)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(float("nan"))
        with api.pull("llama", coordinator=coordinator, slices=slices, into=model) as pull:
            report = pull.wait(60)
        assert report.bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
        ranks.append(model)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 17)))
    with torch.no_grad():
        right = whole(tokens).logits
        found = logits_of(ranks, tokens)
        alone = logits_of(ranks[:1], tokens)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone, right, rtol=1e-2, atol=1e-2)  # both halves are needed
