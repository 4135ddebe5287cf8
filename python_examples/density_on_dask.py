"""Densities on Dask
====================

A density of 50 million rows on a Dask cluster, in constant memory, with a worker killed in between.

Rows of 32 features are made block by block on the workers of a `LocalCluster`, so that only a few
blocks exist at any time. `DaskKernelDensity` turns each block into a sketch of 259 KB and adds the
sketches up in a tree. When a third of the blocks is done, one of the workers is killed. Dask starts
another and computes again what was lost: the sketch is bit for bit that of the same rows in other
blocks, of which none is lost. The picture shows the progress of the fit and the memory of the
workers, and the kernel means of new rows, of clusters that the data has and of one that it has not.
Needs matplotlib, tabulate and tqdm, and Dask.
"""

import argparse
import os
import pathlib
import signal
import threading
import time

try:
    import dask
    import dask.array as da
    import matplotlib
    import numpy as np
    from distributed import Client, LocalCluster
    from matplotlib import pyplot as plt
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"{error}: pip install '.[dev]' has what the examples need") from None

from lshkit.distributed import DaskKernelDensity

N_FEATURES, N_CLUSTERS = 32, 20
GROUP = 10_000  # rows that come from one seed: the rows do not depend on the blocks
TABLE = {"tablefmt": "github", "disable_numparse": True, "colglobalalign": "right"}
SKETCH = {"kernel": "angular", "algorithm": "bucket_sum", "n_bits": 10, "n_hashes": 32}
NO_ROWS = np.empty((0, N_FEATURES), np.float32)


def centres() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N_CLUSTERS, N_FEATURES)).astype(np.float32)


def group(index: int) -> np.ndarray:
    """GROUP rows around the centres."""
    rng = np.random.default_rng([1, index])
    rows = centres()[rng.integers(N_CLUSTERS, size=GROUP)]
    return rows + 0.5 * rng.standard_normal(rows.shape, np.float32)


def block(block_info: dict) -> np.ndarray:
    begin, end = block_info[None]["array-location"][0]
    return np.concatenate([group(i) for i in range(begin // GROUP, end // GROUP)])


def rows(count: int, size: int) -> da.Array:
    """Lazy rows `(count, N_FEATURES)` in blocks of about `size`."""
    sizes = np.diff([*range(0, count, size), count]).tolist()
    return da.map_blocks(block, chunks=(tuple(sizes), (N_FEATURES,)), meta=NO_ROWS)


class Watch(threading.Thread):
    """Blocks that are done and the memory of the workers, by time; kills a worker at a third."""

    def __init__(self, client: Client, n_blocks: int, bar: tqdm) -> None:
        super().__init__(daemon=True)
        self.client, self.n_blocks, self.bar, self.over = client, n_blocks, bar, threading.Event()
        self.seconds, self.done, self.memory, self.killed = [], [], [], None
        self.victim = next(iter(client.run(os.getpid).values()))
        self.begin = time.perf_counter()

    def run(self) -> None:
        while not self.seconds or not self.over.wait(0.1):  # once at least
            done, memory = self.client.run_on_scheduler(state)
            self.seconds.append(time.perf_counter() - self.begin)
            self.done.append(done)
            self.memory.append(memory / 2**20)
            self.bar.update(min(done, self.n_blocks) - self.bar.n)
            if self.killed is None and done >= self.n_blocks / 3:
                os.kill(self.victim, signal.SIGKILL)
                self.killed = self.seconds[-1]

    def stop(self) -> None:
        self.over.set()
        self.join()
        self.bar.update(self.n_blocks - self.bar.n)


def state(dask_scheduler) -> tuple[int, int]:
    """How many sketches of blocks have been made, and the bytes of the workers."""
    sketches = dask_scheduler.task_prefixes.get("of_block")
    memory = sum(x.metrics.get("memory", 0) for x in dask_scheduler.workers.values())
    return (sketches.state_counts["memory"] if sketches else 0), memory


def cluster(workers: int) -> LocalCluster:
    # A cluster gives a lost worker up if none is there again after 15 s: busy machines take longer.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "60s"})
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": "ERROR"}
    return LocalCluster(n_workers=workers, processes=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[1],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=50_000_000, help=f"a multiple of {GROUP:,}")
    add("--block-rows", type=int, default=250_000, help=f"rows of a block, a multiple of {GROUP:,}")
    add("--workers", type=int, default=2, help="processes of one thread")
    add("--quick", action="store_true", help="small sizes, to see it run")
    add("--out", type=pathlib.Path, default="density_on_dask.png", help="the picture")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(rows=300_000, block_rows=10_000)
        args = parser.parse_args()
    if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be a .png file in a folder that exists: {args.out}")
    for name in ("rows", "block_rows"):
        if (number := getattr(args, name)) < 1 or number % GROUP:
            parser.error(f"--{name.replace('_', '-')} must be a multiple of {GROUP:,}: {number}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1: {args.workers}")
    matplotlib.use("Agg")
    X = rows(args.rows, args.block_rows)
    with cluster(args.workers) as workers, Client(workers) as client:
        bar = tqdm(total=X.numblocks[0], desc="blocks")
        watch = Watch(client, X.numblocks[0], bar)
        watch.start()
        density = DaskKernelDensity(**SKETCH, random_state=0, client=client).fit(X)
        seconds = time.perf_counter() - watch.begin
        watch.stop()
        bar.close()
        like, unlike = (queries(i) for i in range(2))
        found = [density.kernel_mean(x, return_std=True) for x in (like, unlike)]
        found = client.gather(client.compute(found))
        other = DaskKernelDensity(**SKETCH, random_state=0, client=client)
        other.fit(rows(args.rows, 2 * args.block_rows))
    same = density.to_local().to_bytes() == other.to_local().to_bytes()
    size = 4 * N_FEATURES
    mb = args.rows * size / 1e6
    memory = f"{mb / 1000:,.1f} GB" if mb >= 1000 else f"{mb:.0f} MB"
    facts = {
        "rows": f"{args.rows:,} of {N_FEATURES} features, {memory}",
        "blocks": f"{X.numblocks[0]:,} of {args.block_rows:,} rows, "
        f"{args.block_rows * size / 2**20:,.0f} MB each",
        "seconds": f"{seconds:,.1f} on {args.workers} workers of one thread",
        "a worker killed": f"after {watch.killed:,.1f} s" if watch.killed else "no",
        "blocks made again": f"{max(0, watch.done[-1] - X.numblocks[0])}",
        "largest memory of all workers": f"{max(watch.memory):,.0f} MB",
        "sketch": f"{density.extra_memory_ // 1024:,} KB",
        "same bits in other blocks, none killed": str(same),
    }
    print(f"\n{tabulate(facts.items(), ['what', 'found'], colalign=['left'], **TABLE)}\n")
    names = "rows of the data's clusters", "rows of a new cluster"
    table = [
        (name, f"{np.median(mean):.2g}", f"{np.median(std / mean):.1%}")
        for name, (mean, std) in zip(names, found, strict=True)
    ]
    print(
        tabulate(
            table, ["queries", "median kernel mean", "stated error"], colalign=["left"], **TABLE
        )
    )
    draw(args.out, args.block_rows, watch, dict(zip(names, found, strict=True)))


def queries(new: int) -> da.Array:
    """Rows that are not in the data, of its clusters or of a new one; in blocks."""
    rng = np.random.default_rng([2, new])
    found = centres()[rng.integers(N_CLUSTERS, size=10_000)]
    if new:
        found = rng.normal(size=N_FEATURES).astype(np.float32)
    found = found + 0.5 * rng.standard_normal((10_000, N_FEATURES), np.float32)
    return da.from_array(found, chunks=(2500, -1))


def draw(path: pathlib.Path, size: int, watch: Watch, means: dict) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(watch.seconds, np.array(watch.done) * size / 1e6, label="rows made, those lost twice")
    left.set(xlabel="seconds", ylabel="million rows", title="One worker is killed")
    left.spines["top"].set_visible(False)
    memory = left.twinx()
    memory.plot(watch.seconds, watch.memory, color="tab:orange", label="memory of the workers")
    memory.set(ylabel="MB", ylim=(0, 1.5 * max(watch.memory)))
    memory.spines["top"].set_visible(False)
    if watch.killed:
        left.axvline(watch.killed, ymax=0.84, color="black", lw=0.8, ls=":")
        left.annotate("killed", (watch.killed, 0), (4, 4), textcoords="offset points", fontsize=9)
    lines = [*left.get_lines()[:1], *memory.get_lines()]
    left.legend(lines, [x.get_label() for x in lines], frameon=False, loc="upper left")
    values = np.concatenate([mean for mean, _ in means.values()])
    bins = np.geomspace(max(values.min(), 1e-9), values.max(), 60)
    for name, (mean, _) in means.items():
        right.hist(mean, bins, alpha=0.7, label=name)
    right.set(xscale="log", xlabel="kernel mean", ylabel="queries", title="Asked of the sketch")
    right.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        right.spines[side].set_visible(False)
    figure.savefig(path, dpi=120)
    print(f"\npicture: {path}")


if __name__ == "__main__":
    main()

# sphinx_gallery_thumbnail_path = "images/density_on_dask.png"
