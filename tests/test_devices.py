"""What stands in for a GPU's ways while a test of the suites runs on it: tests/devices.py."""

from types import SimpleNamespace

import devices
import pytest

torch = pytest.importorskip("torch")

from lshkit.attention import Sampled, yoso_attention  # noqa: E402


def wants_an_error():
    with pytest.raises(ValueError):
        pass


def wants_none():
    pass


def item_of(function):
    callspec = SimpleNamespace(params={"device": "cuda"})
    return SimpleNamespace(function=function, callspec=callspec)


def test_an_assertion_of_the_device_is_no_end_of_all_tests():
    before = torch._assert_async, torch.compile
    with devices.on_cuda(torch.device("cpu")):
        torch._assert_async(torch.tensor(True), "holds")
        with pytest.raises(devices.DeviceAssertion, match="does not hold") as raised:
            torch._assert_async(torch.tensor(False), "does not hold")
        with pytest.raises(pytest.skip.Exception, match=r"torch\.compile does not trace"):
            torch.compile(wants_none)
    assert before == (torch._assert_async, torch.compile)
    assert "does not hold" in devices.limit(item_of(wants_an_error), raised.value)
    assert devices.limit(item_of(wants_none), raised.value) is None


def test_calls_with_tensors_on_the_cpu_are_not_counted():
    with devices.on_cuda(torch.device("cpu")) as context:
        query = torch.randn(1, 2, 5, 4)
        few = Sampled(n_bits=3, n_hashes=4, expectation="never")
        yoso_attention(query, query, query, estimator=few, seed=0)
    assert context.calls == 0


@pytest.mark.parametrize("n_bits", [5, 9])
def test_the_size_of_a_case_is_in_its_estimator_too(n_bits):
    few = Sampled(n_bits=n_bits, n_hashes=4)
    for params in ({"estimator": few}, {"n_bits": n_bits}, {"options": {"estimator": few}}):
        assert devices._size(SimpleNamespace(callspec=SimpleNamespace(params=params))) == 2**n_bits
