"""How well attention continues text: a causal byte model, at equal steps and at equal time.

Losses in nats a byte on held-out source code: of all bytes, and of those whose last 8 bytes came
before, 64 bytes ago or more, which short convolutions cannot know. A run is of one length, budget,
method and seed; it is written to --json as soon as it is done, and one that is there is not made
again: stop and start at will, on a CPU also in several processes. Budgets: "steps", and "long",
more and larger ones, for a GPU; "short first", as "long" with texts of 256 bytes in the first half;
"seconds", 600 CPU seconds of one process, with texts of 256 bytes, 1,024 bytes and the length;
"look-ups, ...", with keys that start as the queries of the byte before.

    python -m benchmarks.quality.text --lengths 1024 --budgets steps --seeds 0
    python -m benchmarks.quality.text --device cuda --budgets steps long --at-once 12
    python -m benchmarks.quality.text --tables
"""

import argparse
import json
import os
import pathlib
import platform
import sysconfig
import time
import zlib
from collections.abc import Iterator

import torch

from benchmarks import IMAGES, RESULTS, command_line, positive
from benchmarks.measurement import machine
from benchmarks.quality.runs import Runs, add_names
from benchmarks.quality.text import report
from benchmarks.quality.text.at_once import Key, train
from benchmarks.quality.text.candidates import CANDIDATES
from benchmarks.quality.text.model import DIM, HEADS, LAYERS, METHODS
from benchmarks.quality.text.training import Setting, Text
from benchmarks.source_text import read_text

STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))
LEAST_TEXT = 2**20  # bytes to train with

SECONDS = Setting(1, 20_000, first=((256, 16, 1 / 2), (1024, 4, 5 / 6)), seconds=600)
LONG = 8192, 16384
LONGER = (256, 16, 1 / 2), (4096, 1, 5 / 6)
SETTINGS = {
    "steps": {
        512: Setting(4, 1200),
        1024: Setting(2, 1200),
        4096: Setting(1, 1200),
        16384: Setting(1, 600),
    },
    "long": {
        1024: Setting(4, 2400, 2**19),
        4096: Setting(1, 2400, 2**19),
    },
    "short first": {1024: Setting(4, 2400, 2**19, first=((256, 16, 1 / 2),))},
    "look-ups, steps": {4096: Setting(1, 1200, look_up=True)},
    "seconds": dict.fromkeys(LONG, SECONDS),
    "look-ups, seconds": dict.fromkeys(LONG, SECONDS._replace(look_up=True)),
    "look-ups, longer": dict.fromkeys(LONG, SECONDS._replace(look_up=True, first=LONGER)),
}
ORDER = {"budget": SETTINGS, "length": (), "method": [*METHODS, *CANDIDATES], "seed": ()}
LENGTHS = sorted({length for by_length in SETTINGS.values() for length in by_length})
QUICK_SECONDS = Setting(2, 99, 2048, first=((64, 2, 1 / 2), (128, 2, 5 / 6)), seconds=0.2)
QUICK = {
    "steps": {256: Setting(2, 3, 2048)},
    "long": {256: Setting(2, 5, 2048)},
    "short first": {256: Setting(2, 4, 2048, first=((64, 8, 1 / 2),))},
    "look-ups, steps": {256: Setting(2, 3, 2048, look_up=True)},
    "seconds": {256: QUICK_SECONDS},
    "look-ups, seconds": {256: QUICK_SECONDS._replace(look_up=True)},
    "look-ups, longer": {256: QUICK_SECONDS._replace(look_up=True)},
}


# --- Text -----------------------------------------------------------------------------------------


def text_of(folder: pathlib.Path, device: str) -> tuple[Text, dict]:
    """The bytes on the device, and what tells them from others."""
    training, held_out = read_text(folder)
    if len(training) < LEAST_TEXT:
        raise SystemExit(
            f"--text: {folder} has {len(training):,} bytes of .py files to train with, wanted "
            f"{LEAST_TEXT:,}: give the folder of a large package"
        )
    about = {
        "of": f"Python {platform.python_version()}" if folder == STDLIB else folder.name,
        "training_bytes": len(training),
        "held_out_bytes": len(held_out),
        "crc32": zlib.crc32(training.numpy().tobytes()),
    }
    return Text(training.to(device), held_out.to(device)), about


# --- Results --------------------------------------------------------------------------------------


def described(setting: Setting) -> dict:
    """What the runs of a length depend on, as it stands in the file."""
    later = "first", "seconds", "look_up"  # in no older file
    given = {name: x for name, x in setting._asdict().items() if name not in later or x}
    given = json.loads(json.dumps(given))
    return given | {"dim": DIM, "layers": LAYERS, "heads": HEADS}


def device_of(args: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if args.device == "cuda" else "CPU"


# --- Runs -----------------------------------------------------------------------------------------


def wanted(args: argparse.Namespace, settings: dict) -> list[Key]:
    if args.runs is not None:
        return [tuple(key) for key in json.loads(args.runs.read_text())]
    return [
        (length, budget, method, seed)
        for seed in args.seeds
        for budget in args.budgets
        for length in settings[budget]
        for method in args.methods
    ]


def named(key: Key) -> dict:
    return dict(zip(("length", "budget", "method", "seed"), key, strict=True))


def made_now(
    args: argparse.Namespace, settings: dict, text: Text, runs: Runs
) -> Iterator[tuple[Key, dict]]:
    missing = [key for key in wanted(args, settings) if not runs.has(**named(key))]
    graphs = args.device == "cuda" and not args.no_graphs

    def setting(key: Key) -> Setting:
        return settings[key[1]][key[0]]

    until = time.monotonic() + args.within
    return train(missing, setting, text, args.at_once, graphs, until)


# --- Command line ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", choices=LENGTHS, default=[1024, 4096, 16384])
    add("--budgets", nargs="+", choices=SETTINGS, help="steps; with --tables all")
    add_names(parser, "--methods", ORDER["method"], default=[*METHODS])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    help = "a JSON list of [length, budget, method, seed] instead, the most important ones first"
    add("--runs", type=pathlib.Path, help=help)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add(
        "--at-once", type=positive, default=1, metavar="N", help="runs of steps under way at a time"
    )
    add("--within", type=float, default=float("inf"), help="seconds after which runs are cut off")
    add("--no-graphs", action="store_true", help="no CUDA graphs: launch by launch")
    add("--text", type=pathlib.Path, default=STDLIB, help="a folder with .py files")
    add("--lr", type=float, help="another learning rate; the results need a --json of their own")
    add("--quick", action="store_true", help="a few steps at 256 bytes: a test, no result")
    add("--tables", action="store_true", help="report the file, train nothing")
    add("--json", type=pathlib.Path, help="text.json, of a GPU text_gpu.json")
    add("--picture", type=pathlib.Path, help="of a GPU text_gpu.png; else none")
    args = parser.parse_args()
    if args.budgets is None:
        args.budgets = [*SETTINGS] if args.tables else ["steps"]
    of_seconds = not args.tables and any(
        made.seconds for name in args.budgets for made in SETTINGS[name].values()
    )
    if of_seconds and (args.device != "cpu" or args.at_once > 1):
        parser.error("--budgets: seconds are those of a CPU and of one run, --at-once 1")
    if not (args.quick or args.tables or args.runs):
        for budget in args.budgets:
            if not set(args.lengths) & set(SETTINGS[budget]):
                parser.error(f"--lengths: {budget!r} has {', '.join(map(str, SETTINGS[budget]))}")
    if args.device == "cuda" and any("beyond 256" in method for method in args.methods):
        parser.error('--methods: those "beyond 256" run on a CPU alone')
    if (args.quick or args.lr is not None) and args.json is None:
        parser.error("--quick and --lr need a --json of their own")
    name = "text" if args.device == "cpu" else "text_gpu"
    args.json = args.json or RESULTS / f"{name}.json"
    if args.picture is None and args.device == "cuda":
        args.picture = IMAGES / f"{name}.png"
    return args


def main() -> None:
    args = parse_arguments()
    settings = QUICK if args.quick else SETTINGS
    if not args.quick and args.runs is None:
        settings = {
            budget: {n: made for n, made in settings[budget].items() if n in args.lengths}
            for budget in args.budgets
        }
    if args.lr is not None:
        settings = {
            budget: {n: made._replace(lr=args.lr) for n, made in by_length.items()}
            for budget, by_length in settings.items()
        }
    torch.set_num_threads(1)
    new = {"machine": machine(), "device": None, "text": None, "settings": {}}
    runs = Runs(args.json, ORDER, new)
    if not args.tables:
        text, about = text_of(args.text, args.device)
        about = {("text",): about, ("device",): device_of(args)}
        given = {
            ("settings", budget, str(length)): described(setting)
            for budget, by_length in settings.items()
            for length, setting in by_length.items()
        }
        runs.check(given | about)
        for key, result in made_now(args, settings, text, runs):
            run = named(key) | result
            run |= {"at_once": args.at_once, "date": time.strftime("%Y-%m-%d %H:%M")}
            run["load"] = round(os.getloadavg()[0], 1)
            run["cpu"] = machine()["cpu"]
            place = "settings", run["budget"], str(run["length"])
            runs.add(run, {place: given[place]} | about)
            losses = f"{run['loss']:.3f} and {run['repeated_loss']:.3f} nats"
            counts = f"{run['steps']} steps, {run['seconds']:.0f} s"
            print(f"{', '.join(map(str, key))}: {losses}, {counts}", flush=True)
    results = runs.load()
    if args.tables:
        shown = {name: x for name, x in results["settings"].items() if name in args.budgets}
        results["settings"] = shown
    print(report.tables(results))
    if args.picture is not None:
        report.draw(results, args.picture)
    print(f"written to {' and '.join(str(x) for x in (args.json, args.picture) if x)}")


if __name__ == "__main__":
    main()
