"""CodeCache as an object: copied, reordered, cropped, saved, and its checks."""

import pytest

torch = pytest.importorskip("torch")

from cases.code_cache import filled, qkv  # noqa: E402

from lshkit.attention import CodeCache  # noqa: E402


def small(n=1300, batch=2):
    query, key, value = qkv("peaked", n, 4, key_heads=2, batch=batch)
    cache = CodeCache(batch, 4, 64, 32, num_key_heads=2, seed=0)
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[0, :30] = False
    cache.append(key, value, mask)
    return cache, query


def one(batch=2, seed=9):
    return qkv("spread", 1, 4, key_heads=2, batch=batch, seed=seed)


def test_state_dict(tmp_path):
    cache, query = small()
    out = cache.attend(query)
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    other, _ = small(1100)
    other.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    assert torch.equal(other.length, cache.length)
    assert torch.equal(other.attend(query), out)
    assert torch.equal(other.step(*one()), cache.step(*one()))


@pytest.mark.parametrize(
    "name, value",
    [
        ("batch_size", 3),
        ("num_heads", 8),
        ("head_dim", 60),
        ("value_dim", 5),
        ("num_key_heads", 4),
        ("n_bits", 64),
        ("epsilon", 0.2),
        ("delta", 0.1),
        ("min_share", 0.02),
        ("max_share", 0.5),
        ("window", 3),
        ("n_sinks", 0),
        ("scale", 1.0),
        ("seed", 12),
        ("dtype", torch.bfloat16),
    ],
)
def test_a_cache_of_other_options_is_not_loaded(name, value):
    cache, _ = small(40)
    arguments = {"batch_size": 2, "num_heads": 4, "head_dim": 64, "value_dim": 32, "seed": 0}
    arguments |= {"num_key_heads": 2, name: value}
    other = CodeCache(**arguments)
    with pytest.raises(ValueError, match=f"{name}="):
        other.load_state_dict(cache.state_dict())
    assert other.positions == 0


def test_damaged_state_dicts():
    cache, query = small(1100)
    saved, out = cache.state_dict(), cache.attend(query)
    damaged = [
        ({"version": torch.tensor(2)}, "version"),
        ({"config": torch.zeros(3, dtype=torch.uint8)}, "config"),
        ({"config": torch.full((100_000,), ord("["), dtype=torch.uint8)}, "config"),  # deep
        ({"starts": torch.tensor([0, 1101])}, "starts"),
        ({"starts": torch.tensor([-1, 0])}, "starts"),
        ({"planes": saved["planes"] * torch.nan}, "planes"),
        ({"planes": saved["planes"][:, 1:]}, "planes"),
        ({"key": saved["key"][:, :1]}, "key"),
        ({"key": saved["key"].half()}, "key"),
        ({"value": saved["value"][:, :, 1:]}, "value"),
        ({"more": torch.zeros(1)}, "more"),
    ]
    for change, name in damaged:
        with pytest.raises(ValueError, match=name):
            cache.load_state_dict(saved | change)
    with pytest.raises(TypeError, match="state_dict"):
        cache.load_state_dict(3)
    with pytest.raises(TypeError, match="key"):
        cache.load_state_dict(saved | {"key": 3})
    assert torch.equal(cache.attend(query), out)


def test_reorder_crop_clone_and_reset():
    cache, query = small()
    out = cache.attend(query)
    copy = cache.clone()
    cache.reorder([1, 1, 0])
    assert cache.batch_size == 3 and cache.length.tolist() == [1300, 1300, 1270]
    assert torch.equal(cache.attend(query[[1, 1, 0]]), out[[1, 1, 0]])
    cache.append(*one(3)[1:])
    assert copy.positions == 1300 and torch.equal(copy.attend(query), out)
    # As if the removed ones had never come, where the keys are centred by others too.
    for positions in (1300, 1200, 1024, 17, 0):
        copy.crop(positions)
        shorter = CodeCache(2, 4, 64, 32, num_key_heads=2, seed=0)
        shorter.append(cache.key[[2, 0]][:, :, :positions], cache.value[[2, 0]][:, :, :positions])
        shorter.set_starts([min(30, positions), 0])
        assert torch.equal(copy.length, shorter.length)
        if positions:
            assert torch.equal(copy.attend(query), shorter.attend(query))
        more = one(2)
        assert torch.equal(copy.clone().step(*more), shorter.step(*more))
    nbytes = copy.nbytes
    assert copy.reset() is copy and copy.positions == 0 and copy.nbytes < nbytes
    assert "length=[0, 0]" in repr(copy)


def test_centres_follow_the_length():
    """Across a power of two, where all keys are hashed again, and back."""
    query, key, value = qkv("peaked", 2100, 4, key_heads=2)
    cache = filled(query, key[:, :, :2000], value[:, :, :2000])
    before = cache.attend(query)
    cache.append(key[:, :, 2000:], value[:, :, 2000:])
    assert torch.equal(cache.attend(query), filled(query, key, value).attend(query))
    assert torch.equal(cache.crop(2000).attend(query), before)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"epsilon": 0}, ValueError, "epsilon"),
        ({"epsilon": 1.0}, ValueError, r"epsilon must be in \(0, 1\), got 1.0"),
        ({"delta": 1}, ValueError, "delta"),
        ({"delta": -0.1}, ValueError, "delta"),
        ({"delta": 0.21}, ValueError, r"delta must be in \(0, 0.2\], got 0.21"),
        ({"delta": "a"}, TypeError, "delta"),
        ({"n_bits": 100}, ValueError, "n_bits must be a multiple of 64"),
        ({"n_bits": 320}, ValueError, "n_bits"),
        ({"min_share": 0.1}, ValueError, "max_share"),
        ({"max_share": 1.5}, ValueError, "max_share"),
        ({"window": 0}, ValueError, "window"),
        ({"n_sinks": -1}, ValueError, "n_sinks"),
        ({"num_key_heads": 3}, ValueError, "num_key_heads"),
        ({"scale": 0}, ValueError, "scale"),
        ({"dtype": torch.float64}, TypeError, "dtype"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": torch.tensor([-1])}, ValueError, "seed must be an integer >= 0, got -1"),
        ({"head_dim": 5000}, ValueError, "head_dim"),
    ],
)
def test_bad_options(options, error, message):
    arguments = {"batch_size": 1, "num_heads": 4, "head_dim": 8, "seed": 0} | options
    with pytest.raises(error, match=message):
        CodeCache(**arguments)


def test_a_delta_near_zero():
    def stated(delta):
        query, key, value = qkv("spread", 1500)
        return filled(query, key, value, delta=delta).attend(query, return_report=True)[1].error

    few, fewer = stated(1e-10), stated(1e-20)
    assert fewer.isfinite().all() and (fewer > few).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_s_default_dtype_does_not_matter(dtype):
    query, key, value = qkv("peaked", 1300, 4, key_heads=2, batch=2)

    def results():
        cache = CodeCache(2, 4, 64, 32, num_key_heads=2, seed=0)
        cache.append(key, value)
        return cache.attend(query), cache.attend_exactly(query)

    wanted = results()
    torch.set_default_dtype(dtype)
    try:
        assert all(map(torch.equal, results(), wanted))
    finally:
        torch.set_default_dtype(torch.float32)


def test_bad_tensors():
    cache, query = small(40)
    _, key, value = one()
    bad = [
        (lambda: cache.append(key.half(), value), TypeError, "key must have the cache's dtype"),
        (lambda: cache.append(key[:1], value), ValueError, "key must be"),
        (lambda: cache.append(key, value[..., 1:]), ValueError, "value must be"),
        (lambda: cache.append(key, value.repeat(1, 1, 2, 1)), ValueError, "key's length"),
        (lambda: cache.append(key.numpy(), value), TypeError, "torch tensor"),
        (lambda: cache.append(key.requires_grad_(), value), RuntimeError, "requires grad"),
        (lambda: cache.append(key.to("meta"), value), NotImplementedError, "cpu"),
        (lambda: cache.attend(query[:, :2]), ValueError, "query must be"),
        (lambda: cache.attend(query.repeat(1, 1, 41, 1)), ValueError, "at most the 40 positions"),
        (lambda: cache.attend_exactly(query.repeat(1, 1, 41, 1)), ValueError, "most the 40 posi"),
        (lambda: cache.attend(query, 1), TypeError, "return_report"),
        (lambda: cache.step(query.repeat(1, 1, 2, 1), key, value), ValueError, "query's length"),
        (lambda: cache.prefill(query.repeat(1, 1, 2, 1), key, value), ValueError, "length"),
        (lambda: cache.crop(41), ValueError, "positions"),
        (lambda: cache.reorder([2]), ValueError, "indices"),
        (lambda: cache.reorder([]), (TypeError, ValueError), "indices"),
        (lambda: cache.reorder([0.5]), TypeError, "indices"),
        (lambda: cache.set_starts([0]), ValueError, "starts"),
        (lambda: cache.set_starts([0, 41]), ValueError, "starts"),
        (lambda: cache.set_starts([0, 0.5]), TypeError, "starts must be integers"),
        (lambda: cache.set_starts(None), TypeError, "starts must be integers"),
        (lambda: cache.set_starts(torch.zeros(2, 1).long()), ValueError, "starts"),
        (lambda: cache.set_starts({0: 1}), TypeError, "starts"),
        (lambda: cache.set_starts(torch.tensor([0, torch.nan])), TypeError, "starts"),
    ]
    for call, error, message in bad:
        with pytest.raises(error, match=message):
            call()
        key = key.detach()
    assert cache.positions == 40


@pytest.mark.parametrize(
    "mask, error, message",
    [
        (torch.tensor([[True, False]] * 2), ValueError, "left padding"),  # right padding
        (torch.tensor([[True, False, True]] * 2), ValueError, "left padding"),
        (torch.tensor([[False, True]] * 2), ValueError, "behind one that takes part"),
        (torch.ones(2, 2), TypeError, "boolean"),
        (torch.ones(2, 3, dtype=torch.bool)[:1], ValueError, "attn_mask must be"),
    ],
)
def test_masks_that_it_cannot_hold(mask, error, message):
    cache, _ = small(40)
    n = mask.shape[1]
    _, key, value = qkv("spread", n, 4, key_heads=2, batch=2)
    with pytest.raises(error, match=message):
        cache.append(key, value, mask)
    assert cache.positions == 40 and cache.length.tolist() == [10, 40]


def test_entries_of_any_layout_are_loaded():
    query, key, value = qkv("spread", 1500)
    cache = filled(query, key, value)
    saved = {
        name: x.mT.contiguous().mT if x.dim() > 1 else x for name, x in cache.state_dict().items()
    }
    other = filled(query, key, value).reset()
    other.load_state_dict(saved)
    assert torch.equal(other.attend(query), cache.attend(query))
    with pytest.raises(ValueError, match="key must have 4 dimensions"):
        other.load_state_dict(saved | {"key": saved["key"].flatten(1)})
