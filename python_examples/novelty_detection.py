"""Novelty detection: a density in a scikit-learn Pipeline, its bandwidth by GridSearchCV.

Nine of the ten handwritten digits are normal; the tenth was never seen. The pipeline (scaling,
principal components, LSHKernelDensity) is fitted to normal digits, the search picks the bandwidth
by held-out likelihood, and log-densities tell the unseen digit from held-out normal ones. At the
end there are a table for every digit left out, and a picture. Needs matplotlib and tqdm.
"""

import argparse
import pathlib
import time

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from sklearn.datasets import load_digits
    from sklearn.decomposition import PCA
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GridSearchCV, train_test_split
    from sklearn.neighbors import KernelDensity
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelDensity


def search(density, rows: np.ndarray, bandwidths: np.ndarray) -> GridSearchCV:
    steps = make_pipeline(StandardScaler(), PCA(30, random_state=0), density)
    name = type(density).__name__.lower()
    return GridSearchCV(steps, {f"{name}__bandwidth": bandwidths}, cv=3).fit(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bandwidths", type=int, default=9, help="points of the grid")
    parser.add_argument("--quick", action="store_true", help="two digits, a small grid")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("novelty_detection.png"))
    args = parser.parse_args()
    left_out = range(10)
    if args.quick:
        left_out, args.bandwidths = range(2), 3
    matplotlib.use("Agg")
    pixels, labels = load_digits(return_X_y=True)
    bandwidths = np.geomspace(0.5, 5, args.bandwidths)
    table, scores = [], {}
    for digit in tqdm(left_out, desc="digits"):
        normal, novel = pixels[labels != digit], pixels[labels == digit]
        train, held_out = train_test_split(normal, test_size=0.3, random_state=0)
        start = time.perf_counter()
        ours = search(LSHKernelDensity(algorithm="brute"), train, bandwidths)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        theirs = search(KernelDensity(), train, bandwidths)
        slow = time.perf_counter() - start
        truth = np.r_[np.zeros(len(held_out)), np.ones(len(novel))]
        everything = np.r_[held_out, novel]
        ours_scores, theirs_scores = (
            make.best_estimator_.score_samples(everything) for make in (ours, theirs)
        )
        auc, other = (roc_auc_score(truth, -x) for x in (ours_scores, theirs_scores))
        # A row is novel below the level that 5 % of the held-out normal rows are under.
        level = np.quantile(ours_scores[truth == 0], 0.05)
        caught = (ours_scores[truth == 1] < level).mean()
        h = next(iter(ours.best_params_.values()))
        table.append((digit, h, auc, other, caught, seconds, slow))
        scores[digit] = ours_scores[truth == 0], ours_scores[truth == 1], level
    print("\n| novel digit | bandwidth | AUC | scikit-learn | caught at 5 % | search s | theirs |")
    print("|---|---|---|---|---|---|---|")
    for digit, h, auc, other, caught, seconds, slow in table:
        row = f"| {digit} | {h:.2f} | {auc:.3f} | {other:.3f} | {caught:.0%} "
        print(row + f"| {seconds:.2f} | {slow:.2f} |")
    draw(scores, args.out)
    print(f"\npicture: {args.out}")


def draw(scores: dict, out: pathlib.Path) -> None:
    columns = min(5, len(scores))
    rows = -(-len(scores) // columns)
    size = 2.6 * columns, 2.2 * rows
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis, (digit, (normal, novel, level)) in zip(axes.flat, scores.items(), strict=False):
        low = np.quantile(np.r_[normal, novel], 0.04)
        bins = np.linspace(low, np.r_[normal, novel].max(), 30)
        for values, label in ((normal, "normal"), (novel, "novel")):
            axis.hist(np.clip(values, low, None), bins, density=True, alpha=0.6, label=label)
        axis.axvline(level, color="black", lw=0.8, ls="--")
        axis.set(title=f"novel: {digit}", yticks=[])
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower right", frameon=False, ncols=2, fontsize=9)
    figure.supxlabel("log-density", fontsize=10)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
