"""Figure 5: models trained with different numbers of hashes, run with others."""

import functools

from matplotlib import pyplot as plt

from benchmarks.encoder import evaluate
from benchmarks.measurement import table as markdown
from benchmarks.papers.figures import byte_model

TITLE = "Hashes at inference (ICML figure 5)"
METHODS = ("YOSO-8", "YOSO-32", "YOSO-E")
INFERENCE = (8, 16, 32, 64, 128, 256)
SEEDS = 3


def measure(settings):
    training = settings.training
    inference, count = ((8, 16), 1) if settings.quick else (INFERENCE, 6)
    _, held_out = byte_model.texts(training)
    batches = byte_model.batches(held_out, training.length, training.batch_size, count)
    losses = {}
    for method in METHODS:
        model = byte_model.trained(method, training, settings.models)
        of_method = {}
        for m in inference:
            of_seeds = []
            for seed in range(1 if settings.quick else SEEDS):
                byte_model.set_mix(model, functools.partial(byte_model.yoso, n_hashes=m, seed=seed))
                of_seeds.append(evaluate(model, batches)["loss"])
            of_method[m] = of_seeds
        byte_model.set_mix(model, byte_model.yoso)
        of_method["expectation"] = [evaluate(model, batches)["loss"]]
        losses[method] = of_method
    controls = {
        name: evaluate(byte_model.trained(name, training, settings.models), batches)["loss"]
        for name in byte_model.CONTROLS
    }
    return {
        "tau": byte_model.N_BITS,
        "steps": training.steps,
        "length": training.length,
        "losses": losses,
        "controls": controls,
    }, None


def mean(values):
    return sum(values) / len(values)


def table(results):
    columns = list(next(iter(results["losses"].values())))
    rows = [
        [f"trained with {method}", *(f"{mean(losses[m]):.3f}" for m in columns)]
        for method, losses in results["losses"].items()
    ]
    for name, loss in results["controls"].items():
        rows.append([name, *("" for _ in columns[:-1]), f"{loss:.3f}"])
    header = ["nats a hidden byte", *(f"{m} hashes" for m in columns[:-1]), "expectation"]
    title = f"{TITLE}: held-out loss after {results['steps']} steps at length {results['length']}"
    return markdown(title, header, rows)


def draw(results, arrays):
    picture, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    colors = ("#0072B2", "#E69F00", "#D55E00")
    for (method, losses), color in zip(results["losses"].items(), colors, strict=True):
        hashes = [int(m) for m in losses if m != "expectation"]
        means = [mean(losses[str(m)]) for m in hashes]
        axis.plot(hashes, means, marker="o", color=color, label=f"trained with {method}")
        axis.fill_between(
            hashes, [min(losses[str(m)]) for m in hashes], [max(losses[str(m)]) for m in hashes],
            color=color, alpha=0.15, linewidth=0,
        )  # fmt: skip
        axis.plot(2 * hashes[-1], losses["expectation"][0], "D", color=color)
    controls = ", ".join(f"{name} {loss:.2f}" for name, loss in results["controls"].items())
    axis.set_title(f"outside of the axis, same training: {controls}", fontsize=10)
    axis.set_xscale("log")
    axis.set_xticks([*hashes, 2 * hashes[-1]], [*map(str, hashes), "∞ (YOSO-E)"])
    axis.minorticks_off()
    axis.set_xlabel("hashes at inference")
    axis.set_ylabel("held-out loss (nats a hidden byte)")
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return picture
