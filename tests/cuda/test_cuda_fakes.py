"""The public functions on tensors of a CUDA device that have no memory: nothing is read and nothing
is made on the CPU. They need no GPU and no kernels."""

from dataclasses import replace

import pytest

from lshkit import _C, hashing

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # noqa: E402

from lshkit import torch_ops  # noqa: E402
from lshkit.attention import (  # noqa: E402
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    arguments,
    bert_lsh_attention,
    lsh_attention,
    yoso_attention,
)
from lshkit.buckets import bucket_sum  # noqa: E402

SAMPLED = Sampled(n_bits=4, n_hashes=8, expectation="never")
CASES = {
    "sampled": dict(estimator=SAMPLED),
    "causal": dict(estimator=SAMPLED, is_causal=True, normalize="sum"),
    "expected": dict(estimator=Expected(n_bits=4)),
    "soft": dict(estimator=Soft(n_bits=4, n_hashes=4, n_probes=2)),
    "masked": dict(estimator=SAMPLED),
    "packed": dict(estimator=SAMPLED, is_causal=True),
}
ROWS = 70


@pytest.fixture
def fake_cuda(monkeypatch):
    """A build with kernels, as far as Python sees. Data that a function asks for is an error; so is
    a tensor that it makes on the CPU."""
    monkeypatch.setattr(_C, "with_cuda", True)
    with torch.no_grad(), FakeTensorMode():  # a CPU build of torch has no autograd for them
        yield torch.device("cuda", 0)


def fake_seeds(device):
    return None, 3, torch.empty(1, dtype=torch.int64, device=device)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("hasher", ["hadamard", "hyperplane"])
def test_fake_attention(fake_cuda, name, hasher):
    batch = 1 if name == "packed" else 2
    query, key, value = (torch.empty(batch, 3, ROWS, 8, device=fake_cuda) for _ in range(3))
    options = {}
    if name == "masked":
        options["attn_mask"] = torch.empty(batch, ROWS, dtype=torch.bool, device=fake_cuda)
    if name == "packed":
        options["cu_seqlens"] = torch.empty(4, dtype=torch.int32, device=fake_cuda)
    options |= CASES[name]
    if name != "expected":
        options["estimator"] = replace(options["estimator"], hasher=hasher)
    for seed in fake_seeds(fake_cuda):
        out = yoso_attention(query, key, value, seed=seed, **options)
        assert out.device == fake_cuda and out.shape == query.shape


def test_fake_seeds_and_parameters(fake_cuda):
    for seed in fake_seeds(fake_cuda):
        seed = arguments.seed_tensor(seed, fake_cuda)
        assert seed.device == fake_cuda
        for family in torch_ops.FAMILY.values():
            assert torch_ops.hash_parameters(seed, 3, 64, 8, 32, family).device == fake_cuda
    other = torch.empty(1, dtype=torch.int64, device="cuda:1")
    with pytest.raises(ValueError, match="seed must be on the cpu or cuda:0, got a tensor on cuda"):
        arguments.seed_tensor(other, fake_cuda)


def test_fake_module(fake_cuda):
    with unset_fake_temporarily():
        module = YosoAttention(16, 2, estimator=SAMPLED)
        state = module.state_dict()
    state = {
        name: torch.empty(x.shape, dtype=x.dtype, device=fake_cuda) for name, x in state.items()
    }
    x = torch.empty(2, ROWS, 16, device=fake_cuda)
    for training in (True, False):
        module.train(training)
        out, _ = torch.func.functional_call(module, state, (x, x, x))
        assert out.device == fake_cuda and out.shape == x.shape


@pytest.mark.parametrize("seed", [None, 3])
def test_exported_graphs_stay_on_the_device(monkeypatch, seed):
    """What torch.compile makes of a call: no operator of it is on the CPU."""
    monkeypatch.setattr(_C, "with_cuda", True)

    class Attention(torch.nn.Module):
        def forward(self, query, key, value):
            return yoso_attention(query, key, value, seed=seed, estimator=SAMPLED)

    with torch.no_grad():
        with FakeTensorMode():
            tensors = tuple(torch.empty(2, 3, ROWS, 8, device="cuda") for _ in range(3))
        exported = torch.export.export(Attention(), tensors, strict=True)
    values = [node.meta.get("val") for node in exported.graph.nodes]
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    assert devices == {"cuda"}


def test_what_has_no_kernels_says_what_to_do(fake_cuda, monkeypatch):
    x = torch.empty(1, 2, 8, 16, device=fake_cuda)
    with pytest.raises(NotImplementedError, match=r"bert_lsh_attention runs on the CPU.*\.cpu\(\)"):
        bert_lsh_attention(x, x, x)
    with pytest.raises(NotImplementedError, match=r"^lsh_attention runs on the CPU.*\.cpu\(\)"):
        lsh_attention(x, x, x)
    with pytest.raises(ValueError, match="more than 16 bits, got a tensor on cuda:0 and n_bits=17"):
        hashing.FastHadamard(16, 17, 4, seed=0).hash(x)
    scale = torch.empty(2, device="cpu")
    with pytest.raises(ValueError, match="lift_scale'] must be on query's device cuda:0, got"):
        yoso_attention(
            *(x, x, x), estimator=Sampled(unit_norm="lift"), parameters={"lift_scale": scale}
        )
    monkeypatch.setattr(_C, "with_cuda", False)
    with pytest.raises(NotImplementedError, match="this build of lshkit.*LSHKIT_CUDA=ON"):
        yoso_attention(x, x, x)
    with pytest.raises(ValueError, match="x must be on the cpu.*this build.*LSHKIT_CUDA=ON"):
        hashing.FastHadamard(16, 8, 4, seed=0).hash(x)
    codes = torch.empty(1, 8, 4, dtype=torch.uint8, device=fake_cuda)
    with pytest.raises(ValueError, match="codes must be on the cpu.*LSHKIT_CUDA=ON"):
        bucket_sum(codes, codes, x, 256)
