"""The command line of benchmarks whose sections are measured one at a time and kept in one file."""

import argparse
import datetime
import json
import pathlib
import sys
import time

from benchmarks import write_json
from benchmarks.measurement import machine, pin_to_one_cpu


def parser_of(doc, sections, out):
    """The options that all of them have; doc: of the script."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    where = f"its sections are replaced ({out.name}; with --quick none)"
    parser.add_argument("--json", type=pathlib.Path, help=where)
    parser.add_argument("--tables", action="store_true", help="print the file, measure nothing")
    parser.set_defaults(out=out)
    return parser


def run(args, sections, show):
    """Measures the sections asked for, each a function of args, writes and shows their results.

    show: prints the tables of results.
    """
    if args.tables:
        show(json.loads((args.json or args.out).read_text()))
        return
    path = args.json or (None if args.quick else args.out)
    pin_to_one_cpu()
    results = json.loads(path.read_text()) if path and path.exists() else {}
    for name in args.sections:
        begin = time.perf_counter()
        results[name] = sections[name](args) | {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "machine": machine(),
        }
        results[name]["took"] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {results[name]['took']} s", file=sys.stderr, flush=True)
        if path:
            write_json(path, results)
    show({name: results[name] for name in args.sections})
