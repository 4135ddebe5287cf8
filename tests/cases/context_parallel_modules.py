"""What each rank does in the tests of modules over ranks, and the same in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lshkit.attention import Soft, YosoAttention
from lshkit.distributed import ContextParallel


class Model(nn.Module):
    """Two layers of attention with residual connections, for steps of training."""

    def __init__(self, estimator=None, dim=32, conv_window=3, short_conv=None, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        options = {"estimator": estimator or Soft(n_bits=4, n_hashes=4), "seed": 1}
        options |= {"conv_window": conv_window, "short_conv": short_conv, "fresh_hashes": False}
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
    run("short convolutions", Model(conv_window=None, short_conv=4))
    run("checkpointed", Model(recompute=True))
    if n > 10:  # once: compiling takes longest
        run("compiled", torch.compile(Model(), backend="aot_eager"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run("autocast", Model())
    return found


def module_alone(n):
    x = torch.randn(2, n, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = {}
    cases = [("causal", Model(), {}), ("not causal", Model(), {"is_causal": False})]
    cases += [("autocast", Model(), {})]
    cases += [("short convolutions", Model(conv_window=None, short_conv=4), {})]
    for name, model, options in cases:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "autocast"):
            out = model(x, **options)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x)
        found[name] = out.detach(), grad
    return found


REFUSED = {
    "attn_mask": torch.zeros(10, 10),
    "need_weights": True,
    "query": torch.randn(1, 10, 5),
    "key": torch.randn(1, 10, 32).double(),
    "value": torch.randn(1, 11, 32),
    "key_padding_mask": torch.zeros(1, 9, dtype=torch.bool),
    "cu_seqlens": torch.tensor([0, 10]),
    "state": object(),
    "is_causal": "yes",
    "meta": torch.randn(1, 10, 32, device="meta"),
}


def convolution_gradients(group, n, options):
    """Of the convolutions' weights, on each rank, and in one process."""
    cp = ContextParallel(group)
    x = torch.randn(1, n, 32, generator=torch.Generator().manual_seed(0))
    model, alone = Model(**options), Model(**options)
    model(cp.shard(x, 1), cp).square().sum().backward()
    alone(x).square().sum().backward()
    return [
        [(name, y.grad) for name, y in of.named_parameters() if "conv" in name]
        for of in (model, alone)
    ]


def wrong_module_calls(group, options):
    """The errors of calls of which rank 0's are refused, by what is wrong."""
    cp = ContextParallel(group)
    module = YosoAttention(32, 4, **options)
    x = torch.randn(1, 10, 32)
    found = {}
    for name, wrong in REFUSED.items():
        given = {"query": x, "key": x, "value": x}
        if cp.rank == 0:
            given["query" if name == "meta" else name] = wrong
        found[name] = _error_of(lambda given=given: module(**given, context_parallel=cp))
    return found


def unlike_modules(group):
    """The errors of modules and calls that differ on rank 0, by what does."""
    cp = ContextParallel(group)
    x = torch.randn(1, 10, 32)
    first = cp.rank == 0
    found = {}
    for name, options in {
        "short_conv": {"short_conv": 3 if first else 4},
        "conv_window": {"conv_window": 3 if first else 5},
        "call": {"conv_window": None if first else 5},
        "dtype": {"short_conv": 3, "dtype": torch.float64 if first else None},
        "batch": {"short_conv": 3},
    }.items():
        given = x.to(options.get("dtype"))
        given = given.repeat(2, 1, 1) if name == "batch" and first else given
        module = YosoAttention(32, 4, seed=0, **options)
        found[name] = _error_of(lambda module=module, x=given: module(x, x, x, context_parallel=cp))
    found["before"] = _error_of(lambda: cp.neighbours(x[None], 1 + first, 0))
    return found


def _error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)


def packed_rows(group, starts, layout):
    """The output of packed sequences through short convolutions, gathered, and its gradient."""
    torch.manual_seed(0)
    module = YosoAttention(32, 4, short_conv=4, estimator=Soft(n_bits=4, n_hashes=4), seed=1)
    module.fresh_hashes = False
    cp = ContextParallel(group, cu_seqlens=starts, layout=layout)
    x = torch.randn(1, int(starts[-1]), 32, generator=torch.Generator().manual_seed(0))
    own = cp.shard(x, 1).requires_grad_()
    out, _ = module(own, own, own, is_causal=True, context_parallel=cp)
    (grad,) = torch.autograd.grad(out.square().sum(), own)
    alone = x.requires_grad_()
    wanted, _ = module(alone, alone, alone, is_causal=True, cu_seqlens=starts)
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), alone)
    found = cp.gather(out.detach(), 1), cp.gather(grad, 1)
    return [
        (got - y).abs().max().item() for got, y in zip(found, (wanted, wanted_grad), strict=True)
    ]


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
