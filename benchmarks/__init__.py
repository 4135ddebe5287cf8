"""Run one from the root of the repository: `python -m benchmarks.speed.attention`."""

import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"
