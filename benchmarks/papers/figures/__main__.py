"""The figures of the YOSO papers, made again with lshkit. docs/evidence.md shows and explains them.

    python -m benchmarks.papers.figures
    python -m benchmarks.papers.figures sphere error_with_length
    python -m benchmarks.papers.figures --quick --json /tmp/figures.json --pictures /tmp

Figures that need a trained model train small ones on the source text of Python's standard library
(a minute or two each) and keep them in build/byte_models. A run of some figures keeps what the file
has of the others.
"""

import importlib
import json
import pathlib
import time
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

import torch  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks import IMAGES, RESULTS, command_line, measurement, positive, write_json  # noqa: E402
from benchmarks.papers.figures import byte_model  # noqa: E402

NAMES = (
    "collision_probability",
    "sphere",
    "attention_matrices",
    "error_with_length",
    "hashes_at_inference",
)


@dataclass(frozen=True)
class Settings:
    quick: bool
    training: byte_model.Training
    models: pathlib.Path


def parse_arguments():
    parser = command_line(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(NAMES)}")
    add("--quick", action="store_true", help="tiny sizes: works, shows nothing")
    add("--threads", type=positive, default=1, help="CPU threads (1)")
    add("--json", type=pathlib.Path, default=RESULTS / "papers_figures.json")
    add("--pictures", type=pathlib.Path, default=IMAGES, help="folder of the .png")
    add("--models", type=pathlib.Path, default=byte_model.MODELS,
        help="folder of trained models, which are trained where they are missing")  # fmt: skip
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            parser.error(f"NAME must be one of {', '.join(NAMES)}, got {name}")
    return args


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    training = byte_model.QUICK if args.quick else byte_model.Training()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.pictures.mkdir(parents=True, exist_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    modules = {name: importlib.import_module(f"benchmarks.papers.figures.{name}") for name in NAMES}
    for name in args.names or NAMES:
        module = modules[name]
        begin = time.perf_counter()
        measured, arrays = module.measure(Settings(args.quick, training, args.models))
        measured = json.loads(json.dumps(measured))  # keys as they will be in the file
        path = args.pictures / f"figure_{name}.png"
        picture = module.draw(measured, arrays)
        picture.savefig(path, dpi=130)
        plt.close(picture)
        results[name] = measured | {
            "took": round(time.perf_counter() - begin, 1),
            "date": time.strftime("%Y-%m-%d"),
            "machine": measurement.machine(),
        }
        write_json(args.json, results)
        print(module.table(measured))
        print(f"written: {path}\n", flush=True)


if __name__ == "__main__":
    main()
