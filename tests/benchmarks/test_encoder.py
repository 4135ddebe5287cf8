"""The encoder of the benchmarks is of the size and starts at the loss that their results are of."""

import json

import pytest

torch = pytest.importorskip("torch")

from benchmarks import RESULTS  # noqa: E402
from benchmarks.encoder import Encoder, evaluate  # noqa: E402
from benchmarks.quality import recall_from_scratch  # noqa: E402
from benchmarks.quality.cost.methods import METHODS as OF_BYTES  # noqa: E402
from benchmarks.quality.tasks.methods import METHODS as OF_TASKS  # noqa: E402
from benchmarks.source_text import N_BYTES, frequencies, masked_batch  # noqa: E402
from lshkit.attention import Sampled  # noqa: E402

METHODS = OF_TASKS | recall_from_scratch.METHODS | OF_BYTES
FROM_SCRATCH = {"has_positions": False, "conv_width": recall_from_scratch.CONV_WIDTH}
SETTINGS = json.loads((RESULTS / "quality_cost.json").read_text())["settings"]
TEXT = torch.randint(256, (5000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def model_of(method, length=SETTINGS["length"], dim=SETTINGS["embed_dim"], **options):
    torch.manual_seed(0)
    sizes = dim, 4 * dim, SETTINGS["heads"], SETTINGS["layers"]
    return Encoder(METHODS[method], N_BYTES, 256, length, *sizes, frequencies(TEXT), **options)


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_start_from_the_same_weights(method):
    def shared(name, options):
        state = model_of(name, **options).state_dict()
        return {key: x for key, x in state.items() if "mixer" not in key}

    # Embedding, positions, two blocks of 12 dim^2 and 13 dim, norm and output; a convolution has
    # 12 dim weights and 3 dim biases.
    for options, size in (({}, 528_256), (FROM_SCRATCH, 528_256 - 512 * 128 + 2 * 15 * 128)):
        own, first = (shared(name, options) for name in (method, "softmax"))
        assert own.keys() == first.keys()
        assert all(torch.equal(x, first[key]) for key, x in own.items())
        assert sum(x.numel() for x in own.values()) == size


def test_it_starts_at_the_frequencies():
    batch = masked_batch(TEXT, 128, 4, torch.Generator().manual_seed(1))
    guess = -frequencies(TEXT).log()[batch.answers].mean().item()
    assert evaluate(model_of("softmax"), [batch])["loss"] == pytest.approx(guess, abs=0.05)


def test_hash_functions_are_fixed_in_the_evaluation_alone():
    model = model_of("lower_bound", length=64, dim=32)
    batch = masked_batch(TEXT, 64, 2, torch.Generator().manual_seed(1))
    assert evaluate(model, [batch]) == evaluate(model, [batch])
    assert evaluate(model, [batch]) != evaluate(model, [batch], Sampled(n_hashes=64))
    assert not torch.equal(model(batch), model(batch))


def test_offset_is_the_position_of_the_first_token():
    model = model_of("softmax", length=96, dim=32).eval()
    batch = masked_batch(TEXT, 64, 2, torch.Generator().manual_seed(1))
    wanted = model(batch, 32)
    model.positions.data = model.positions.data.roll(-32, 0)
    torch.testing.assert_close(model(batch), wanted)
