"""Rows a second into sketches on two Dask workers, against two threads of one process.

The same blocks of rows for both, parts of .npy files in the page cache; the smallest time of each,
in turns. What Dask adds is so much for each block: a block of four times the rows costs it as much.
"threads": two threads with a sketch each, merged in the end. "n_jobs=2": one sketch, block after
block. "Dask": `DaskKernelDensity.fit`, with the schedule, the tree of merges and the way of the
sketch to the client; the workers are running. Processor seconds are those of all processes, and
depend less on what else runs. Tables are compared bit for bit. Five minutes, 4.3 GB in a temporary
folder.

"plan" counts what `fit` sends: the tree of additions for as many blocks, of one row each, with the
bytes of every sketch that enters an addition. A sketch's size does not depend on its rows.
"""

import contextlib
import pathlib
import pickle
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster
from tqdm import tqdm

from benchmarks import RESULTS
from benchmarks.measurement import CPUS, figure, on_cpus, table
from benchmarks.sections import parser_of, run
from lshkit.distributed import DaskKernelDensity
from lshkit.distributed.dask.blocks import FAN_IN, mapped, row_blocks, tree
from lshkit.distributed.dask.sketches import merged, of_block
from lshkit.kde import LSHKernelDensity

OUT = RESULTS / "dask_sketches.json"
N_FEATURES, N_WORKERS = 64, 2
SKETCHES = {
    "angular, 8 bits": {"kernel": "angular", "n_bits": 8},
    "laplacian, 12 bits": {"kernel": "laplacian", "n_bits": 12, "bandwidth": 30.0},
}
COMMON = {"algorithm": "bucket_sum", "n_hashes": 32, "random_state": 0}


class Part(NamedTuple):
    """Rows [start, stop) of a file."""

    path: str
    start: int
    stop: int

    def load(self):
        return np.load(self.path, mmap_mode="r")[self.start : self.stop]


def block(parts, block_info):
    return parts[block_info[None]["chunk-location"][0]].load()


def in_threads(options, parts):
    """Each thread takes the next block when it is done with one."""
    left, sketches = iter(parts), []

    def work():
        sketch = LSHKernelDensity(**options)
        for part in left:  # of a list: one thread at a time has the next
            sketch.partial_fit(part.load())
        return sketch

    with ThreadPoolExecutor(N_WORKERS) as pool:
        sketches = [x.result() for x in [pool.submit(work) for _ in range(N_WORKERS)]]
    first, *others = (x for x in sketches if hasattr(x, "n_samples_seen_"))
    for sketch in others:
        first.merge(sketch)
    return first


def in_turn(options, parts):
    sketch = LSHKernelDensity(**options, n_jobs=N_WORKERS)
    for part in parts:
        sketch.partial_fit(part.load())
    return sketch


def on_dask(options, parts, client):
    X = da.map_blocks(
        block,
        parts,
        chunks=(tuple(part.stop - part.start for part in parts), (N_FEATURES,)),
        meta=np.empty((0, N_FEATURES), np.float32),
    )
    return DaskKernelDensity(**options, client=client).fit(X).to_local()


def processor_seconds(client):
    """Of this process, with the scheduler, and of the workers."""
    return time.process_time() + sum(client.run(time.process_time).values())


def sketches(n_files, n_rows, times, block_sizes, rounds):
    """Of n_files files of n_rows each, read `times` times, in blocks of each size."""
    on_cpus(CPUS)
    found = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rng, paths = np.random.default_rng(0), []
        for i in range(n_files):
            paths.append(str(pathlib.Path(folder) / f"{i}.npy"))
            np.save(paths[-1], rng.standard_normal((n_rows, N_FEATURES), np.float32))
        options = {"n_workers": N_WORKERS, "threads_per_worker": 1, "dashboard_address": ":0"}
        cluster = stack.enter_context(LocalCluster(processes=True, **options))
        client = stack.enter_context(Client(cluster, set_as_default=False))
        for size in block_sizes:
            starts = range(0, n_rows, size)
            parts = [Part(path, start, start + size) for path in paths for start in starts]
            parts *= times
            for name, own in SKETCHES.items():
                row = {"sketch": name, "block": size}
                found.append(row | measured(COMMON | own, parts, client, rounds))
    return {"rows": n_files * n_rows * times, "features": N_FEATURES, "sketches": found}


def measured(parameters, parts, client, rounds):
    """One kind of sketch in each way."""
    calls = {
        "threads": lambda: in_threads(parameters, parts),
        "n_jobs=2": lambda: in_turn(parameters, parts),
        "Dask": lambda: on_dask(parameters, parts, client),
    }
    best, cpu, tables = dict.fromkeys(calls, np.inf), dict.fromkeys(calls, np.inf), {}
    for _ in tqdm(range(rounds), desc=parameters["kernel"]):
        for way, call in calls.items():
            used, begin = processor_seconds(client), time.perf_counter()
            sketch = call()
            best[way] = min(best[way], time.perf_counter() - begin)
            cpu[way] = min(cpu[way], processor_seconds(client) - used)
            tables[way] = sketch._kde_sketch.table.table.tobytes()
    n, local = sum(x.stop - x.start for x in parts), min(best["threads"], best["n_jobs=2"])
    return {
        "rows_per_second": {way: n / seconds for way, seconds in best.items()},
        "processor_seconds": cpu,
        "equal_bits": len(set(tables.values())) == 1,
        "over_threads": local / best["Dask"],
        "bytes": sketch.extra_memory_,
    }


def plan(sizes):
    """Tasks and bytes of sketches in the tree of additions, for so many blocks."""
    rows = []
    for name, own in SKETCHES.items():
        parameters = DaskKernelDensity(**COMMON, **own).get_params()
        for n_blocks in sizes:
            added = []

            def add(parts, added=added):
                added.append([len(pickle.dumps(part)) for part in parts])
                return merged(parts)

            X = da.ones((n_blocks, N_FEATURES), chunks=(1, N_FEATURES), dtype=np.float32)
            root = tree(mapped(of_block, parameters, row_blocks(X)), add)
            root.compute(scheduler="synchronous")
            sizes_of = [x for parts in added for x in parts]
            row = {"sketch": name, "blocks": n_blocks, "additions": len(added)}
            row |= {"sketches": len(sizes_of), "bytes": sum(sizes_of), "largest": max(sizes_of)}
            rows.append(row)
    return {"fan_in": FAN_IN, "trees": rows}


SECTIONS = {
    "plan": lambda args: plan([8, 64] if args.quick else [8, 64, 256, 1000, 1024]),
    "sketches": lambda args: sketches(
        *((4, 20_000, 2, [10_000], 1) if args.quick else (16, 2**20, 2, [2**18, 2**19, 2**20], 3))
    ),
}


def show(results):
    if r := results.get("plan"):
        rows = [
            [x["sketch"], *(f"{x[k]:,}" for k in ("blocks", "additions", "sketches"))]
            + [f"{x['bytes'] / 1e6:,.1f}", f"{x['largest'] / 1e3:,.1f}"]
            for x in r["trees"]
        ]
        header = ["sketch", "blocks", "additions", "sketches sent", "MB", "KB of the largest"]
        print(table(f"The tree of additions, {r['fan_in']} at a time", header, rows))
    if r := results.get("sketches"):
        rows = [
            [
                found["sketch"],
                f"{found['block']:,}",
                *(figure(x / 1e6) for x in found["rows_per_second"].values()),
                f"{found['over_threads']:.2f}",
                *(figure(x) for x in found["processor_seconds"].values()),
                "yes" if found["equal_bits"] else "NO",
            ]
            for found in r["sketches"]
        ]
        title = f"{r['rows']:,} rows of {r['features']}: million rows/s"
        ways = "two threads", "n_jobs=2", "2 Dask workers"
        header = ["sketch", "rows of a block", *ways, "Dask / best"]
        header += [*(f"CPU s, {x}" for x in ways), "equal bits"]
        print(table(title, header, rows))


def main():
    run(parser_of(__doc__, SECTIONS, OUT).parse_args(), SECTIONS, show)


if __name__ == "__main__":
    main()
