"""Tables of what the GPU benchmark measured."""

GOALS = {4096: (1.5, 1.2), 16384: (6, 4), 65536: (24, 16)}  # forward, forward + backward
PASSES = "forward", "forward + backward"
HEADER = (
    "| n | | pass | codes | flash, ms | torch's pick, ms | lshkit, ms | ratio | wanted | flash, MB "
    "| lshkit, MB |\n|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def line(row):
    times, kind = row["median"], row["kind"]
    cells = [str(row["n"]), "causal" if row["causal"] else "", PASSES[row["backward"]], kind]
    cells += [f"{times[name]:.3f}" if name in times else "" for name in ("flash", "torch", kind)]
    cells.append(f"{row['ratio']:.2f}" if "ratio" in row else "")
    goal = GOALS.get(row["n"], ("", ""))[row["backward"]]
    if row["causal"] or goal == "" or (kind == "soft" and not row["backward"]):
        goal = ""
    cells.append(f"{goal / 2 if kind == 'soft' else goal:g}" if goal else "")
    peaks = [row["peak_bytes"].get(name) for name in ("flash", kind)]
    cells += [f"{x / 1e6:.0f}" if x else "" for x in peaks]
    return f"| {' | '.join(cells)} |"


def table(result):
    """The README's: a line a length and pass, hard codes beside soft ones."""
    cells = {}
    for row in result["rows"]:
        place = cells.setdefault((row["causal"], row["backward"], row["n"]), {})
        times = row["median"]
        place.update({k: v for k, v in times.items() if k != "flash" or k not in place})
        place[f"{row['kind']} ratio"] = row.get("ratio")
    columns = "flash", "torch", "hard", "hard ratio", "soft", "soft ratio"
    titles = "", "pass", "flash, ms", "torch's pick, ms", "lshkit, ms", "ratio"
    out = [f"| n | {' | '.join(titles)} | soft codes, ms | ratio |", "|---:|---|---|" + "---:|" * 6]
    for (causal, backward, n), place in sorted(cells.items()):
        shown = []
        for name in columns:
            number = place.get(name)
            shown.append(
                "" if number is None else f"{number:.1f}" if "ratio" in name else ms(number)
            )
        out.append(
            f"| {n} | {'causal' if causal else ''} | {PASSES[backward]} | {' | '.join(shown)} |"
        )
    settings = result["settings"]
    out.append("")
    out.append(
        f"{result['device']}, torch {result['torch']}, CUDA {result['cuda']}; bf16, batch "
        f"{settings['batch']}, {settings['heads']} heads, d {settings['d']}; "
        + "; ".join(f"{kind}: {describe(options)}" for kind, options in settings["codes"].items())
    )
    return "\n".join(out)


def ms(number):
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def describe(options):
    sizes = ("n_bits", "n_probes", "n_hashes")
    return ", ".join(f"{name} {options[name]}" for name in sizes if name in options)
