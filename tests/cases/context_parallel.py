"""What each rank does in the tests of context parallelism, and the same in one process."""

import torch
import torch.distributed as dist

from lshkit.attention import Sampled, Soft, yoso_attention
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
    for name in ("layout", "exchange", "piece_bytes", "joined_bytes"):
        case.pop(name, None)
    parameters = case.pop("parameters", {})
    learnt = {name: x.clone().requires_grad_(train) for name, x in parameters.items()}
    mask = None
    if masked:
        generator = torch.Generator().manual_seed(1)
        mask = torch.rand(key.shape[0], key.shape[2], generator=generator) < 0.7
    if (unread := case.pop("masked_keys", None)) is not None:
        key.transpose(1, 2)[~mask] = unread
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
        collectives.JOINED_BYTES = case.get("joined_bytes", 2**16)
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


def beside_other_messages(group):
    """What the caller's own message brought, begun before a call and sent after it."""
    cp = ContextParallel(group, exchange="heads")
    query, key, value, _ = inputs(n=8)
    own = [cp.shard(x) for x in (query, key, value)]
    other = dist.get_global_rank(group, 1 - cp.rank)
    arrived = torch.zeros_like(own[0])
    pending = dist.irecv(arrived, other, group)
    out = cp.gather(yoso_attention(*own, estimator=Soft(), seed=3, context_parallel=cp))
    dist.send(torch.full_like(arrived, 7.0), other, group)
    pending.wait()
    return arrived, out, yoso_attention(query, key, value, estimator=Soft(), seed=3)


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


def second_derivative(group, estimator, exchange):
    """What the gradient of a gradient raises."""
    cp = ContextParallel(group, exchange=exchange)
    own = [cp.shard(x).requires_grad_() for x in inputs()[:3]]
    out = yoso_attention(*own, estimator=estimator, seed=3, context_parallel=cp)
    grads = torch.autograd.grad(out.sum(), own, create_graph=True)
    try:
        sum(x.square().sum() for x in grads).backward()
    except RuntimeError as error:  # which NotImplementedError is
        return str(error)
    return "nothing"


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
    query, key, value = torch.randn(3, 1, 1, 4, 3, generator=generator, dtype=torch.float64)
    planes = torch.randn(1, 2, 3, 3, generator=generator, dtype=torch.float64)
    sharpness = torch.tensor([0.7], dtype=torch.float64)

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
