"""Attention step by step on a CUDA device."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda
decoding_cases = pytest.importorskip("cases.decoding")

from lshkit.attention import Sampled, Soft, YosoAttention, YosoState  # noqa: E402

causal, qkv = decoding_cases.causal, decoding_cases.qkv
in_chunks, in_steps = decoding_cases.in_chunks, decoding_cases.in_steps
positions, same_contents = decoding_cases.positions, decoding_cases.same_contents
TOLERANCE = {
    torch.float32: {"rtol": 5e-5, "atol": 5e-5},
    torch.float64: {"rtol": 5e-5, "atol": 5e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}


def state_for(*tensors, **options):
    return decoding_cases.state_for(*tensors, device=tensors[0].device, **options)


def inputs(device, **options):
    return [x.to(device) for x in qkv(**options)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("normalize", [None, "sum", "l2"])
def test_steps_equal_the_causal_forward(cuda_device, normalize, dtype):
    tensors = inputs(cuda_device, n=12, dtype=dtype)
    for changes in ({}, {"hasher": "hyperplane", "n_bits": 4}, {"n_bits": 11}):
        estimator = replace(decoding_cases.SAMPLED, **changes)
        options = {"estimator": estimator, "normalize": normalize}
        state = state_for(*tensors, **options)
        out = in_steps(state, tensors)
        wanted = causal(*tensors, **options)
        assert out.dtype is dtype and out.device == wanted.device
        torch.testing.assert_close(out, wanted, **TOLERANCE[dtype])
        assert state.length.tolist() == [12, 12]


@pytest.mark.parametrize("d, d_v", [(1, 1), (7, 64), (80, 33), (100, 130)])
@pytest.mark.parametrize("heads, key_heads", [(2, 2), (4, 2), (10, 1)])
def test_prefill_equals_the_causal_forward(cuda_device, d, d_v, heads, key_heads):
    sizes = {"heads": heads, "key_heads": key_heads, "n": 20, "d": d, "d_v": d_v}
    tensors = inputs(cuda_device, **sizes)
    out = state_for(*tensors).prefill(*tensors)
    wanted = causal(*tensors, enable_gqa=True)
    torch.testing.assert_close(out, wanted, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normalize", [None, "sum", "l2"])
def test_division_into_calls_does_not_change_a_bit(cuda_device, normalize, table_dtype):
    tensors = query, key, value = inputs(cuda_device, n=31, heads=4, key_heads=2)
    mask = torch.rand(2, 31, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = mask.to(cuda_device)
    options = {"normalize": normalize, "table_dtype": table_dtype}
    states = [state_for(*tensors, **options) for _ in range(4)]
    whole = states[0].prefill(*tensors, mask)
    assert torch.equal(in_chunks(states[1], tensors, (1, 0, 10, 20), mask), whole)
    assert torch.equal(in_steps(states[2], tensors, mask), whole)
    for first, last in ((0, 26), (26, 31)):
        states[3].append(*positions((key, value), first, last), mask[:, first:last])
    assert torch.equal(states[3].attend(query)[:, :, -1], whole[:, :, -1])
    assert all(same_contents(states[0], other) for other in states[1:])
    assert torch.equal(states[0].length, mask.sum(1))


def test_the_state_as_a_thing(cuda_device):
    tensors = inputs(cuda_device, n=9)
    state = state_for(*tensors, normalize="sum")
    first = state.prefill(*tensors)
    there = state.device.type
    assert there == cuda_device.type and state.clone().device.type == there
    # To the CPU and back, through a file's tensors, and in another order.
    other = decoding_cases.state_for(*tensors, normalize="sum")
    other.load_state_dict({name: x.cpu() for name, x in state.state_dict().items()})
    assert torch.equal(other._sums, state._sums.cpu())
    other.to(cuda_device)
    next_ = [x[:, :, :1] for x in tensors]
    out = state.clone().step(*next_)
    assert torch.equal(other.step(*next_), out)
    swapped = state.clone().reorder(torch.tensor([1, 0, 1])).attend(tensors[0][[1, 0, 1]])
    assert torch.equal(swapped[:2].flip(0), state.attend(tensors[0]))
    state.reset()
    assert torch.equal(state.prefill(*tensors), first)


@torch.no_grad()
def test_a_module_of_another_seed(cuda_device):
    sampled = Sampled(n_bits=4, n_hashes=8, expectation="never")
    module = YosoAttention(16, 2, estimator=sampled, seed=0).to(cuda_device).eval()
    x, state = torch.zeros(2, 1, 16, device=cuda_device), module.new_state(2)
    module(x, x, x, is_causal=True, state=state)
    module.hash_seed.add_(1)
    with pytest.raises(ValueError, match="state must have the module's seed"):
        module(x, x, x, is_causal=True, state=state)


def test_errors(cuda_device):
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    tensors = inputs(cuda_device, n=2)
    state = state_for(*tensors)
    with pytest.raises(ValueError, match="key must be on cuda:0, where the state is, got cpu"):
        state.step(tensors[0], tensors[1].cpu(), tensors[2])
    with pytest.raises(ValueError, match="attn_mask must be on the state's device"):
        state.step(*tensors, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="device must be the cpu, or cuda"):
        YosoState(1, 1, 8, seed=0, device="meta")


def test_graph(cuda_device):
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    tensors = inputs(cuda_device, n=9)
    wanted = in_steps(state_for(*tensors), tensors)
    state = state_for(*tensors)
    given = [x[:, :, :1].clone() for x in tensors]
    state.clone().step(*given)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = state.step(*given)
    for i in range(9):
        for to, x in zip(given, tensors, strict=True):
            to.copy_(x[:, :, i : i + 1])
        graph.replay()
        assert torch.equal(out, wanted[:, :, i : i + 1])
    assert state.length.tolist() == [9, 9]


@pytest.mark.parametrize("options", [{}, {"conv_window": 5, "short_conv": 4}])
def test_graph_of_a_module(cuda_device, options):
    if cuda_device.type != "cuda":
        pytest.skip("needs a GPU")
    sampled = Sampled(n_bits=8, n_hashes=8, expectation="never")
    module = YosoAttention(16, 2, **options, estimator=sampled)
    module = module.to(cuda_device).eval()
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0)).to(cuda_device)

    @torch.no_grad()
    def step(x, state):
        return module(x, x, x, is_causal=True, state=state)[0]

    state, given = module.new_state(2), x[:, :1].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(given, state)
    torch.cuda.current_stream().wait_stream(side)
    state.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(given, state)
    again = module.new_state(2)
    for i in range(7):
        given.copy_(x[:, i : i + 1])
        graph.replay()
        torch.testing.assert_close(out, step(given, again), **TOLERANCE[torch.float32])


def test_a_soft_state_is_ready_for_a_graph(cuda_device):
    """Its first step copies nothing to the device; and what it saved may come back from there."""
    tensors = inputs(cuda_device, n=3)
    heads, columns = tensors[1].shape[1], tensors[1].shape[-1]
    planes = torch.randn(heads, 4, 3, columns, generator=torch.Generator().manual_seed(0))
    estimator = Soft(n_bits=3, n_hashes=4, n_probes=2, hasher="hyperplane")
    state = state_for(*tensors, estimator=estimator, parameters={"planes": planes})
    assert state._sharpness.device.type == cuda_device.type
    state.prefill(*tensors)
    other = state.clone().reset()
    other.load_state_dict({name: x.to(cuda_device) for name, x in state.state_dict().items()})
    assert torch.equal(other._sums, state._sums)
    assert other.to("cpu")._sharpness.device.type == "cpu"
