"""`load` and what may befall it: sources that die or stop, wrong configurations, hostile ones."""

from __future__ import annotations

import copy
import gc
import io
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mx import api, config
from mx.engines import transformers as engine
from mx.engines.transformers.pending import Pending
from mx.errors import (
    ClosedError,
    ConfigError,
    IncompleteError,
    MxError,
)
from tests.support import families
from tests.support.commands import Command, Run, commands, environment, free_port, start_coordinator

pytestmark = pytest.mark.usefixtures("one_thread")

#: 10 MB in six layers: at 4 MB/s there is time for accidents.
LARGE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLOW = ("--max-bandwidth", "4MB/s")
SETTINGS = config.load({"stall_timeout_s": 3.0})


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """A coordinator's address."""
    with commands() as run:
        yield start_coordinator(run)[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "large"
    families.save(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE)), folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small"
    families.save(families.FAMILIES["llama-tied"], folder)
    return folder


def serve_slowly(run: Run, folder: Path, coordinator: str, name: str, port: int = 0) -> Command:
    command = run(
        "serve", str(folder), "--model", name, "--json", "--coordinator", coordinator,
        "--listen", f"127.0.0.1:{port}", *SLOW,
    )  # fmt: skip
    assert "endpoint" in command.json()
    return command


def load(name: str, coordinator: str, **more: Any) -> Any:
    return engine.load(
        name,
        coordinator=coordinator,
        transport="tcp",
        settings=SETTINGS,
        **{"wait_s": 30.0, **more},
    )


def after_layer(model: Any, index: int, act: Callable[[], None]) -> None:
    """Do something as soon as a layer has arrived."""
    engine.loading(model).on_layer(lambda event: act() if event.index == index else None)


# -- sources ------------------------------------------------------------------------------------


def test_the_first_layer_computes_while_the_source_is_stopped(
    run: Run, coordinator: str, large: Path
) -> None:
    source = serve_slowly(run, large, coordinator, "stopped")
    model = load("stopped", coordinator, wait_s=60.0)  # a busy machine may take it for lost
    stopped = threading.Event()
    seen: list[bool] = []

    def stop() -> None:
        source.signal(signal.SIGSTOP)
        stopped.set()

    def computed(*_: object) -> None:
        seen.append(engine.loading(model).report is None)
        source.signal(signal.SIGCONT)

    after_layer(model, 2, stop)
    layer = model.model.layers[0]
    hooks = [
        layer.register_forward_pre_hook(lambda *_: stopped.wait(30) and None),
        layer.register_forward_hook(computed),
    ]
    found = families.outputs(model)
    for hook in hooks:
        hook.remove()
    assert seen == [True]
    assert torch.equal(found, families.outputs(families.reference(large)))


def test_a_source_that_is_killed_in_mid_forward_ends_it_with_its_error(
    run: Run, coordinator: str, large: Path
) -> None:
    source = serve_slowly(run, large, coordinator, "killed")
    model = load("killed", coordinator, wait_s=0.0)
    after_layer(model, 2, lambda: source.signal(signal.SIGKILL))
    with pytest.raises(IncompleteError, match="killed stopped after"):
        families.outputs(model)
    with pytest.raises(IncompleteError):
        engine.loading(model).wait()
    with pytest.raises(IncompleteError):  # not a wrong tensor, at any later time
        model.state_dict()
    assert isinstance(model.model.norm.weight, Pending)
    assert tuple(model.model.norm.weight.shape) == (256,)


def test_a_source_that_is_stopped_in_mid_forward_ends_it_with_its_error(
    run: Run, coordinator: str, large: Path
) -> None:
    source = serve_slowly(run, large, coordinator, "frozen")
    model = load("frozen", coordinator, wait_s=0.0)
    after_layer(model, 2, lambda: source.signal(signal.SIGSTOP))
    with pytest.raises(MxError, match="frozen stopped after"):
        families.outputs(model)


def test_a_forward_goes_on_when_the_source_comes_back(
    run: Run, coordinator: str, large: Path
) -> None:
    port = free_port()
    source = serve_slowly(run, large, coordinator, "back", port)
    model = load("back", coordinator, wait_s=60.0)
    lost = threading.Event()

    def kill() -> None:
        source.signal(signal.SIGKILL)
        lost.set()

    after_layer(model, 2, kill)

    def come_back() -> None:
        lost.wait(60)
        source.wait()
        serve_slowly(run, large, coordinator, "back")

    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        found = families.outputs(model)
    finally:
        lost.set()
        thread.join()
    assert torch.equal(found, families.outputs(families.reference(large)))
    assert engine.loading(model).wait().retries >= 0
    assert families.differences(model, families.reference(large)) == []


def test_what_is_closed_or_dropped_ends_at_once(run: Run, coordinator: str, large: Path) -> None:
    serve_slowly(run, large, coordinator, "closed")
    model = load("closed", coordinator)
    engine.loading(model).close()
    engine.loading(model).close()
    with pytest.raises(ClosedError):
        families.outputs(model)
    model = load("closed", coordinator)
    thread, gone = engine.loading(model)._thread, weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def test_what_needs_all_values_waits_for_them(run: Run, coordinator: str, large: Path) -> None:
    serve_slowly(run, large, coordinator, "all")
    reference = families.reference(large)
    model = load("all", coordinator)
    began = engine.loading(model)
    assert model.num_parameters() == reference.num_parameters()
    assert "not here yet" in repr(model.lm_head.weight)
    model.requires_grad_(False)
    assert not model.lm_head.weight.requires_grad and model.lm_head.weight.grad is None
    with pytest.raises(TimeoutError):
        began.wait(0.01)
    assert began.progress().phase != "complete" and began.report is None
    copied = copy.deepcopy(model)
    assert began.wait().bytes > 0 and repr(began)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    copied.requires_grad_(True)
    assert families.differences(model, reference) == []
    assert families.differences(copied, reference) == []
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    with pytest.raises(ConfigError, match="was not returned by `load`"):
        engine.loading(copied)


def test_training_reaches_the_real_parameters(run: Run, coordinator: str, large: Path) -> None:
    serve_slowly(run, large, coordinator, "trained")
    reference, model = families.reference(large), load("trained", coordinator)
    for each in (model, reference):
        each.train()
        ids = families.inputs(reference)["input_ids"]
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad), name


def test_a_model_can_be_cast_and_saved_while_it_arrives(
    run: Run, coordinator: str, large: Path, tmp_path: Path
) -> None:
    serve_slowly(run, large, coordinator, "cast")
    model = load("cast", coordinator).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    reference = families.reference(large).to(torch.bfloat16)
    assert families.differences(model, reference) == []
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name])
    engine.loading(model).wait()


# -- places ---------------------------------------------------------------------------------------


def test_a_model_comes_from_disk_or_from_a_fallback(coordinator: str, small: Path) -> None:
    reference = families.reference(small)
    for where in ({"path": small}, {"fallback": small, "coordinator": coordinator}):
        model = engine.load("no-source-serves-this", settings=SETTINGS, **where)
        assert torch.equal(families.outputs(model), families.outputs(reference))
        report = engine.loading(model).wait()
        assert [path.transport for path in report.paths] == ["disk"]
        assert families.differences(model, reference) == []


def test_weights_alone_need_a_configuration(coordinator: str, small: Path) -> None:
    reference = families.reference(small)
    weights = families.FAMILIES["llama"]().state_dict()
    with api.serve(weights, model="bare", coordinator=coordinator, settings=SETTINGS):
        with pytest.raises(ConfigError, match=r"no config\.json.*model_config"):
            load("bare", coordinator)
        untied = transformers.LlamaConfig(
            **{**reference.config.to_dict(), "tie_word_embeddings": False}
        )
        model = load("bare", coordinator, model_config=untied)
        engine.loading(model).wait()
        assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_model_that_holds_both_sides_of_a_tie_is_tied(
    coordinator: str, small: Path, tmp_path: Path
) -> None:
    """Whether they are equal is known by their digests, before they are here."""
    from safetensors.torch import load_file, save_file

    for name, change in (("equal", 0.0), ("unequal", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        weights = load_file(small / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + change
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_bytes((small / "config.json").read_bytes())
        with api.serve(folder, coordinator=coordinator, settings=SETTINGS):
            model = load(name, coordinator)
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert tied is (name == "equal")
            engine.loading(model).wait()
        assert families.differences(model, families.reference(folder)) == []


# -- programs -------------------------------------------------------------------------------------


def test_a_process_that_ends_while_a_model_arrives_ends_well(
    run: Run, coordinator: str, large: Path, tmp_path: Path
) -> None:
    """Its exit code is its own, and no thread keeps it."""
    serve_slowly(run, large, coordinator, "left")
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys\n"
        "from mx.engines import transformers as engine\n"
        f"model = engine.load('left', coordinator={coordinator!r}, transport='tcp')\n"
        "print(type(model.lm_head.weight).__name__, flush=True)\n"
        "sys.exit(7)\n"
    )
    child = _Script(str(script), env=environment(OMP_NUM_THREADS="1"))
    try:
        assert child.wait(100) == 7, child.err
        assert "Traceback" not in child.err and "Pending" in child.out
    finally:
        child.end()


@pytest.mark.slow
def test_the_example_runs(run: Run) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "progressive.py"
    child = _Script(str(example), "--rate", "200MB/s", env=environment(OMP_NUM_THREADS="1"))
    try:
        assert child.wait(110) == 0, child.err
    finally:
        child.end()
    assert "layer 11 has computed" in child.out and "the same bit for bit" in child.out


class _Script(Command):
    """A script of ours, in a process of its own."""

    def command(self, entry: str) -> list[str]:
        return super().command(entry)[:1]
