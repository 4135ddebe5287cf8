"""Compiles lshkit for aarch64 (NEON) on another Linux and tests it under qemu.

    python tools/test_aarch64.py            # the C++ tests
    python tools/test_aarch64.py --python   # and pytest, without torch (Debian 12)

Needs cmake, ninja and Debian's packages g++-aarch64-linux-gnu and qemu-user; `--python` also
pybind11, and `dpkg --add-architecture arm64 && apt-get update`: Python and its libraries are
downloaded and unpacked into the build folder, nothing is installed.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CROSS = "aarch64-linux-gnu"
PROGRAMS = ("cmake", "ninja", f"{CROSS}-g++", "qemu-aarch64")
# Of Debian 12: Python 3.11 and what its modules are linked with.
DEBIAN = """python3.11 python3.11-minimal libpython3.11-stdlib libpython3.11-minimal
    libpython3.11-dev libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g libexpat1 libssl3 libffi8
    libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 libnsl2 libtirpc3""".split()
PYTHON_PACKAGES = ("numpy", "scikit-learn", "pytest", "hypothesis")
# A Python of aarch64 cannot start another: the kernel here does not run it.
TESTS = """buckets/test_bucket_table.py buckets/test_buckets.py buckets/test_fold.py
    buckets/test_hash_tables.py buckets/test_weighted_buckets.py hashing/test_binned_hashing.py
    hashing/test_hashing.py hashing/test_hash_families.py hashing/test_soft_hash.py
    kde/test_kde_exact.py properties/test_non_finite_rows.py""".split()


def missing():
    """Of the programs that this needs, those that are not on PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def run(*command, **options):
    subprocess.run([str(part) for part in command], check=True, **options)


def configure(build, *options):
    toolchain = ROOT / "tools" / "aarch64.cmake"
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "--toolchain", toolchain, *options)


def test_cpp(build, only=()):
    """Runs the C++ tests, or the named ones only."""
    configure(build, "-DLSHKIT_PYTHON=OFF", "-DLSHKIT_TESTS=ON")
    targets = ["--target", *(f"test_{name}" for name in only)] if only else []
    run("cmake", "--build", build, *targets, "--", "--quiet")
    which = ["-R", f"^({'|'.join(only)})(_base)?$"] if only else []
    run("ctest", "--test-dir", build, "--output-on-failure", "-j", os.cpu_count(), *which)


def fetch_python(folder):
    """Debian's Python for aarch64 in folder/root, packages in folder/site."""
    root, site, downloads = folder / "root", folder / "site", folder / "downloads"
    if site.is_dir():
        return root, site
    downloads.mkdir(parents=True, exist_ok=True)
    run("apt-get", "download", "-q", *(f"{name}:arm64" for name in DEBIAN), cwd=downloads)
    for package in downloads.glob("*.deb"):
        run("dpkg-deb", "-x", package, root)
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    where = ["--python-version=3.11", "--only-binary=:all:", f"--target={folder / 'unpacked'}"]
    run(sys.executable, "-m", "pip", "install", "-q", *platforms, *where, *PYTHON_PACKAGES)
    (folder / "unpacked").rename(site)
    return root, site


def test_python(build, tests):
    root, site = fetch_python(build)
    ask = [sys.executable, "-m", "pybind11", "--cmakedir"]
    pybind11 = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    configure(
        build / "extension",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={root}/usr/include/python3.11",
        f"-DPYTHON_MODULE_EXTENSION=.cpython-311-{CROSS}.so",
        f"-DCMAKE_CXX_FLAGS=-idirafter {root}/usr/include",
        f"-Dpybind11_DIR={pybind11}",
    )
    run("cmake", "--build", build / "extension", "--target", "_C", "--", "--quiet")
    package = build / "package" / "lshkit"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "lshkit", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (extension,) = (build / "extension").glob("_C.*.so")
    shutil.copy(extension, package)
    tests_folder = build / "package" / "tests"
    shutil.copytree(ROOT / "tests", tests_folder, dirs_exist_ok=True)
    paths = f"PYTHONPATH={package.parent}:{site}"
    emulated = ["qemu-aarch64", "-L", root, "-E", "PYTHONHOME=/usr", "-E", paths]
    python = [*emulated, f"{root}/usr/bin/python3.11"]
    run(*python, "-c", "import lshkit; lshkit.show_versions()", cwd=build)
    run(
        *python,
        *("-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", tests_folder),
        *("-p", "no:cacheprovider", "-o", f"pythonpath={tests_folder}"),
        *("-k", "not does_not_import_torch"),
        *(tests_folder / test for test in tests),
        cwd=build,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="store_true", help="run a part of pytest too")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="that part, below tests/")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "aarch64")
    options = parser.parse_args()
    if names := missing():
        sys.exit(f"not on PATH: {', '.join(names)} (see the packages above --help)")
    test_cpp(options.build.resolve() / "cpp")
    if options.python:
        test_python(options.build.resolve(), options.tests)


if __name__ == "__main__":
    main()
