"""Modules, training wrappers and compiled graphs over ranks."""

import pytest

torch = pytest.importorskip("torch")

from cases import context_parallel_modules as of_ranks  # noqa: E402

from lshkit.attention import YosoAttention  # noqa: E402


def test_modules_equal_one_process(ranks):
    # 10 rows: with windows of 3 some of the chunks are as short as their surroundings.
    for size, n in ((4, 10), (2, 41)):
        found = ranks.run(size, of_ranks.module_cases, n)[0]
        wanted = of_ranks.module_alone(n)
        wanted |= dict.fromkeys(("checkpointed", "compiled"), wanted["causal"])
        for name, results in found.items():
            atol = 1e-5 if name != "autocast" else 0.1
            for got, expected in zip(results, wanted[name], strict=True):
                scale = 1 + expected.abs().max()
                assert ((got - expected).abs() / scale).max() <= atol, (name, n)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize(("replicas", "options"), [(1, {"layout": "head_tail"}), (2, {})])
def test_steps_on_a_mesh_equal_one_process(ranks, wrap, replicas, options):
    def call(model, step):
        batches = [of_ranks.batch_of(replica + 10 * step) for replica in range(replicas)]
        return model(torch.cat(batches))

    model = of_ranks.Model()
    losses = of_ranks.train(model, 3, call)
    for answer in ranks.run(4, of_ranks.ddp_steps, replicas, wrap, options):
        torch.testing.assert_close(answer[0], losses, atol=1e-5, rtol=1e-5)
        for got, expected in zip(answer[1], model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_short_convolutions_of_packed_sequences_equal_one_process(ranks, layout):
    starts = torch.tensor([0, 1, 3, 3, 19, 22, 41])
    for errors in ranks.run(3, of_ranks.packed_rows, starts, layout):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("options", [{"conv_window": 3}, {"conv_window": None, "short_conv": 3}])
def test_ranks_without_rows_have_gradients_of_zeros(ranks, options):
    """Which training over ranks waits for. All ranks' add up to those of one process."""
    answers = ranks.run(3, of_ranks.convolution_gradients, 2, options)
    assert not any(grad.any() for _, grad in answers[2][0])
    for i, (name, wanted) in enumerate(answers[0][1]):
        got = sum(own[i][1] for own, _ in answers)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4, msg=name)


def test_packed_sequences_have_no_convolution_and_a_state_one_rank(ranks):
    for kind, message in ranks.run(2, of_ranks.module_errors):
        assert kind == ["ValueError"] * 2
        assert "conv_window=3" in message[0] and "context_parallel" in message[1]


# With a convolution rows are sent before attention begins.
@pytest.mark.parametrize("options", [{}, {"short_conv": 3}, {"conv_window": 3}])
def test_a_call_that_one_module_refuses_is_an_error_on_all(ranks, options):
    answers = ranks.run(3, of_ranks.wrong_module_calls, options)
    for name, (kind, message) in answers[0].items():
        assert kind in ("TypeError", "ValueError") and name in message, (name, message)
        told = f"context_parallel: rank 0 refused its arguments: {message}"
        assert [x[name] for x in answers[1:]] == [("RuntimeError", told)] * 2


def test_modules_that_differ_are_an_error_on_all(ranks):
    answers = ranks.run(3, of_ranks.unlike_modules)
    assert answers == answers[:1] * 3
    for name, (kind, message) in answers[0].items():
        assert kind == "ValueError" and message.startswith(name), (name, message)


def test_the_keyword_is_documented():
    assert "context_parallel" in YosoAttention.forward.__doc__
