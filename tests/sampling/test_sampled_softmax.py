"""SampledSoftmaxLoss: exact where it can be, unbiased or consistent where it samples."""

import copy
import itertools
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from lshkit.sampling import SampledSoftmaxLoss, log_partition  # noqa: E402


def make(n_classes=300, n_features=8, dtype=torch.float64, scale=1.0, **options):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(scale * torch.randn(n_classes, n_features, dtype=dtype))
    return SampledSoftmaxLoss(n_features, n_classes, weight=weight, **options)


def batch(n=20, n_classes=300, n_features=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, n_features, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, torch.randint(n_classes, (n,), generator=generator)


def gradients(loss, *inputs):
    return [g.to_dense() for g in torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_bits", [1, 4])  # 1: nearly all classes are near
def test_exact_when_all_classes_are_sampled(n_bits, bias, sparse):
    loss = make(bias=bias, n_samples=300, n_bits=n_bits, sparse=sparse)
    if bias:
        with torch.no_grad():
            loss.bias.normal_()
    hidden, target = batch()
    parameters = hidden, *loss.parameters()
    value = loss(hidden, target)
    expected = F.cross_entropy(F.linear(hidden, loss.weight, loss.bias), target)
    torch.testing.assert_close(value, expected)
    for got, wanted in zip(
        gradients(value, *parameters), gradients(expected, *parameters), strict=True
    ):
        torch.testing.assert_close(got, wanted)
    indptr, indices = loss._near(hidden.detach())
    assert indptr[-1] > 0 and any(
        target[i] in indices[indptr[i] : indptr[i + 1]] for i in range(len(target))
    )


def test_threads_change_the_last_bits_alone():
    """Near classes and the sample have the same bits at any number of threads (tests/properties);
    torch's products of matrices may not."""
    hidden, target = batch(200, 5000, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        loss = make(5000, dtype=torch.float32, n_bits=6).rehash()
        value = loss(hidden, target)
        results.append((value.detach(), *gradients(value, hidden, loss.weight)))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-7)


def estimates(loss, hidden, target, repeats):
    """exp(loss) of the rows for many samples: Z / exp(o_target)."""
    return torch.stack([loss(hidden, target) for _ in range(repeats)])


@pytest.mark.parametrize(
    "options", [{}, {"min_count": 2}, {"max_bucket_size": 20}, {"max_bucket_size": 0}]
)
def test_normaliser_is_unbiased_given_the_tables(options):
    """Among them tables that have nothing to do with the weights, and no near classes at all."""
    for stale in (False, True):
        loss = make(n_samples=23, n_bits=4, n_hashes=3, reduction="none", **options)
        loss.rehash()
        if stale:
            with torch.no_grad():
                loss.weight.copy_(torch.randn_like(loss.weight))
        loss.rehash_every = 10**9
        hidden, target = batch()
        with torch.no_grad():
            ratio = estimates(loss, hidden, target, 400).exp()
            exact = F.cross_entropy(hidden @ loss.weight.T, target, reduction="none").exp()
        ratio /= exact
        error = ratio.std(0) / 400**0.5
        assert ((ratio.mean(0) - 1).abs() < 4.5 * error).all()  # 20 rows
        together = ratio.mean(1)
        assert abs(together.mean() - 1) < 4 * together.std() / 400**0.5


def over_all_samples(n_samples, monkeypatch):
    """r = estimated Z / Z, the losses and gradients of log Z, for every sample there can be.

    All are equally likely where n_samples divides the 16 classes: means over them are expectations.
    """
    part = 16 // n_samples
    loss = make(16, n_samples=n_samples, n_bits=2, n_hashes=1, scale=0.03, reduction="none")
    loss.rehash_every = 10**9
    hidden, target = batch(6, n_classes=16)
    exact = F.cross_entropy(hidden @ loss.weight.T, target, reduction="none").detach()
    ratios, results = [], []
    for places in itertools.product(range(part), repeat=n_samples):
        middle = (torch.tensor(places) + 0.5) / part
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda n, dtype, drawn=middle: drawn.to(dtype))
            value = loss(hidden, target)
        gradient = gradients(value.sum(), hidden)[0] + loss.weight[target]
        ratios.append((value - exact).detach().exp())
        results.append(torch.cat([(value - exact)[:, None], gradient], 1).detach())
    of_log_z = (hidden @ loss.weight.T).softmax(1) @ loss.weight
    return torch.stack(ratios), torch.stack(results), of_log_z.detach()


def test_expectations_over_all_samples(monkeypatch):
    """Z and its gradient are unbiased to rounding; log Z and its gradient off by O(1 / samples)."""
    variances, off = [], []
    for n_samples in (2, 4, 8):
        ratios, results, gradient = over_all_samples(n_samples, monkeypatch)
        torch.testing.assert_close(ratios.mean(0), torch.ones(6, dtype=torch.float64))
        # The gradient of Z over Z is r times that of log Z.
        torch.testing.assert_close((ratios[..., None] * results[..., 1:]).mean(0), gradient)
        low, variance = results[..., 0].mean(0), ratios.var(0, unbiased=False)
        assert (low < 0).all()
        variances.append(variance.mean())
        off.append((results[..., 1:].mean(0) - gradient).norm())
    # Strata of 16 classes: sum of n_samples variances of (16 / n_samples)^2 of those within them.
    assert variances[1] < 0.6 * variances[0] and variances[2] < 0.3 * variances[0]
    assert off[1] < 0.6 * off[0] and off[2] < 0.3 * off[0] and off[2] > 0
    # Half the variance, and terms of higher order in it.
    torch.testing.assert_close(low, -variance / 2, rtol=0.1, atol=0)


def test_gradient_is_the_derivative_of_the_estimate():
    loss = make(n_classes=20, n_samples=7, n_bits=2, n_hashes=2, bias=True, rehash_every=10**9)
    hidden, target = batch(4, n_classes=20)

    def value(hidden, weight, bias):
        torch.manual_seed(3)
        parameters = {"weight": weight, "bias": bias}
        return torch.func.functional_call(loss, parameters, (hidden, target))

    loss.rehash()
    weight, bias = (p.detach().clone().requires_grad_() for p in (loss.weight, loss.bias))
    assert torch.autograd.gradcheck(value, (hidden, weight, bias))


def test_options_agree():
    hidden, target = batch(dtype=torch.float32)
    results = []
    for options in ({"sparse": True}, {"reduction": "sum"}, {"reduction": "none"}, {}):
        loss = make(dtype=torch.float32, n_samples=40, n_bits=5, **options)
        torch.manual_seed(5)
        value = loss(hidden, target)
        grad = torch.autograd.grad(value.sum(), loss.weight)[0]
        assert grad.is_sparse == bool(options.get("sparse"))
        results.append((value, grad.to_dense()))
    mean, summed, each, default = results
    assert torch.equal(mean[0], default[0])
    torch.testing.assert_close(mean[1], default[1])
    torch.testing.assert_close(summed[0], each[0].sum())
    torch.testing.assert_close(summed[0] / 20, mean[0])
    torch.testing.assert_close(summed[1] / 20, mean[1])


def test_ignored_targets_and_leading_dimensions():
    hidden, target = batch()
    loss = make(n_samples=300, n_bits=3, reduction="none")
    target[::3] = -100
    value = loss(hidden.reshape(4, 5, 8), target.reshape(4, 5))
    expected = F.cross_entropy(hidden @ loss.weight.T, target, reduction="none")
    torch.testing.assert_close(value, expected.reshape(4, 5))
    grads = [gradients(x.sum(), hidden, loss.weight) for x in (value, expected)]
    torch.testing.assert_close(*grads)
    loss.reduction = "mean"
    torch.testing.assert_close(loss(hidden, target), expected.sum() / (target >= 0).sum())
    nothing = torch.full_like(target, -100)
    assert loss(hidden, nothing).isnan() and loss(hidden[:0], target[:0]).isnan()
    loss.reduction = "none"
    assert (loss(hidden, nothing) == 0).all() and loss(hidden[0], target[1]).shape == ()
    loss.ignore_index = 7
    nothing[:] = 7
    assert (loss.eval()(hidden, nothing) == 0).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_without_a_target(sparse):
    """Of a batch whose targets are all ignored, and of none: zeros, as F.cross_entropy's sum."""
    loss = make(n_samples=40, bias=True, sparse=sparse, reduction="sum")
    for n in (3, 0):
        hidden, target = batch(n)
        value = loss(hidden, torch.full_like(target, -100))
        assert value == 0
        for gradient, x in zip(
            gradients(value, hidden, *loss.parameters()), (hidden, *loss.parameters()), strict=True
        ):
            assert gradient.shape == x.shape and (gradient == 0).all()


def test_eval_is_exact_unless_told_otherwise():
    hidden, target = batch()
    loss = make(n_samples=10, n_bits=5).eval()
    expected = F.cross_entropy(hidden @ loss.weight.T, target)
    torch.testing.assert_close(loss(hidden, target), expected)
    assert loss.tables_ is None
    loss.exact_eval = False
    assert loss(hidden, target) != loss(hidden, target)
    assert loss.tables_ is not None and loss._age == 0


def test_exact_loss_in_chunks(monkeypatch):
    from lshkit.sampling import softmax

    monkeypatch.setattr(softmax, "_CHUNK", 1400)
    hidden, target = batch()
    loss = make(bias=True).eval()
    expected = F.cross_entropy(F.linear(hidden, loss.weight, loss.bias), target)
    grads = [gradients(x, hidden, *loss.parameters()) for x in (loss(hidden, target), expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("options", [{}, {"n_samples": 300}, {"train": False}], ids=str)
def test_a_bias_of_minus_infinity_leaves_classes_out(options, monkeypatch):
    """In training, with tables as those of the classes that are left; in chunks that have none."""
    from lshkit.sampling import softmax

    monkeypatch.setattr(softmax, "_CHUNK", 1400)
    train = options.pop("train", True)
    options = {"n_samples": 10, "n_bits": 4, "n_hashes": 4} | options
    kept = torch.arange(300) >= 200
    bias = torch.nn.Parameter(torch.where(kept, 0.5, -torch.inf).double())
    loss = make(bias=bias, **options).train(train)
    hidden, target = batch()
    target = target % 100 + 200
    value = loss(hidden, target)
    grads = gradients(value, hidden, *loss.parameters())
    assert all(x.isfinite().all() for x in (value, *grads)) and (grads[2][~kept] == 0).all()
    if train:
        indptr, indices = loss._near(loss.weight.detach())
        rows = torch.repeat_interleave(torch.arange(300), indptr.diff())
        assert (torch.bincount(rows[indices == rows], minlength=300) == 1).float().mean() > 0.5
    if options["n_samples"] == 300 or not train:
        expected = F.cross_entropy(F.linear(hidden, loss.weight, loss.bias), target)
        torch.testing.assert_close(value, expected)
        wanted = gradients(expected, hidden, *loss.parameters())
        torch.testing.assert_close(grads, wanted)


def test_rehashing():
    hidden, target = batch()
    loss = make(n_samples=10, n_bits=5, rehash_every=3)
    seen = []
    for _ in range(7):
        loss(hidden, target)
        seen.append(loss.tables_)
    changes = [a is not b for a, b in zip(seen[:-1], seen[1:], strict=True)]
    assert changes == [False, False, True, False, False, True]
    other = make(n_bits=5)
    other.load_state_dict(loss.state_dict())
    assert loss.state_dict().keys() == {"weight"} and other.tables_ is None
    copied = copy.deepcopy(loss)
    torch.manual_seed(1)
    first = loss(hidden, target)
    torch.manual_seed(1)
    assert torch.equal(first, copied(hidden, target))
    assert copied.weight is not loss.weight


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_checkpointing(sparse, use_reentrant):
    """The same bits with it, also where a step hashes the classes, and as many steps to that."""
    target = batch()[1]
    results = []
    for checkpointed in (False, True):
        hidden = batch()[0]
        loss = make(n_samples=30, n_bits=3, sparse=sparse, bias=True, rehash_every=2)
        for _ in range(5):
            if checkpointed:
                value = checkpoint(loss, hidden, target, use_reentrant=use_reentrant)
            else:
                value = loss(hidden, target)
            value.backward()
            results.append([value, *(x.grad.to_dense() for x in (hidden, *loss.parameters()))])
            hidden.grad = None
            loss.zero_grad()
    for plain, again in zip(results[:5], results[5:], strict=True):
        for x, y in zip(plain, again, strict=True):
            assert torch.equal(x, y)


def test_deferred_initialisation():
    with torch.device("meta"):
        loss = SampledSoftmaxLoss(8, 300, bias=True)
    assert loss.weight.is_meta and loss.bias.is_meta
    hidden, target = batch(dtype=torch.float32)
    with pytest.raises(ValueError, match="weight must be on the cpu, got a tensor on meta"):
        loss(hidden, target)
    loss.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(0)
    loss.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(loss.weight, SampledSoftmaxLoss(8, 300).weight)
    assert not loss.bias.any() and loss(hidden, target).isfinite()


def test_shares_the_parameters_of_a_linear_layer():
    linear = torch.nn.Linear(8, 300)
    loss = SampledSoftmaxLoss.from_linear(linear, n_samples=300)
    assert loss.weight is linear.weight and loss.bias is linear.bias
    hidden, target = batch(dtype=torch.float32)
    torch.testing.assert_close(loss(hidden, target), F.cross_entropy(linear(hidden), target))
    assert SampledSoftmaxLoss.from_linear(torch.nn.Linear(3, 9, bias=False)).bias is None


def test_half_precision_and_autocast():
    hidden, target = batch(dtype=torch.float32)
    loss = make(dtype=torch.float32, n_samples=300)
    expected = loss(hidden, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(hidden, target), expected)
        half = loss(hidden.bfloat16(), target)
    torch.testing.assert_close(half, expected, rtol=1e-2, atol=0)
    assert torch.autograd.grad(half, hidden)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_loss_is_exact_under_autocast(dtype):
    """Of confident rows too, whose loss was negative."""
    loss = make(dtype=torch.float32, bias=True).eval()
    target = torch.arange(20)
    hidden = (5 * loss.weight.detach()[target]).requires_grad_()
    expected = loss(hidden, target)
    wanted = torch.autograd.grad(expected, (hidden, loss.weight, loss.bias))
    with torch.autocast("cpu", dtype):
        again = loss(hidden, target)
    assert torch.equal(again, expected)
    for got, grad in zip(
        torch.autograd.grad(again, (hidden, loss.weight, loss.bias)), wanted, strict=True
    ):
        assert torch.equal(got, grad)


def test_memory_of_parameters_may_be_taken_back():
    """As FSDP does between forward and backward."""
    hidden, target = batch(dtype=torch.float32)
    loss = make(dtype=torch.float32)
    loss(hidden, target).backward()
    log_partition(hidden, loss.weight, seed=0)
    assert all(x.untyped_storage().resizable() for x in (hidden, loss.weight))


def test_weights_turned_to_half_precision_are_refused():
    hidden, target = batch(dtype=torch.float32)
    with pytest.raises(TypeError, match="weight must be of dtype torch.float32 or torch.float64"):
        make(dtype=torch.float32).bfloat16()(hidden, target)


@pytest.mark.parametrize("n_classes", [20, 80])
@pytest.mark.parametrize("train", [False, True])
def test_a_weight_of_another_number_of_classes_is_refused(n_classes, train):
    """Tables and sample would know nothing of more classes, and too much of fewer."""
    loss = SampledSoftmaxLoss(4, 50, n_samples=5).train(train)
    loss.weight = torch.nn.Parameter(torch.ones(n_classes, 4))
    with pytest.raises(ValueError, match=r"weight must have shape \(50, 4\)"):
        loss(torch.randn(3, 4), torch.arange(3))


@pytest.mark.parametrize(("n_classes", "n_samples"), [(37, 10), (11, 10), (10, 7), (10, 5)])
def test_the_sample_has_distinct_classes_of_known_probabilities(n_classes, n_samples):
    loss = make(n_classes=n_classes, n_samples=n_samples)
    counts = torch.zeros(n_classes, dtype=torch.float64)
    for _ in range(1500):
        samples, log_weights = loss._sample(torch.float64)
        assert len(samples) == n_samples and (samples[1:] > samples[:-1]).all()
        counts[samples] += log_weights.exp()
        torch.testing.assert_close(log_weights.exp().sum(), torch.tensor(float(n_classes)).double())
    # Of a class the weight w with the probability 1 / w: variance w - 1.
    w = -(-n_classes // n_samples)
    assert ((counts / 1500 - 1).abs() < 4.5 * ((w - 1) / 1500) ** 0.5).all()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("of", ["hidden", "weight", "bias"])
def test_second_derivatives_are_refused(sparse, of):
    """Not zeros, as torch's once_differentiable gives where the loss is a sum."""
    hidden, target = batch()
    loss = make(n_samples=300, sparse=sparse, bias=True)
    x = hidden if of == "hidden" else getattr(loss, of)
    (wanted,) = torch.autograd.grad(loss(hidden, target), x)
    for other in {hidden, loss.weight, loss.bias} - {x}:
        other.requires_grad_(False)
    (grad,) = torch.autograd.grad(loss(hidden, target), x, create_graph=True)
    torch.testing.assert_close(grad.detach().to_dense(), wanted.to_dense())
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        (grad.to_dense() if grad.is_sparse else grad).square().sum().backward()


def test_transforms_of_torch_func():
    hidden, target = batch()
    loss = make(n_samples=300)
    (wanted,) = torch.autograd.grad(loss.eval()(hidden, target), hidden)
    grad = torch.func.grad(lambda x: loss(x, target))
    torch.testing.assert_close(grad(hidden.detach()), wanted)
    loss.train()
    for transform in (grad, lambda x: torch.func.vjp(lambda x: loss(x, target), x)):
        with pytest.raises(NotImplementedError, match="in train mode"):
            transform(hidden.detach())
    with pytest.raises(NotImplementedError, match="no vmap over target"):
        torch.func.vmap(lambda x, y: loss.eval()(x[None], y[None]))(hidden, target)
    with pytest.raises(NotImplementedError, match="no vmap over target"):
        each = torch.func.grad(lambda x, y: loss(x[None], y[None]))
        torch.func.vmap(each)(hidden.detach(), target)
    alone = torch.func.vmap(torch.func.grad(lambda x: loss(x[None], target[:1])))
    torch.testing.assert_close(alone(hidden.detach()[:1])[0], 20 * wanted[0])


def test_training_with_sparse_gradients_learns():
    torch.manual_seed(0)
    centres = torch.randn(2000, 16)
    loss = SampledSoftmaxLoss(16, 2000, n_samples=100, sparse=True, rehash_every=10)
    optimizer = torch.optim.SparseAdam(loss.parameters(), lr=0.05)
    losses = []
    for _ in range(60):
        target = torch.randint(2000, (256,))
        optimizer.zero_grad()
        loss(centres[target] + 0.1 * torch.randn(256, 16), target).backward()
        optimizer.step()
        if len(losses) == 0 or _ == 59:
            with torch.no_grad():
                losses.append(float(loss.eval()(centres[target], target)))
            loss.train()
    assert losses[-1] < 0.5 * losses[0]


LOSS = SampledSoftmaxLoss(4, 9, n_bits=2)
H, Y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LOSS(H, Y + 9), ValueError, "target must be 0 to n_classes - 1 = 8 or"),
        (lambda: LOSS(H, Y - 1), ValueError, "ignore_index = -100, got -1"),
        (lambda: LOSS(H, Y.float()), TypeError, "target must hold integers"),
        (lambda: LOSS(H, Y[:2]), ValueError, "target must have shape (3,), that of hidden"),
        (lambda: LOSS(H[:, :3], Y), ValueError, "hidden must have shape (..., 4), got (3, 3)"),
        (lambda: LOSS(Y, Y), TypeError, "hidden must hold floats"),
        (lambda: LOSS(H.numpy(), Y), TypeError, "hidden must be a tensor, got a ndarray"),
        (lambda: SampledSoftmaxLoss(4, 0), ValueError, "n_classes must be an integer"),
        (lambda: SampledSoftmaxLoss(4, 9, n_bits=17), ValueError, "n_bits must be an integer"),
        (lambda: SampledSoftmaxLoss(4, 9, n_samples=0), ValueError, "n_samples must be an"),
        (lambda: SampledSoftmaxLoss(4, 9, min_count=10**400), ValueError, "min_count must be an"),
        (lambda: SampledSoftmaxLoss(2**62, 9), ValueError, "n_features must be an integer from"),
        (lambda: SampledSoftmaxLoss(4, 9, reduction="max"), ValueError, "reduction must be one"),
        (lambda: SampledSoftmaxLoss(4, 9, sparse=1), TypeError, "sparse must be a bool"),
        (lambda: SampledSoftmaxLoss(4, 9, weight=H), TypeError, "weight must be a Parameter"),
        (
            lambda: SampledSoftmaxLoss(4, 9, weight=torch.nn.Parameter(H)),
            ValueError,
            "weight must have shape (9, 4), got (3, 4)",
        ),
        (
            lambda: SampledSoftmaxLoss(4, 3, weight=torch.nn.Parameter(H.half())),
            TypeError,
            "weight must be of dtype torch.float32 or torch.float64, got torch.float16",
        ),
        (
            lambda: SampledSoftmaxLoss(4, 3, bias=torch.nn.Parameter(H)),
            ValueError,
            "bias must have shape (3,)",
        ),
        (lambda: SampledSoftmaxLoss.from_linear(H), TypeError, "linear must be a torch.nn.Linear"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_without_near_classes_or_classes_alike():
    """Weights that all have one direction: the mean taken off leaves zeros, all in one bucket."""
    weight = torch.nn.Parameter(torch.ones(50, 4))
    loss = SampledSoftmaxLoss(4, 50, weight=weight, n_samples=5)
    value = loss(torch.randn(3, 4), torch.arange(3))
    assert value.item() == pytest.approx(np.log(50), abs=0.5)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_beside_those_of_a_linear_layer(name):
    linear = torch.nn.Linear(4, 50)
    with pytest.raises(TypeError, match=f"{name} is the linear layer's"):
        SampledSoftmaxLoss.from_linear(linear, **{name: getattr(linear, name)})
