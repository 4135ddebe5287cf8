"""`SampledSoftmaxLoss` in DistributedDataParallel and FSDP."""

import pytest

torch = pytest.importorskip("torch")

from cases import sampled_softmax as of_ranks  # noqa: E402


@pytest.mark.parametrize(
    ("wrap", "sparse"), [("ddp", False), ("ddp", True), ("fsdp", False)], ids=str
)
def test_training_equals_that_of_one_process(ranks, wrap, sparse):
    wanted, weights = of_ranks.steps(None, None, sparse)
    answers = ranks.run(2, of_ranks.steps, wrap, sparse)
    means = torch.tensor([losses for losses, _ in answers]).mean(0)
    torch.testing.assert_close(means, torch.tensor(wanted))
    for _, theirs in answers:
        for got, expected in zip(theirs, weights, strict=True):
            torch.testing.assert_close(got, expected)
