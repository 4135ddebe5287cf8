"""Files of runs, each kept as soon as it is made and not made again, and what their tables need."""

import argparse
import contextlib
import copy
import fcntl
import json
import pathlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks import write_json

Places = dict[tuple[str, ...], object]  # {("settings", "512"): what results["settings"]["512"] is}


@dataclass
class Runs:
    """The runs in a JSON file, which other processes may be adding to as well."""

    path: pathlib.Path
    order: dict[str, Collection]  # see place_of; the names tell a run from all others
    new: dict  # what a file without runs has

    def load(self) -> dict:
        if self.path.exists():
            return json.loads(self.path.read_text())
        return copy.deepcopy(self.new) | {"runs": []}

    def has(self, **wanted) -> bool:
        return bool(find(self.load(), **wanted))

    def check(self, given: Places, results: dict | None = None) -> None:
        """Refuses a file whose runs have other settings: they stand in files of their own."""
        results = self.load() if results is None else results
        for place, value in given.items():
            found = results
            for name in place:
                found = found.get(name) if found else None
            if found not in (None, json.loads(json.dumps(value))):
                where = " / ".join(place)
                raise SystemExit(f"--json: the runs in {self.path} have other settings: {where}")

    @contextlib.contextmanager
    def updated(self) -> Iterator[dict]:
        """What is in the file, replaced in the end: by one process at a time, and whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = self.load()
            yield results
            write_json(self.path, results)

    def add(self, run: dict, given: Places, **others) -> None:
        """Puts the run and what it depends on into the file; others replace what it has of them."""
        with self.updated() as results:
            self.check(given, results)
            if find(results, **{name: run[name] for name in self.order}):
                return  # another process was as fast
            for (*outer, last), value in given.items():
                inner = results
                for name in outer:
                    inner = inner.setdefault(name, {})
                inner[last] = value
            results |= others
            results["runs"] = sorted([*results["runs"], run], key=self.place_of)

    def place_of(self, run: dict) -> tuple:
        """In the file: as the values are listed in `order`; then, unlisted ones, by themselves."""
        listed = {name: [*values, run[name]] for name, values in self.order.items()}
        return tuple((values.index(run[name]), run[name]) for name, values in listed.items())


def find(results: dict, **wanted) -> list[dict]:
    """The runs that have these values."""
    return [run for run in results["runs"] if wanted.items() <= run.items()]


# --- Command line ---------------------------------------------------------------------------------


def add_names(parser: argparse.ArgumentParser, option: str, known: Collection[str], **more) -> None:
    """Some of the names that are known; all of them by default."""
    options = {"default": [*known], "metavar": "NAME", "help": "; ".join(known)} | more
    parser.add_argument(option, nargs="+", choices=known, **options)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.quick and args.json == parser.get_default("json"):
        parser.error("--quick needs its own --json: its runs are no results")
    return args


# --- Tables, in Markdown --------------------------------------------------------------------------


def mean_and_spread(values: list[float], decimals: int) -> str:
    if not values:
        return ""
    mean, low, high = (f"{x:.{decimals}f}" for x in (np.mean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
