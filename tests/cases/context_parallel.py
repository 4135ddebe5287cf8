"""What each rank does in the tests of context parallelism, and the same in one process."""

import os
import pathlib
import re
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lshkit.attention import Sampled, Soft, YosoAttention, yoso_attention
from lshkit.distributed import ContextParallel
from lshkit.distributed.ranks import collectives, costs

N, D = 203, 16


def inputs(batch=2, heads=6, key_heads=None, n=N, n_keys=None, dtype=torch.float32, seed=0):
    """query, key, value and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    n_keys, key_heads = n if n_keys is None else n_keys, key_heads or heads
    sizes = [(heads, n), (key_heads, n_keys), (key_heads, n_keys), (heads, n)]
    return [torch.randn(batch, *s, D, generator=generator).to(dtype) for s in sizes]


def attend(cp, case):
    """The output and the gradients of one case: `cp` None is one process.

    Rows are those of the rank, where it has them; gradients of parameters are its parts of them.
    """
    case = dict(case)
    of_inputs = case.pop("inputs", {})
    if case.get("cu_seqlens") is not None:
        of_inputs = {"batch": 1} | of_inputs
    query, key, value, grad_out = inputs(**of_inputs)
    masked, train = case.pop("masked", False), case.pop("train", True)
    query[:, :, case.pop("nan_queries", []), 0] = torch.nan
    for row in case.pop("nan_rows", []):
        query[:, :, row, 0] = key[:, :, -row, 1] = torch.nan
    lengths, n_threads = case.pop("lengths", None), case.pop("threads", 1)
    case.pop("layout", None), case.pop("exchange", None), case.pop("piece_bytes", None)
    parameters = case.pop("parameters", {})
    learnt = {name: x.clone().requires_grad_(train) for name, x in parameters.items()}
    mask = None
    if masked:
        generator = torch.Generator().manual_seed(1)
        mask = torch.rand(key.shape[0], key.shape[2], generator=generator) < 0.7
    cu_seqlens = case.pop("cu_seqlens", None)

    def own(x, dim=-2):
        if cp is None:
            return x
        if lengths is None:
            return cp.shard(x, dim)
        return x.split(lengths, dim)[cp.rank]

    if cp is None:
        case["cu_seqlens"] = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    else:
        case["context_parallel"] = cp
    tensors = [own(x).clone().requires_grad_(train) for x in (query, key, value)]
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    out = yoso_attention(
        *tensors,
        None if mask is None else own(mask, 1),
        enable_gqa=query.shape[1] != key.shape[1],
        parameters=learnt,
        **{"seed": 3} | case,
    )
    results = [out.detach()]
    if train:
        results += torch.autograd.grad(out, [*tensors, *learnt.values()], own(grad_out))
    torch.set_num_threads(before)
    return [x.nan_to_num(nan=7.0) for x in results]


def attend_all(group, cases):
    """For each case the exchange, and the whole tensors as all ranks together have them."""
    answers = []
    for case in cases:
        collectives.PIECE_BYTES = case.get("piece_bytes", costs.PIECE_BYTES)
        starts = case.get("cu_seqlens")
        cp = ContextParallel(
            group,
            layout=case.get("layout", "contiguous"),
            exchange=case.get("exchange", "auto"),
            cu_seqlens=None if starts is None else torch.tensor(starts),
        )
        results = attend(cp, case)
        train = case.get("train", True)
        rows, rest = results[: 4 if train else 1], results[4:]
        whole = [cp.gather(x.detach()) for x in rows]
        for x in rest:
            dist.all_reduce(x, group=group)
        answers.append((cp.last_exchange, whole + rest))
    return answers if dist.get_rank(group) == 0 else None


def count_bytes(group, cases):
    """Bytes that a rank has sent, beside those of what the ranks agree on."""
    sent = []
    for case in cases:
        cp = ContextParallel(
            group, layout=case.get("layout", "contiguous"), exchange=case["exchange"]
        )
        attend(cp, case)
        sent.append(cp.bytes_sent - 40 * (cp.size - 1))
    return sent


# --- Numerical derivatives ------------------------------------------------------------------------


class _SumOfRanks(torch.autograd.Function):
    """The same on every rank, with the gradient that one process has."""

    @staticmethod
    def forward(ctx, x, cp):
        ctx.cp = cp
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.cp.group)
        return grad / ctx.cp.size, None


def gradcheck(group, is_causal, exchange):
    cp = ContextParallel(group, exchange=exchange)
    generator = torch.Generator().manual_seed(5)
    estimator = Soft(n_bits=3, n_hashes=2, n_probes=4, hasher="hyperplane")
    query, key, value = torch.randn(3, 1, 2, 6, 4, generator=generator, dtype=torch.float64)
    planes = torch.randn(2, 2, 3, 4, generator=generator, dtype=torch.float64)
    sharpness = torch.tensor([0.7, 1.1], dtype=torch.float64)

    def attention(query, key, value, planes, sharpness):
        query, key, value, planes, sharpness = (
            _SumOfRanks.apply(x, cp) for x in (query, key, value, planes, sharpness)
        )
        rows = (cp.shard(x) for x in (query, key, value))
        parameters = {"planes": planes, "sharpness": sharpness}
        options = {"estimator": estimator, "parameters": parameters, "normalize": "sum"}
        return cp.gather(yoso_attention(*rows, is_causal=is_causal, context_parallel=cp, **options))

    tensors = [x.requires_grad_() for x in (query, key, value, planes, sharpness)]
    # Computed in float32: the differences carry its rounding, over a step of 2e-3.
    good = torch.autograd.gradcheck(attention, tensors, eps=2e-3, atol=3e-3, rtol=1e-2)
    return good, cp.last_exchange


# --- Modules --------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers of attention with residual connections, for steps of training."""

    def __init__(self, estimator=None, dim=32, conv_window=3, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        options = {"estimator": estimator or Soft(n_bits=4, n_hashes=4), "seed": 1}
        options |= {"conv_window": conv_window, "fresh_hashes": False}
        self.layers = nn.ModuleList(YosoAttention(dim, 4, **options) for _ in range(2))
        self.head = nn.Linear(dim, dim)
        self.recompute = recompute

    def forward(self, x, cp=None, is_causal=True):
        for layer in self.layers:

            def run(x, layer=layer):
                return layer(x, x, x, is_causal=is_causal, context_parallel=cp)[0]

            x = x + (checkpoint(run, x, use_reentrant=False) if self.recompute else run(x))
        return self.head(x)


def batch_of(replica, n=40, dim=32):
    generator = torch.Generator().manual_seed(100 + replica)
    return torch.randn(1, n, dim, generator=generator)


def train(model, steps, call):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = call(model, step).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def ddp_steps(group, replicas, wrap, options):
    """Steps of a model on a mesh (replicas, ranks of a sequence)."""
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size(group)
    mesh = init_device_mesh(
        "cpu", (replicas, size // replicas), mesh_dim_names=("replicas", "rows")
    )
    cp = ContextParallel(mesh["rows"], **options)
    replica = mesh["replicas"].get_local_rank()
    model = Model()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def call(model, step):
        return model(cp.shard(batch_of(replica + 10 * step), 1), cp)

    losses = train(model, 3, call)
    dist.all_reduce(losses)
    parameters = model.parameters()
    full = [x.full_tensor() if wrap == "fsdp" else x for x in parameters]
    return losses / size, [x.detach().clone() for x in full]


def module_cases(group, n):
    """Outputs and gradients of modules in other surroundings, as all ranks have them together."""
    cp = ContextParallel(group)
    x = torch.randn(2, n, 32, generator=torch.Generator().manual_seed(0))
    found = {}

    def run(name, model, **options):
        own = cp.shard(x, 1).requires_grad_()
        out = model(own, cp, **options)
        (grad,) = torch.autograd.grad(out.float().square().sum(), own)
        found[name] = cp.gather(out.detach(), 1), cp.gather(grad, 1)

    run("causal", Model())
    run("not causal", Model(), is_causal=False)
    run("checkpointed", Model(recompute=True))
    run("compiled", torch.compile(Model(), backend="aot_eager"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run("autocast", Model())
    return found


def module_alone(n):
    x = torch.randn(2, n, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = {}
    for name, options in (("causal", {}), ("not causal", {"is_causal": False}), ("autocast", {})):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "autocast"):
            out = Model()(x, **options)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x)
        found[name] = out.detach(), grad
    return found


def fresh_seeds(group):
    """A module that draws fresh hash functions in training: those of rank 0, on all ranks."""
    cp = ContextParallel(group)
    torch.manual_seed(cp.rank)  # ranks whose generators differ
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 64, 16, generator=generator)
    own = cp.shard(x)
    estimator = Sampled(n_bits=4, n_hashes=2, expectation="never")
    first, second = (
        cp.gather(yoso_attention(own, own, own, estimator=estimator, context_parallel=cp))
        for _ in range(2)
    )
    torch.manual_seed(0)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64)
    alone = yoso_attention(x, x, x, estimator=estimator, seed=seed)
    return first, second, alone


# --- Faults ---------------------------------------------------------------------------------------


def disagree(group, options):
    """options: what each rank calls with. The error of this rank as (type, message)."""
    cp = ContextParallel(group)
    mine = dict(options[cp.rank])
    query, key, value, _ = inputs(
        heads=mine.pop("heads", 4), dtype=mine.pop("dtype", torch.float32)
    )
    columns = mine.pop("columns", D)
    tensors = [cp.shard(query)[..., :columns], cp.shard(key)[..., :columns], cp.shard(value)]
    if mine.pop("requires_grad", False):
        tensors[0].requires_grad_()
    try:
        yoso_attention(*tensors, **{"seed": 0} | mine, context_parallel=cp)
    except (TypeError, ValueError, RuntimeError) as error:
        answer = type(error).__name__, str(error)
    else:
        answer = None
    # The group goes on.
    yoso_attention(*(cp.shard(x) for x in inputs()[:3]), seed=0, context_parallel=cp)
    return answer


def wrong_module_call(group):
    cp = ContextParallel(group)
    module = YosoAttention(32, 4)
    x = torch.randn(1, 10, 32)
    try:
        module(x, x, x, attn_mask=x if cp.rank == 0 else None, context_parallel=cp)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def one_rank_ends(group):
    cp = ContextParallel(group)
    tensors = [cp.shard(x) for x in inputs()[:3]]
    yoso_attention(*tensors, seed=0, context_parallel=cp)
    if cp.rank == 1:
        os._exit(1)
    begin = time.monotonic()
    try:
        for _ in range(3):
            yoso_attention(*tensors, seed=0, context_parallel=cp)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin


def one_rank_stays_away(group):
    cp = ContextParallel(group)
    if cp.rank == 1:
        return None
    tensors = [cp.shard(x) for x in inputs()[:3]]
    begin = time.monotonic()
    try:
        yoso_attention(*tensors, seed=0, context_parallel=cp)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin


def own_peak():
    """Bytes. (Not getrusage's ru_maxrss, which starts at that of the process that started this.)"""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def peak_memory(group, heads, n_bits):
    """Bytes by which a causal call by tables raises the peak of a fresh process, and a table's."""
    cp = ContextParallel(group, exchange="tables")
    estimator = Sampled(n_bits=n_bits, n_hashes=32, expectation="never")
    x = torch.randn(1, heads, 256, 64)

    def call(estimator):
        return yoso_attention(
            x, x, x, is_causal=True, estimator=estimator, seed=0, context_parallel=cp
        )

    with torch.no_grad():
        call(Sampled(n_bits=2, n_hashes=2, expectation="never"))
        before = own_peak()
        call(estimator)
    return own_peak() - before, heads * 32 * 2**n_bits * 64 * 4


# --- Other arguments ------------------------------------------------------------------------------


def warnings_of(group, case):
    """The exchange, why, and the warnings of a call that asks for another."""
    import warnings

    cp = ContextParallel(group, exchange=case["exchange"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(cp, case)
    return cp.last_exchange, cp.last_reason, [str(w.message) for w in caught]


def rows_round_trip(group, layout, n):
    cp = ContextParallel(group, layout=layout)
    x = torch.arange(3.0 * n).view(n, 3)
    own = cp.shard(x)
    return torch.equal(cp.gather(own), x), cp.positions(n).tolist(), own[:, 0].tolist()


def error_of(group, make):
    """The error of making a ContextParallel, or of a call with one."""
    try:
        make(group)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def with_tuple(group):
    ContextParallel((0, 1))


def with_word(group):
    ContextParallel(group, layout="striped")


def with_exchange(group):
    ContextParallel(group, exchange="ring")


def with_floats(group):
    ContextParallel(group, cu_seqlens=torch.tensor([0.0, 3.0]))


def with_decreasing(group):
    ContextParallel(group, cu_seqlens=torch.tensor([0, 5, 3]))


def with_mesh(group):
    from torch.distributed.device_mesh import init_device_mesh

    ContextParallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")))


def with_short_starts(group):
    cp = ContextParallel(group, cu_seqlens=torch.tensor([0, 5]))
    x = torch.randn(1, 4, 8, 4)
    yoso_attention(x, x, x, context_parallel=cp)


def with_starts_of_the_call(group):
    cp = ContextParallel(group)
    x = torch.randn(1, 4, 8, 4)
    yoso_attention(x, x, x, cu_seqlens=torch.tensor([0, 8]), context_parallel=cp)


def with_wrong_chunks(group):
    cp = ContextParallel(group, layout="head_tail")
    x = torch.randn(1, 4, 8 + 5 * cp.rank, 4)
    yoso_attention(x, x, x, context_parallel=cp)


def with_auto_scale(group):
    cp = ContextParallel(group)
    x = torch.randn(1, 3, 8, 4)
    estimator = Sampled(unit_norm="lift", lift_scale="auto")
    yoso_attention(x, x, x, estimator=estimator, context_parallel=cp)


def with_a_string(group):
    x = torch.randn(1, 3, 8, 4)
    yoso_attention(x, x, x, context_parallel="cp")


def value_gradient(group, estimator):
    """Of both kinds of masking: the exchange, the gradient of values, and that of one process."""
    answers = []
    for is_causal in (False, True):
        cp = ContextParallel(group, exchange="tables")
        query, key, value, grad_out = inputs()
        options = {"estimator": estimator, "is_causal": is_causal, "seed": 3}
        own = [cp.shard(x) for x in (query, key, value)]
        own[2].requires_grad_()
        out = yoso_attention(*own, **options, context_parallel=cp)
        (grad,) = torch.autograd.grad(out, own[2], cp.shard(grad_out))
        grad = cp.gather(grad)
        value.requires_grad_()
        out = yoso_attention(query, key, value, **options)
        answers.append((cp.last_exchange, grad, *torch.autograd.grad(out, value, grad_out)))
    return answers


def module_errors(group):
    x = torch.randn(1, 8, 32)
    kinds, messages = [], []
    module = YosoAttention(32, 4, conv_window=3).eval()
    plain = YosoAttention(32, 4).eval()
    packed = ContextParallel(group, cu_seqlens=torch.tensor([0, 16]))
    state = plain.new_state(1)
    calls = (
        lambda: module(x, x, x, context_parallel=packed),
        lambda: plain(
            x, x, x, is_causal=True, state=state, context_parallel=ContextParallel(group)
        ),
    )
    for call in calls:
        try:
            call()
        except ValueError as error:
            kinds.append(type(error).__name__)
            messages.append(str(error))
    return kinds, messages
