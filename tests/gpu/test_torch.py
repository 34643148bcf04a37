"""Models of torch on a GPU: lent where they are, filled where they are, built from a pull."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import mx
from benchmarks.processes import Cluster
from mx.transport import DeviceView
from tests.gpu import rig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch is built for CPUs")

#: Makes the model of both processes, with weights that depend on a seed.
MODEL = """
import torch, xxhash
def make(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(1000, 1003).to(torch.bfloat16 if i % 2 else torch.float32)
              for i in range(6)] + [torch.nn.LayerNorm(1003)]
    return torch.nn.ModuleDict({f"layers_{i}": layer for i, layer in enumerate(layers)}).cuda()
def digest(model):
    torch.cuda.synchronize()
    return xxhash.xxh3_128_hexdigest(b"".join(map(content, model.state_dict().values())))
def content(tensor):
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
"""
#: Lends its model; each line that it reads is a factor, by which it multiplies the weights.
LENDER = f"""{MODEL}
import mx
model = make(5)
lent = mx.serve(model, model="live", copy=False, frozen=sys.argv[2] == "frozen",
                coordinator=sys.argv[1])
with lent as source:
    print(digest(model), flush=True)
    for line in sys.stdin:
        with source.changing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(float(line))
        print(digest(model), flush=True)
"""
_own: dict[str, Any] = {}
exec(MODEL, _own)  # the same code in both processes
make, digest, content = _own["make"], _own["digest"], _own["content"]


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Give the address of a coordinator."""
    cluster = Cluster()
    try:
        yield cluster.coordinator
    finally:
        cluster.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp", None])
@pytest.mark.parametrize("expandable", [False, True], ids=["blocks", "expandable"])
def test_a_model_is_lent_changed_and_filled(
    coordinator: str, transport: str | None, expandable: bool
) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with rig.Child(LENDER, coordinator, "changing", environment=environment) as lender:
        first = lender.receive_line()
        model = make(6)
        addresses = {name: each.data_ptr() for name, each in model.state_dict().items()}
        options: dict[str, Any] = {"coordinator": coordinator, "transport": transport}
        with mx.pull("live", into=model, **options) as pull:
            report = pull.wait(60)
            pull.release()
        assert digest(model) == first
        lender.send_line("2")
        second = lender.receive_line()
        with mx.pull("live", into=model, **options) as pull:
            pull.wait(60)
            pull.release()
        assert digest(model) == second != first
        assert {n: each.data_ptr() for n, each in model.state_dict().items()} == addresses
        assert not any(path.attached for path in report.paths)


def test_frozen_tensors_are_attached(coordinator: str) -> None:
    with rig.Child(LENDER, coordinator, "frozen") as lender:
        wanted = lender.receive_line()
        with mx.pull("live", coordinator=coordinator, device="cuda:0") as pull:
            report = pull.wait(60)
            state = pull.state_dict()
            torch.cuda.synchronize()
            names = list(make(1).state_dict())
            found = b"".join(content(state[name]) for name in names)
            assert xxhash.xxh3_128_hexdigest(found) == wanted
            assert [path.attached for path in report.paths] == [True]
            del state
        gc.collect()


def test_streams_of_torch_wait_for_layers(coordinator: str) -> None:
    """Work queued before the bytes are there uses the bytes that arrive."""
    torch.ones(8, device="cuda").double().sum()  # loads the kernels, for which torch would wait
    torch.cuda.synchronize()
    with rig.Child(LENDER, coordinator, "changing") as lender:
        lender.receive_line()
        with mx.pull("live", coordinator=coordinator, device="cuda:0", transport="tcp") as pull:
            signals = pull.signals()
            early = pull.early_state_dict()
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                for layer in range(len(pull.manifest.layout.layers)):  # type: ignore[union-attr]
                    signals.wait_verified(layer, stream.cuda_stream)
                sums = {name: each.double().sum() for name, each in early.items()}
            pull.wait(60)
            stream.synchronize()
            signals.check()
            for name, tensor in pull.state_dict().items():
                assert torch.equal(tensor.double().sum(), sums[name]), name
            del early, sums, tensor
        gc.collect()


@pytest.mark.parametrize("source", ["cuda:0", "cpu"])
def test_a_model_of_transformers_is_built_on_the_gpu(tmp_path: Path, source: str) -> None:
    transformers = pytest.importorskip("transformers", "5.19")
    from mx.engines import transformers as engine

    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).cuda().eval()
    cluster = Cluster()
    try:
        cluster.serve(tmp_path, "llama", "--device", source)
        found = engine.load("llama", coordinator=cluster.coordinator, device="cuda:0").eval()
        tokens = torch.arange(40, device="cuda:0")[None]
        with torch.no_grad():
            assert torch.equal(found(tokens).logits, wanted(tokens).logits)
        generated = [m.generate(tokens, max_new_tokens=8, do_sample=False) for m in (found, wanted)]
        assert torch.equal(*generated)
        assert {p.device.type for p in found.parameters()} == {"cuda"}
        engine.loading(found).close()
    finally:
        cluster.close()


def test_the_memory_of_a_pull_is_torchs_to_compute_with(coordinator: str) -> None:
    """Tensors live as long as torch keeps them, and their memory is freed after them."""
    with rig.Child(LENDER, coordinator, "changing") as lender:
        lender.receive_line()
        pull = mx.pull("live", coordinator=coordinator, device="cuda:0", attach=False)
        pull.wait(60)
        assert isinstance(pull.device_buffer(), DeviceView)
        weight = pull.state_dict()["layers_0.weight"]
        pull.close()
        kept = weight.clone()
        again = (weight @ weight.T)[0, 0]
        assert torch.equal(again, (kept @ kept.T)[0, 0])
        assert weight.is_cuda and weight.is_contiguous()
