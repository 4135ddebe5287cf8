"""Print what each CUDA kernel takes, registers and spills, from the output of a build.

    cmake -S . -B build/cuda -G Ninja -DLSHKIT_CUDA=ON \\
        "-DCMAKE_CUDA_ARCHITECTURES=80-real;90a-real" "-DCMAKE_CUDA_FLAGS=--threads=1 -Xptxas=-v"
    cmake --build build/cuda --target lshkit_cuda >build.log
    python cuda/check_compile.py build.log --record

No GPU is needed, only nvcc. Fails where a kernel spills registers or keeps an array in memory,
where the compiler warns and where the output names no kernel. --record notes in checked.json which
kernels and tests these were, once the tests have passed under sanitizers too. Without a log it
fails where they are others now: then CI checks them again.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUFFIXES = {".cu", ".cuh", ".hpp", ".cpp", ".py"}
RECORD = pathlib.Path(__file__).with_name("checked.json")

# Of an entry function: its name, then the stack frame and the registers.
REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


def readable(names):
    """Names of kernels with their template arguments, where the system has c++filt."""
    if shutil.which("c++filt") is None:
        return dict(zip(names, names, strict=True))
    lines = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = [
        line.replace("lshkit::cuda::", "").removeprefix("void ").split("(L")[0] for line in lines
    ]
    short = [re.sub(r"\((PairWeight|anonymous namespace)\)", "", name) for name in short]
    return dict(zip(names, (re.sub(r"\([A-Z]\w+(<\w+>)?\)$", "", s) for s in short), strict=True))


def files():
    """What the kernels, their bindings and their tests are compiled from, by their includes."""
    folders = [ROOT / name for name in ("cpp/include", "cuda/include", "cpp/tests", "cuda/tests")]
    found = {ROOT / "CMakeLists.txt", ROOT / "cuda/cuda.cmake", pathlib.Path(__file__).resolve()}

    def with_includes(file):
        yield file
        for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE):
            paths = ((folder / name).resolve() for folder in (file.parent, *folders))
            yield from itertools.islice((path for path in paths if path.is_file()), 1)

    todo = [x for x in (ROOT / "cuda").rglob("*") if x.suffix in SUFFIXES]
    for file in (ROOT / "cpp/bindings").glob("*.cpp"):
        if any(x.name == "cuda_call.hpp" or "cuda" in x.parts for x in with_includes(file)):
            todo.append(file)
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += with_includes(file)
    return sorted(found)


def sources():
    """Their digest, and the compiler's release where there is one."""
    digest = hashlib.sha256()
    for file in files():
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    found = {"sources": digest.hexdigest()}
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if nvcc:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
        found["nvcc"] = re.search(r"release ([\d.]+)", said.stdout)[1]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("log", nargs="?", type=pathlib.Path, help="what the build printed")
    add("--record", action="store_true", help="note that these were checked")
    options = parser.parse_args()
    if options.log is None:
        recorded = json.loads(RECORD.read_text())
        if any(recorded[name] != value for name, value in sources().items()):
            sys.exit("the CUDA kernels or their tests are not those that were checked last")
        print(f"{recorded['kernels']} CUDA kernels have been checked (nvcc {recorded['nvcc']})")
        return
    log = options.log.read_text()
    rows = {}
    for name, architecture, *numbers in REPORT.findall(log):
        row = rows.setdefault(name, {})  # several sources may have the kernel: the most of any
        numbers = [int(n) for n in numbers]
        row[architecture] = list(map(max, numbers, row.get(architecture, numbers)))
    if not rows:
        sys.exit("no kernel in the output: the flags are --threads=1 -Xptxas=-v, in a new folder")
    architectures = sorted({a for of_kernel in rows.values() for a in of_kernel})
    names = readable(list(rows))
    heads = [f"sm_{a}: registers | stack, spills" for a in architectures]
    print("| kernel | " + " | ".join(heads) + " |")
    print("|---|" + "---:|---:|" * len(architectures))
    bad = [line for line in log.splitlines() if "warning" in line]
    for name in sorted(rows, key=names.get):
        cells = []
        for architecture in architectures:
            stack, stores, loads, registers = rows[name][architecture]
            cells += [str(registers), f"{stack}, {stores + loads}"]
            if stack or stores or loads:
                bad.append(f"{names[name]} (sm_{architecture}): registers in memory")
        print(f"| {names[name]} | " + " | ".join(cells) + " |")
    if bad:
        sys.exit("\n".join(bad))
    if options.record:
        if architectures != ["80", "90a"]:
            sys.exit(
                f"--record wants a build for 80-real and 90a-real, the log is of {architectures}"
            )
        kernels = [file for file in files() if file.suffix in (".cu", ".cuh")]
        if any(file.stat().st_mtime > options.log.stat().st_mtime for file in kernels):
            sys.exit("--record: kernels are newer than the log")
        record = sources() | {"architectures": architectures, "kernels": len(rows)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
