"""Compile the CUDA kernels for sm_80 and sm_90a and print what each takes: registers, spills.

    python cuda/check_compile.py [--nvcc NVCC]

No GPU is needed, only nvcc. Fails where a kernel spills registers or keeps an array in memory.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

CUDA = pathlib.Path(__file__).resolve().parent
ARCHITECTURES = "80", "90a"
# Of an entry function: its name, then the stack frame and the registers.
REPORT = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


def compile_report(nvcc, source, architecture, folder):
    command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", "--compiler-options", "-Wall"]
    command += ["-gencode", f"arch=compute_{architecture},code=sm_{architecture}"]
    command += [f"-I{CUDA / 'include'}", f"-I{CUDA.parent / 'cpp' / 'include'}"]
    command += ['-DLSHKIT_CUDA_ARCHITECTURES="none"', "-cubin", str(source)]
    command += ["-o", os.path.join(folder, f"{source.stem}_{architecture}.cubin")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    warnings = [line for line in done.stdout.splitlines() if "warning" in line]
    return REPORT.findall(done.stdout), warnings


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    parser.add_argument("--nvcc", default=default, help="default: %(default)s")
    arguments = parser.parse_args()
    if not os.path.exists(arguments.nvcc):
        raise SystemExit(f"no nvcc at {arguments.nvcc}")
    sources = sorted((CUDA / "src").glob("*.cu"))
    jobs = [(source, a) for source in sources for a in ARCHITECTURES]
    rows, warnings = {}, []
    with tempfile.TemporaryDirectory() as folder:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            reports = pool.map(lambda job: compile_report(arguments.nvcc, *job, folder), jobs)
            for found, said in reports:
                warnings += said
                for name, architecture, *numbers in found:
                    rows.setdefault(name, {})[architecture] = [int(n) for n in numbers]
    names = readable(list(rows))
    print(
        "| kernel | "
        + " | ".join(f"sm_{a}: registers | stack, spills" for a in ARCHITECTURES)
        + " |"
    )
    print("|---|" + "---:|---:|" * len(ARCHITECTURES))
    bad = []
    for name in sorted(rows, key=names.get):
        cells = []
        for architecture in ARCHITECTURES:
            stack, stores, loads, registers = rows[name][architecture]
            cells += [str(registers), f"{stack}, {stores + loads}"]
            if stack or stores or loads:
                bad.append(f"{names[name]} (sm_{architecture})")
        print(f"| {names[name]} | " + " | ".join(cells) + " |")
    for line in warnings:
        print(line)
    if bad or warnings:
        sys.exit("registers in memory, or warnings: " + ", ".join(bad))


if __name__ == "__main__":
    main()
