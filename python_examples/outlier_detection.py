"""Outlier and novelty detection
=============================

Outlier and novelty detection with LSHOutlierDetector: interface of IsolationForest, no tuning.

Novelties: nine of the ten handwritten digits are fitted, the tenth was never seen; the detector
tells it from held-out normal ones. Outliers: the strangest of all digits, each judged by the
others. A stream: a sketch of constant size learns rows in parts. Ends in a table for every digit
left out, and a picture. Needs matplotlib, tabulate and tqdm.
"""

import argparse
import pathlib

try:
    import matplotlib
    import numpy as np
    from matplotlib import pyplot as plt
    from sklearn.datasets import load_digits, make_moons
    from sklearn.ensemble import IsolationForest
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import train_test_split
    from sklearn.neighbors import LocalOutlierFactor
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.kde import LSHKernelDensity, LSHOutlierDetector

TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}


def novelties(digit: int, pixels: np.ndarray, labels: np.ndarray) -> tuple[list, tuple]:
    normal, novel = pixels[labels != digit], pixels[labels == digit]
    train, held_out = train_test_split(normal, test_size=0.3, random_state=0)
    rows = np.concatenate([held_out, novel])
    truth = np.arange(len(rows)) >= len(held_out)
    detector = LSHOutlierDetector(contamination=0.05, random_state=0).fit(train)
    others = IsolationForest(random_state=0), LocalOutlierFactor(novelty=True)
    areas = [
        roc_auc_score(truth, -one.score_samples(rows))
        for one in (detector, *(one.fit(train) for one in others))
    ]
    decision = detector.decision_function(rows)
    alarms, caught = (decision[~truth] < 0).mean(), (decision[truth] < 0).mean()
    return [digit, *areas, caught, alarms], (decision[~truth], decision[truth])


def streamed(rows: np.ndarray, truth: np.ndarray) -> float:
    """AUC of a sketch, which stores no rows but those of the threshold."""
    sketch = LSHKernelDensity("laplacian", "neighbors", algorithm="bucket_sum", n_hashes=256)
    detector = LSHOutlierDetector(sketch, random_state=0)
    for part in np.array_split(np.random.default_rng(0).permutation(rows[~truth]), 10):
        detector.partial_fit(part)
    return float(roc_auc_score(truth, -detector.score_samples(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two digits")
    add("--out", type=pathlib.Path, default="outlier_detection.png", help="the picture")
    args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    matplotlib.use("Agg")
    pixels, labels = load_digits(return_X_y=True)
    left_out = range(2 if args.quick else 10)
    found = [novelties(k, pixels, labels) for k in tqdm(left_out, desc="digits")]
    table = [
        [str(digit), *(f"{area:.3f}" for area in areas), f"{caught:.0%}", f"{alarms:.1%}"]
        for (digit, *areas, caught, alarms), _ in found
    ]
    header = ["novel", "lshkit", "IsolationForest", "LOF", "caught", "false alarms"]
    print(f"\n{tabulate(table, header, **TABLE)}\n")
    print("novel: the digit left out; areas under the ROC curve")
    print("caught, false alarms: of lshkit with contamination=0.05\n")

    detector = LSHOutlierDetector(contamination=0.01, random_state=0)
    strange = np.flatnonzero(detector.fit_predict(pixels) < 0)
    strange = strange[np.argsort(detector.score_samples(pixels[strange]))]
    print(f"strangest of {len(pixels)} digits: rows {', '.join(map(str, strange[:8]))}")

    rng = np.random.default_rng(0)
    moons = make_moons(600, noise=0.06, random_state=0)[0]
    noise = rng.uniform(moons.min(axis=0) - 0.5, moons.max(axis=0) + 0.5, (40, 2))
    points = np.concatenate([moons, noise])
    area = streamed(points, np.arange(640) >= 600)
    print(f"moons as a stream of 10 parts, in a sketch: AUC {area:.3f}")
    draw(points, [(row[0], values) for row, values in found], pixels[strange], args.out)
    print(f"\npicture: {args.out}")


def draw(points: np.ndarray, scores: list, strange: np.ndarray, out: pathlib.Path) -> None:
    figure = plt.figure(figsize=(9.5, 5.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.2, 1))
    region, histogram = upper.subplots(1, 2)
    detector = LSHOutlierDetector(contamination=0.06, random_state=0)
    outlier = detector.fit_predict(points) < 0
    low, high = points.min(axis=0) - 0.1, points.max(axis=0) + 0.1
    axes = [np.linspace(a, b, 120) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes), axis=-1)
    level = detector.decision_function(grid.reshape(-1, 2)).reshape(120, 120)
    colours = plt.get_cmap("Blues")(np.linspace(0, 0.5, 5))
    region.contourf(*axes, level, levels=[-8, -4, 0, 1], extend="both", colors=colours)
    region.contour(*axes, level, levels=[0], colors="black", linewidths=0.8)
    region.scatter(*points[~outlier].T, s=3, color="black", label="inliers")
    region.scatter(*points[outlier].T, s=14, color="tab:red", marker="x", label="outliers")
    region.set(title="outliers among the rows", xticks=[], yticks=[])
    region.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)

    digit, (normal, novel) = scores[min(4, len(scores) - 1)]
    bins = np.linspace(np.quantile(novel, 0.02), normal.max(), 40)
    for values, label in ((normal, "held-out normal digits"), (novel, f"novel: {digit}")):
        histogram.hist(np.clip(values, bins[0], None), bins, density=True, alpha=0.6, label=label)
    histogram.axvline(0, color="black", lw=0.8, ls="--")
    histogram.set(title="digits, one never seen", xlabel="decision function", yticks=[])
    histogram.legend(frameon=False, fontsize=8)

    lower.suptitle("the strangest digits", fontsize=10)
    for axis, image in zip(lower.subplots(1, 12), strange, strict=False):
        axis.imshow(image.reshape(8, 8), cmap="gray_r")
        axis.set(xticks=[], yticks=[])
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/outlier_detection.png"
