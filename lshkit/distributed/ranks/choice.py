"""Which exchanges can compute a call, and how many bytes each would send."""

import torch

from lshkit.attention.call import Call
from lshkit.attention.estimators import BucketSums, Colliding, Estimator, Sampled
from lshkit.attention.unit_norm import AUTO
from lshkit.distributed.ranks.collectives import Ranks
from lshkit.distributed.ranks.costs import costs_of, keys_sent
from lshkit.distributed.ranks.exchanges import Sequences, pieces_of


def impossible(ranks: int, estimator: Estimator, call: Call, where: Sequences) -> dict[str, str]:
    """Exchanges that cannot compute the call, and why."""
    reasons = {}
    key_heads = call.key.shape[1]
    if key_heads % ranks:
        reasons["heads"] = f"{ranks} ranks do not divide the {key_heads} heads of keys"
    lifted = estimator.unit_norm == "lift" and "lift_scale" not in call.parameters
    if lifted and estimator.lift_scale == AUTO:
        why = "lift_scale='auto' is the largest norm of the whole sequence"
        reasons["keys"] = reasons["tables"] = why
        return reasons
    differentiated = torch.is_grad_enabled() and (
        call.query.requires_grad
        or call.key.requires_grad
        or any(x.requires_grad for x in call.parameters.values())
    )
    window = isinstance(estimator, Colliding) and estimator.window and not estimator.exact_up_to
    if window and not where.is_causal:
        reasons["keys"] = "a window's pairs depend on positions, known under a causal mask alone"
    if not isinstance(estimator, BucketSums):
        reasons["tables"] = f"{estimator!r} compares pairs"
    elif not where.keys.total:
        reasons["tables"] = "there are no keys"  # whose output is 0, of queries with a NaN too
    elif isinstance(estimator, Sampled) and differentiated:
        reasons["tables"] = "the gradient of queries and keys of Sampled is not one of tables"
    elif where.is_causal and (where.offset or where.queries.lengths != where.keys.lengths):
        reasons["tables"] = "queries and keys have different positions under a causal mask"
    return reasons


def bytes_sent(ranks: Ranks, estimator: Estimator, call: Call, where: Sequences) -> dict[str, int]:
    """By each exchange, from a rank: in a forward pass, and a backward one if there will be any."""
    batch, heads, _, n_features = call.query.shape
    _, key_heads, _, n_values = call.value.shape
    itemsize = call.query.element_size()
    tables = 0
    if isinstance(estimator, BucketSums):
        columns = n_values + (call.normalize == "sum")
        n_slots = pieces_of(ranks, where).plan.n_slots
        sizes = n_slots * batch * key_heads, estimator.n_hashes, 2**estimator.n_bits, columns, 4
        tables = 1
        for size in sizes:
            tables *= size
    costs = costs_of(
        ranks.size,
        where.queries.total,
        tables,
        keys_sent(where.queries, where.keys, where.starts, where.is_causal, where.offset),
        batch * itemsize * key_heads * (n_features + n_values),
        batch * itemsize * heads * (n_features + n_values),
        tables,
    )
    tensors = call.query, call.key, call.value, *call.parameters.values()
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return {name: c.forward + trains * c.backward for name, c in costs.items()}
