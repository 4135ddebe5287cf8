"""What modules import: no circles, and nothing heavy before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lshkit

PACKAGE = Path(lshkit.__file__).parent
MODULES = {
    ".".join(("lshkit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


def imports_of(name):
    """The modules of the package that a module names in its import statements, in functions too.

    Not those that only a type checker imports.
    """
    tree, found = ast.parse(MODULES[name].read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in MODULES or inner == "lshkit._C" else source)
    return {module for module in found if module in MODULES and module != name}


def circle_in(edges):
    """The modules of some circle, in turn; none without one."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for other in sorted(edges[module]):
            if circle := visit(other):
                return circle
        done.add(path.pop())
        return []

    for module in edges:
        if circle := visit(module):
            return circle
    return []


def test_no_import_circle():
    """Between modules, nor between the parts of the package that they belong to."""
    edges = {name: imports_of(name) for name in MODULES}
    assert len(edges["lshkit.buckets"]) >= 4 and "lshkit.torch_ops" in edges["lshkit.buckets.sum"]
    assert circle_in(edges) == []

    def part(module):
        return ".".join(module.split(".")[:2])

    parts = {part(name): set() for name in MODULES}
    for name, others in edges.items():
        parts[part(name)] |= {part(other) for other in others} - {part(name)}
    assert circle_in(parts) == []


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"e"}, "e": {"b"}}
    assert circle_in(edges) == ["b", "d", "e"]


def without(*packages):
    """A statement after which packages are as if they were not installed."""
    return (
        "from importlib.machinery import PathFinder; find = PathFinder.find_spec; "
        "PathFinder.find_spec = lambda name, *rest: "
        f"None if name.partition('.')[0] in {packages} else find(name, *rest)"
    )


WITHOUT_TORCH = without("torch")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_loads_neither_torch_nor_sklearn():
    heavy = "sorted({'torch', 'sklearn', 'scipy', 'transformers'} & set(sys.modules))"
    run = run_python(f"import sys, lshkit; print(dir(lshkit), {heavy})")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == f"{dir(lshkit)} []"
    call = "FastHadamard(7, 8, 5).hash([[1.0] * 7])"
    code = f"import sys; from lshkit import bucket_sum, FastHadamard; {call}; print({heavy})"
    run = run_python(f"{code}; import lshkit.kde; print('torch' in sys.modules)")
    assert run.stdout.split() == ["[]", "False"], run.stderr


def test_attention_loads_no_compiler():
    """TorchDynamo and sympy take a second, and are loaded by the first name in them."""
    pytest.importorskip("torch")
    call = "x = torch.randn(1, 1, 4, 8); yoso_attention(x, x, x, estimator='soft', seed=0)"
    loaded = "{'torch._dynamo', 'sympy', 'transformers'} & {*sys.modules}"
    code = f"import sys, torch; from lshkit.attention import *; {call}"
    run = run_python(f"{code}; import lshkit.attention.huggingface; print({loaded})")
    assert run.stdout == "set()\n", run.stderr


def test_main_names_are_those_of_their_modules():
    pytest.importorskip("torch")
    for name, module in lshkit._NAMES.items():
        assert getattr(lshkit, name) is getattr(sys.modules[f"lshkit.{module}"], name)
        assert name in dir(lshkit)
    with pytest.raises(AttributeError, match="no attribute 'yoso'"):
        lshkit.yoso  # noqa: B018


def test_hashing_shows_its_families_only():
    families = {"EuclideanLSH", "FastHadamard", "Hyperplane", "RandomBinning"}
    assert set(dir(lshkit.hashing)) == set(lshkit.hashing.__all__) == families | {"from_arrays"}


def test_missing_torch_says_how_to_install_it():
    statements = [
        "from lshkit import yoso_attention",
        "import lshkit.attention",
        "import lshkit; lshkit.torch_ops",
        "from lshkit.attention.huggingface import register",
        "from lshkit.sampling import SampledSoftmaxLoss",
    ]
    program = f"""
import sys
sys.modules["torch"] = None
for statement in {statements}:
    try:
        exec(statement, {{}})
    except ImportError as error:
        print(str(error).replace("\\n", " "))
"""
    messages = run_python(program).stdout.splitlines()
    assert len(messages) == len(statements)
    assert all("pip install 'torch>=2.11'" in message for message in messages)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("2.10.3+cpu", False), ("1.13", False), ("2.11", True), ("2.12a0+git1", True), ("git", True)],
)
def test_an_old_torch_is_refused_by_its_version(version, accepted):
    program = f"""
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__version__ = {version!r}
import lshkit._torch
"""
    run = run_python(program)
    assert (run.returncode == 0) is accepted
    assert accepted or f"needs PyTorch 2.11 or newer, got {version}" in run.stderr


@pytest.mark.parametrize("hidden", ["dask", "distributed"])
def test_missing_dask_says_how_to_install_it(hidden):
    statement = "from lshkit.distributed import DaskKernelDensity"
    run = run_python(f"import sys; sys.modules[{hidden!r}] = None; {statement}")
    assert run.returncode == 1
    message = run.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert "pip install 'dask[array,distributed]>=2025.1'" in message


def test_dask_and_torch_do_not_need_each_other():
    pytest.importorskip("dask")
    statement = "from lshkit.distributed import DaskKernelDensity, DaskLSHSampler"
    run = run_python(f"{WITHOUT_TORCH}; {statement}")
    assert run.returncode == 0, run.stderr
    loaded = "sorted({'torch', 'dask', 'distributed'} & set(sys.modules))"
    run = run_python(f"import sys, lshkit.distributed; print(dir(lshkit.distributed), {loaded})")
    assert run.stdout.strip().endswith(" []") and "DaskKernelDensity" in run.stdout, run.stderr


def test_without_torch_the_names_that_need_it_are_not_listed():
    statements = [
        "from lshkit import *; LSHKernelDensity, bucket_sum, LSHSampler",
        "from lshkit.sampling import *; LSHSampler",
        "import inspect, lshkit; assert 'hashing' in dict(inspect.getmembers(lshkit))",
        "import lshkit; assert 'YosoAttention' not in [*lshkit.__all__, *dir(lshkit)]",
        "import inspect, lshkit.sampling as s; inspect.getmembers(s)",
    ]
    run = run_python(f"{WITHOUT_TORCH}; [exec(x, {{}}) for x in {statements}]")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("hidden", "listed"),
    [
        (["dask", "distributed"], {"ContextParallel", "exchange_costs"}),
        (["torch"], {"DaskKernelDensity", "DaskLSHSampler", "exchange_costs"}),
        (["torch", "dask", "distributed"], {"exchange_costs"}),
    ],
)
def test_distributed_lists_the_names_whose_packages_are_installed(hidden, listed):
    for package in {"torch", "dask"} - set(hidden):
        pytest.importorskip(package)
    check = f"import lshkit.distributed as d; assert {{*d.__all__}} == {{*dir(d)}} == {listed}"
    run = run_python(f"{without(*hidden)}; from lshkit.distributed import *; {check}")
    assert run.returncode == 0, run.stderr


def test_with_torch_all_names_are_listed_and_torch_is_not_loaded():
    pytest.importorskip("torch")
    code = "import sys, lshkit, lshkit.sampling as s; dir(lshkit); print('torch' in sys.modules)"
    run = run_python(f"{code}; print({{*lshkit._NAMES}} == {{*lshkit.__all__}}, s.__all__[-1])")
    assert run.stdout.split() == ["False", "True", "SampledSoftmaxLoss"], run.stderr
