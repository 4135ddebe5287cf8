"""Checks an installed lshkit in the environment it is run in: `python tools/check_wheel.py`.

NumPy alone, a fork, and scikit-learn's threads beside lshkit's; with torch, where it is installed,
that both share one OpenMP runtime whichever is imported first. Each check is a process of its own,
outside the checkout. What a check prints is a measurement; what fails is an assertion.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time


def runtimes():
    """The OpenMP runtimes in this process, by file."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"(/\S*lib(?:gomp|omp|iomp5)\b\S*)", maps)))


def n_threads():
    return len(os.listdir("/proc/self/task"))


def own_runtime():
    """The one runtime of lshkit and torch; scikit-learn's, which its wheel renames, is another."""
    own = [name for name in runtimes() if "scikit_learn.libs" not in name]
    assert len(own) == 1, own
    return own[0]


def codes(n=4096):
    import numpy as np

    from lshkit import FastHadamard

    x = np.random.default_rng(0).standard_normal((n, 64), np.float32)
    return FastHadamard(64, 8, 32, seed=0).hash(x)


def smallest_ms(call, n_calls=20):
    times = []
    for _ in range(n_calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


# ---- the checks ----
def numpy_alone():
    import numpy as np

    from lshkit import LSHKernelDensity, show_versions

    X = np.random.default_rng(0).standard_normal((2000, 16))
    density = LSHKernelDensity(bandwidth=1.0, random_state=0).fit(X).score_samples(X[:100])
    assert np.isfinite(density).all()
    assert "torch" not in sys.modules
    runtime = own_runtime()
    assert "lshkit.libs" in runtime, runtime
    show_versions()
    print("OpenMP runtimes:", *runtimes())


def fork():
    import numpy as np

    here = codes()
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(codes(), here) else 1)
    assert os.waitpid(child, 0)[1] == 0


def scikit_learn():
    """Two runtimes: their threads add up, and a call of one waits while the other's spin."""
    from sklearn.datasets import make_classification
    from sklearn.ensemble import HistGradientBoostingClassifier

    alone = smallest_ms(codes)
    n_own = n_threads()
    X, y = make_classification(2000, random_state=0)
    model = HistGradientBoostingClassifier(max_iter=3)
    model.fit(X, y)
    n_both = n_threads()
    assert n_both <= n_own + len(os.sched_getaffinity(0)), (n_own, n_both)

    def both():
        model.predict(X)
        codes()

    sklearn_alone = smallest_ms(lambda: model.predict(X))
    assert len(runtimes()) <= 2, runtimes()
    print(f"threads: {n_own}, with scikit-learn's {n_both}; runtimes:", *runtimes())
    print(f"ms: lshkit {alone:.2f}, scikit-learn {sklearn_alone:.2f}, in turns", end=" ")
    print(f"{smallest_ms(both):.2f}")


def _with_torch():
    import torch

    from lshkit.attention import yoso_attention

    x = torch.randn(1, 4, 2048, 64)
    threads = torch.get_num_threads()
    x.exp().sum()
    torch.randn(600, 600).exp()
    before = n_threads()
    out = yoso_attention(x, x, x, estimator="sampled", seed=0)
    assert n_threads() == before, "lshkit started threads of its own beside torch's"
    torch.set_num_threads(1)
    assert torch.equal(out, yoso_attention(x, x, x, estimator="sampled", seed=0))
    print(f"{threads} threads; {own_runtime()}")


def torch_before():
    import torch

    _with_torch()
    assert own_runtime().startswith(str(pathlib.Path(torch.__file__).parent))


def torch_after():
    import lshkit._C  # noqa: F401

    assert "lshkit.libs" in own_runtime()
    _with_torch()
    assert "lshkit.libs" in own_runtime()


def main():
    names = ["numpy_alone", "fork", "scikit_learn"]
    if importlib.util.find_spec("torch"):
        names += ["torch_before", "torch_after"]
    else:
        print("torch is not installed: not tested with it")
    with tempfile.TemporaryDirectory() as outside:
        for name in names:
            print(f"-- {name}", flush=True)
            script = [sys.executable, "-I", str(pathlib.Path(__file__).resolve()), name]
            subprocess.run(script, check=True, cwd=outside, timeout=300)


if __name__ == "__main__":
    globals()[sys.argv[1]]() if len(sys.argv) > 1 else main()
