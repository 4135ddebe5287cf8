"""Rows a second into sketches on two Dask workers, against two threads of one process.

The same blocks of rows for both, .npy files in the page cache; the smallest time of each, in turns.
"threads": two threads with a sketch each, merged in the end. "n_jobs=2": one sketch, block after
block. "Dask": `DaskKernelDensity.fit`, with the schedule, the tree of merges and the way of the
sketch to the client; the workers are running. Processor seconds are those of all processes, and
depend less on what else runs. Tables are compared bit for bit. Three minutes, 4.3 GB in a temporary
folder.

"plan" counts what `fit` sends: the tree of additions for as many blocks, of one row each, with the
bytes of every sketch that enters an addition. A sketch's size does not depend on its rows.
"""

import contextlib
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy loads its BLAS
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pathlib  # noqa: E402
import pickle  # noqa: E402
import tempfile  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402

import dask.array as da  # noqa: E402
import numpy as np  # noqa: E402
from distributed import Client, LocalCluster  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks import RESULTS  # noqa: E402
from benchmarks.measurement import CPUS, figure, on_cpus, table  # noqa: E402
from benchmarks.sections import parser_of, run  # noqa: E402
from lshkit.distributed import DaskKernelDensity  # noqa: E402
from lshkit.distributed.dask.blocks import FAN_IN, mapped, row_blocks, tree  # noqa: E402
from lshkit.distributed.dask.sketches import merged, of_block  # noqa: E402
from lshkit.kde import LSHKernelDensity  # noqa: E402

OUT = RESULTS / "dask_sketches.json"
N_FEATURES, N_WORKERS = 64, 2
SKETCHES = {
    "angular, 8 bits": {"kernel": "angular", "n_bits": 8},
    "laplacian, 12 bits": {"kernel": "laplacian", "n_bits": 12, "bandwidth": 30.0},
}
COMMON = {"algorithm": "bucket_sum", "n_hashes": 32, "random_state": 0}


def load(path):
    return np.load(path, mmap_mode="r")


def block(paths, block_info):
    return load(paths[block_info[None]["chunk-location"][0]])


def in_threads(options, paths):
    """Each thread takes the next block when it is done with one."""
    left, sketches = iter(paths), []

    def work():
        sketch = LSHKernelDensity(**options)
        for path in left:  # of a list: one thread at a time has the next
            sketch.partial_fit(load(path))
        return sketch

    with ThreadPoolExecutor(N_WORKERS) as pool:
        sketches = [x.result() for x in [pool.submit(work) for _ in range(N_WORKERS)]]
    first, *others = (x for x in sketches if hasattr(x, "n_samples_seen_"))
    for sketch in others:
        first.merge(sketch)
    return first


def in_turn(options, paths):
    sketch = LSHKernelDensity(**options, n_jobs=N_WORKERS)
    for path in paths:
        sketch.partial_fit(load(path))
    return sketch


def on_dask(options, paths, client):
    rows = len(load(paths[0]))
    X = da.map_blocks(
        block,
        paths,
        chunks=((rows,) * len(paths), (N_FEATURES,)),
        meta=np.empty((0, N_FEATURES), np.float32),
    )
    return DaskKernelDensity(**options, client=client).fit(X).to_local()


def processor_seconds(client):
    """Of this process, with the scheduler, and of the workers."""
    return time.process_time() + sum(client.run(time.process_time).values())


def sketches(n_files, n_rows, times, rounds):
    """Of n_files blocks of n_rows each, read `times` times."""
    on_cpus(CPUS)
    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rng, paths = np.random.default_rng(0), []
        for i in range(n_files):
            paths.append(pathlib.Path(folder) / f"{i}.npy")
            np.save(paths[-1], rng.standard_normal((n_rows, N_FEATURES), np.float32))
        paths = [str(x) for x in paths] * times
        options = {"n_workers": N_WORKERS, "threads_per_worker": 1, "dashboard_address": ":0"}
        cluster = stack.enter_context(LocalCluster(processes=True, **options))
        client = stack.enter_context(Client(cluster, set_as_default=False))
        for name, own in SKETCHES.items():
            parameters = COMMON | own
            calls = {
                "threads": lambda p=parameters: in_threads(p, paths),
                "n_jobs=2": lambda p=parameters: in_turn(p, paths),
                "Dask": lambda p=parameters: on_dask(p, paths, client),
            }
            best, cpu, tables = dict.fromkeys(calls, np.inf), dict.fromkeys(calls, np.inf), {}
            for _ in tqdm(range(rounds), desc=name):
                for way, call in calls.items():
                    used, begin = processor_seconds(client), time.perf_counter()
                    sketch = call()
                    best[way] = min(best[way], time.perf_counter() - begin)
                    cpu[way] = min(cpu[way], processor_seconds(client) - used)
                    tables[way] = sketch._kde_sketch.table.table.tobytes()
            n, local = n_rows * len(paths), min(best["threads"], best["n_jobs=2"])
            found[name] = {
                "rows_per_second": {way: n / seconds for way, seconds in best.items()},
                "processor_seconds": cpu,
                "equal_bits": len(set(tables.values())) == 1,
                "over_threads": local / best["Dask"],
                "bytes": sketch.extra_memory_,
            }
    return {"rows": n, "block": n_rows, "features": N_FEATURES, "sketches": found}


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
            root = tree(mapped(of_block, parameters, row_blocks("X", X)), add)
            root.compute(scheduler="synchronous")
            sizes_of = [x for parts in added for x in parts]
            row = {"sketch": name, "blocks": n_blocks, "additions": len(added)}
            row |= {"sketches": len(sizes_of), "bytes": sum(sizes_of), "largest": max(sizes_of)}
            rows.append(row)
    return {"fan_in": FAN_IN, "trees": rows}


SECTIONS = {
    "plan": lambda args: plan([8, 64] if args.quick else [8, 64, 256, 1000, 1024]),
    "sketches": lambda args: sketches(*((4, 20_000, 2, 2) if args.quick else (64, 262_144, 2, 3))),
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
                name,
                *(figure(x / 1e6) for x in found["rows_per_second"].values()),
                f"{found['over_threads']:.2f}",
                *(figure(x) for x in found["processor_seconds"].values()),
                "yes" if found["equal_bits"] else "NO",
            ]
            for name, found in r["sketches"].items()
        ]
        title = f"{r['rows']:,} rows of {r['features']} in blocks of {r['block']:,}: million rows/s"
        ways = "two threads", "n_jobs=2", "2 Dask workers"
        header = ["sketch", *ways, "Dask / best", *(f"CPU s, {x}" for x in ways), "equal bits"]
        print(table(title, header, rows))


def main():
    run(parser_of(__doc__, SECTIONS, OUT).parse_args(), SECTIONS, show)


if __name__ == "__main__":
    main()
