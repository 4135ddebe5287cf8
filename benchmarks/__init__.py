"""Run one from the root of the repository: `python -m benchmarks.speed.attention`."""

import argparse
import json
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"
WIDTH = 100  # columns of a line of JSON


def _json(value, depth: int = 0, used: int = 0) -> str:
    line = json.dumps(value)
    if used + len(line) < WIDTH or not isinstance(value, (dict, list, tuple)) or not value:
        return line
    depth += 1
    items = value.values() if isinstance(value, dict) else value
    # Keys as json.dumps writes them: numbers and None as strings.
    heads = [json.dumps({x: 0})[1:-2] if isinstance(value, dict) else "" for x in value]
    lines, packs = [], False
    for head, x in zip(heads, items, strict=True):
        part = head + _json(x, depth, depth + len(head))
        packed, packs = packs, not isinstance(x, (dict, list, tuple))
        if packed and packs and len(lines[-1]) + len(part) + 2 < WIDTH:
            lines[-1] += f", {part}"
        else:
            lines.append(" " * depth + part)
    inside = ",\n".join(lines)
    return f"{line[0]}\n{inside}\n{' ' * (depth - 1)}{line[-1]}"


def write_json(path: pathlib.Path, results) -> None:
    """The results as JSON, few lines a row of them; in the place of the file, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(_json(results) + "\n")
    new.replace(path)


def pyplot():
    """matplotlib's, without windows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(figure, path: pathlib.Path, dpi: int = 110) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)


def command_line(doc: str) -> argparse.ArgumentParser:
    """That shows the text of a script as it stands."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=form)


def positive(text: str) -> int:
    """For argparse, which puts the function's name into its message."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"
