"""The public functions on CUDA queue their work and nothing else: no value is read, nothing is made
on the CPU, and CUDA graphs capture them as they are."""

import os
import pathlib
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
from devices import needs_gpu

from lshkit import hashing

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from lshkit.attention import (  # noqa: E402
    Expected,
    Sampled,
    Soft,
    YosoAttention,
    arguments,
    yoso_attention,
)
from lshkit.buckets import bucket_sum  # noqa: E402
from lshkit.torch_ops import assertions, soft  # noqa: E402

SAMPLED = Sampled(n_bits=4, n_hashes=8, expectation="never")
CASES = {
    "sampled": dict(estimator=SAMPLED),
    "causal": dict(estimator=SAMPLED, is_causal=True, normalize="sum"),
    "expected": dict(estimator=Expected(n_bits=4, gradient="lower_bound")),
    "exact gradient": dict(estimator=Expected(n_bits=4)),
    "collided gradient": dict(estimator=replace(SAMPLED, gradient="collided"), normalize=None),
    "fewer hashes": dict(estimator=replace(SAMPLED, gradient_hashes=3)),
    "lift": dict(estimator=replace(SAMPLED, unit_norm="lift", lift_scale=100.0)),
    "lift to the largest": dict(estimator=replace(SAMPLED, unit_norm="lift", lift_scale="auto")),
    "soft": dict(estimator=Soft(n_bits=4, n_hashes=4, n_probes=2)),
    "hyperplanes": dict(estimator=replace(SAMPLED, hasher="hyperplane")),
    "masked": dict(estimator=SAMPLED),
    "packed": dict(estimator=SAMPLED, is_causal=True),
}
FEW = "causal", "hyperplanes"  # in emulation
ROWS = 70


def inputs(device, name="", seed=0, dtype=torch.float32):
    """Query, key, value and the gradient of the output; the arguments that are tensors."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if name == "packed" else 2
    tensors = torch.randn(4, batch, 3, ROWS, 12, generator=generator).to(device, dtype).unbind()
    options = {}
    if name == "masked":
        mask = torch.rand(batch, ROWS, generator=generator) < 0.7
        options["attn_mask"] = mask.to(device)
    if name == "packed":
        options["cu_seqlens"] = torch.tensor([0, 20, 20, ROWS]).to(device)
    return tensors, options


@contextmanager
def no_reads(device):
    """In here a value of a tensor that Python asks for is an error, and so is a wait on a GPU."""

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        else:  # as on CUDA
            for module in (assertions, arguments, soft):
                patch.setattr(module, "may_be_read", lambda x: False)
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def test_a_read_is_found(cuda_device):
    x = torch.ones(2).to(cuda_device)
    for read in (lambda: bool(x.all()), lambda: x[0].item(), lambda: x.tolist(), lambda: int(x[0])):
        with no_reads(cuda_device), pytest.raises((AssertionError, RuntimeError)):
            read()


@pytest.mark.parametrize("name", CASES)
def test_attention_reads_nothing(cuda_device, name):
    (query, key, value, grad), options = inputs(cuda_device, name)
    seeds = None, 3, torch.tensor([3], device=cuda_device)
    for seed in seeds:
        leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        with no_reads(cuda_device):
            out = yoso_attention(*leaves, seed=seed, **CASES[name], **options)
            out.backward(grad)
        assert all(x.grad is not None and x.grad.device.type == cuda_device.type for x in leaves)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, dict(conv_window=5, short_conv=4), dict(learn=["lift_scale"])]
)
def test_module_reads_nothing(cuda_device, training, mask, options):
    estimator = SAMPLED
    if "learn" in options:
        estimator = replace(SAMPLED, unit_norm="lift", lift_scale=50.0)
    module = YosoAttention(16, 2, estimator=estimator, **options, device=cuda_device)
    module.train(training)
    assert {x.device.type for x in module.state_dict().values()} == {cuda_device.type}
    x = torch.randn(2, 40, 16).to(cuda_device)
    padding = None
    if mask is not None:
        padding = torch.zeros(2, 40)
        padding[:, 30:] = 1 if mask is torch.bool else -torch.inf
        padding = padding.to(mask).to(cuda_device)
    with no_reads(cuda_device):
        out, _ = module(x, x, x, padding)
        out.sum().backward()
    assert module.in_proj_weight.grad.isfinite().all()


def test_hashing_and_bucket_sums_read_nothing(cuda_device):
    hasher = hashing.FastHadamard(12, 8, 8, seed=0)
    x = torch.randn(30, 12).to(cuda_device).requires_grad_()
    codes = hasher.hash(x)  # the first call copies its parameters
    with no_reads(cuda_device):
        assert hasher.hash(x).device.type == cuda_device.type
        if cuda_device.type == "cuda":  # codes of CPU tensors are looked at
            bucket_sum(codes, codes, x, 256).sum().backward()
            bucket_sum(codes.long(), codes.long(), x, 256, causal=True)
            weights = torch.ones_like(codes[..., None], dtype=torch.float32)
            sides = codes[..., None], codes[..., None]
            bucket_sum(*sides, x, 256, query_weights=weights, key_weights=weights).sum().backward()
        hasher.soft_hash(x, 2, 1.5)[1].sum().backward()
    if cuda_device.type == "cuda":
        assert "_copies" not in hasher.__getstate__()
        assert hasher._parameters_beside(x) is hasher._parameters_beside(x)


# --- Captured -------------------------------------------------------------------------------------


def captured(run):
    """A graph of run, after it has run before as CUDA's documentation asks, and what run gave."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [3, "tensor"])
@pytest.mark.parametrize("name", CASES)
def test_graphs_of_attention(cuda_device, name, seed, dtype):
    needs_gpu(cuda_device)
    tensors, options = inputs(cuda_device, name, dtype=dtype)
    tensors = [x.clone() for x in tensors]
    seed = torch.tensor([3], device=cuda_device) if seed == "tensor" else seed

    def run(query, key, value, grad):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = yoso_attention(*leaves, seed=seed, **CASES[name], **options)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    graph, results = captured(lambda: run(*tensors))
    for number in (1, 2):
        fresh, _ = inputs(cuda_device, name, seed=number, dtype=dtype)
        for x, y in zip(tensors, fresh, strict=True):
            x.copy_(y)
        if isinstance(seed, torch.Tensor):
            seed.fill_(number)
        graph.replay()
        wanted = run(*fresh)
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def run_once(name, device, dtype=torch.bfloat16):
    """Inputs, and a function of theirs to the output and the gradients."""
    tensors, options = inputs(device, name, dtype=dtype)

    def run():
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = yoso_attention(*leaves, seed=3, **CASES[name], **options)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    return run


def capture_first(name):
    """In a fresh process: the first call there is a captured one."""
    run = run_once(name, torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, run(), strict=True))


def call_twice(name):
    """In a fresh process: the first call queues what the second does, and nothing once."""

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    run, calls = run_once(name, torch.device("cpu")), []
    for _ in range(2):
        with Operators() as operators:
            operators.seen = []
            with no_reads(torch.device("cpu")):
                run()
        calls.append(operators.seen)
    assert len(calls[0]) > 5 and calls[0] == calls[1]


# Processes of their own, from one that has imported torch and done nothing with it.
IN_FRESH_PROCESSES = """
import os, sys, traceback
sys.path[:0] = sys.argv[1:3]
import test_cuda_graphs as tests
for name in sys.argv[4:]:
    process = os.fork()
    if process == 0:
        try:
            getattr(tests, sys.argv[3])(name)
        except BaseException:
            print(name, traceback.format_exc(), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        sys.exit(1)
"""


def test_graphs_without_a_warm_up(cuda_device):
    tests = pathlib.Path(__file__).resolve().parent
    gpu = cuda_device.type == "cuda"
    function, names = ("capture_first", CASES) if gpu else ("call_twice", FEW)
    command = [sys.executable, "-c", IN_FRESH_PROCESSES, tests, tests.parent, function, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["sampled", "hyperplanes"])
def test_each_replay_draws_new_functions(cuda_device, name):
    needs_gpu(cuda_device)
    (query, key, value, _), _ = inputs(cuda_device)
    graph, out = captured(lambda: yoso_attention(query, key, value, **CASES[name]))
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.clone())
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    torch.manual_seed(5)
    graph.replay()
    first = out.clone()
    torch.manual_seed(5)
    graph.replay()
    assert torch.equal(out, first)


def test_graphed_module(cuda_device):
    needs_gpu(cuda_device)
    module = YosoAttention(16, 2, conv_window=3, fresh_hashes=False, estimator=SAMPLED).to(
        cuda_device
    )
    x = torch.randn(2, 50, 16, device=cuda_device, requires_grad=True)

    class SelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x):
            return self.attention(x, x, x)[0]

    layer = SelfAttention()
    fresh = torch.randn_like(x).requires_grad_()
    wanted = layer(fresh)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [fresh, *layer.parameters()])
    wanted = wanted.detach()  # its graph keeps the parameters' nodes on the default stream
    graphed = torch.cuda.make_graphed_callables(layer, (x,))
    out = graphed(fresh)
    grads = torch.autograd.grad(out.square().sum(), [fresh, *layer.parameters()])
    assert torch.equal(out, wanted)
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_graph_of_a_training_step(cuda_device):
    needs_gpu(cuda_device)
    torch.manual_seed(0)
    module = YosoAttention(16, 2, estimator=SAMPLED).to(cuda_device)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, capturable=True)
    x = torch.randn(2, 60, 16, device=cuda_device)
    target = torch.randn(2, 60, 16, device=cuda_device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = (module(x, x, x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph, loss = captured(step)
    graph.replay()
    first = loss.item()
    for _ in range(60):
        graph.replay()
    assert loss.item() < first


# --- Other ways to run ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sampled", "expected", "masked", "packed"])
def test_compiled(cuda_device, name):
    needs_gpu(cuda_device)
    (query, key, value, grad), options = inputs(cuda_device, name)

    def run(query, key, value, grad, seed):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = function(*leaves, seed=seed, **CASES[name], **options)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    torch.compiler.reset()
    for seed in (3, torch.tensor([4], device=cuda_device), torch.tensor([5])):
        function = yoso_attention
        wanted = run(query, key, value, grad, seed)
        function = torch.compile(yoso_attention, fullgraph=True, backend="aot_eager")
        got = run(query, key, value, grad, seed)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_compiled_module_in_autocast(cuda_device):
    needs_gpu(cuda_device)
    module = YosoAttention(16, 2, fresh_hashes=False, conv_window=3, estimator=SAMPLED).to(
        cuda_device
    )
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 50, 16, device=cuda_device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        wanted, out = module(x, x, x)[0], compiled(x, x, x)[0]
        assert wanted.dtype is out.dtype is torch.bfloat16
        query = torch.randn(2, 2, 50, 16, device=cuda_device)
        assert yoso_attention(query, query.half(), query, estimator=SAMPLED).dtype is torch.bfloat16
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    out.float().sum().backward()


def test_another_device_than_the_current(cuda_device):
    needs_gpu(cuda_device)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    results = []
    for device in (torch.device("cuda", 0), other):
        (query, key, value, grad), _ = inputs(device)
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = yoso_attention(*leaves, seed=2, estimator=SAMPLED)
        assert out.device == device and torch.cuda.current_device() == 0
        results.append([x.cpu() for x in (out, *torch.autograd.grad(out, leaves, grad))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="seed must be on the cpu or cuda:1, got a tensor on"):
        yoso_attention(*leaves, seed=torch.tensor([1], device="cuda:0"), estimator=SAMPLED)


DETERMINISTIC = """
from dataclasses import replace
import torch
from lshkit.attention import Expected, Sampled, YosoAttention, yoso_attention
torch.use_deterministic_algorithms(True)
sampled = Sampled(n_bits=4, n_hashes=8, expectation="never")
lifted = replace(sampled, unit_norm="lift", lift_scale="auto")
for options in ({"estimator": sampled}, {"estimator": lifted},
                {"estimator": sampled, "conv_window": 5, "short_conv": 4}):
    module = YosoAttention(16, 2, **options).cuda()
    x = torch.randn(2, 50, 16, device="cuda", requires_grad=True)
    mask = torch.zeros(2, 50, dtype=torch.bool, device="cuda")
    module(x, x, x, mask)[0].sum().backward()
scale = torch.full((2,), 90.0, device="cuda", requires_grad=True)
q = torch.randn(2, 4, 50, 16, device="cuda", requires_grad=True)
for estimator in (Expected(unit_norm="lift"), lifted):
    out = yoso_attention(q, q[:, :2], q[:, :2], enable_gqa=True, estimator=estimator,
                         parameters={"lift_scale": scale})
    out.sum().backward()
torch.cuda.synchronize()
"""


def test_deterministic_algorithms_have_all_that_is_used(cuda_device, tmp_path):
    needs_gpu(cuda_device)
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # read when torch starts
    command = [sys.executable, "-c", DETERMINISTIC]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)
