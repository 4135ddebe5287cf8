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
    parser.add_argument("--json", type=pathlib.Path, default=out, help="its sections are replaced")
    parser.add_argument("--tables", action="store_true", help="print the file, measure nothing")
    return parser


def run(args, sections, show):
    """Measures the sections asked for, each a function of args, writes and shows their results.

    show: prints the tables of results.
    """
    if args.tables:
        show(json.loads(args.json.read_text()))
        return
    pin_to_one_cpu()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.sections:
        begin = time.perf_counter()
        results[name] = sections[name](args) | {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "machine": machine(),
        }
        results[name]["took"] = round(time.perf_counter() - begin, 1)
        print(f"{name}: {results[name]['took']} s", file=sys.stderr, flush=True)
        write_json(args.json, results)
    show({name: results[name] for name in args.sections})
