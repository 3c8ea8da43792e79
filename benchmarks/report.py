"""Rows of run.py and peers.py as Markdown tables on the standard output, and as plots.

    python benchmarks/report.py benchmarks/results/*.json

Files of other benchmarks are passed over. Plots (PNG and SVG): strong scaling, weak scaling, time per atom against atoms.
"""

import argparse
import json
import sys
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

PLOTS = Path(__file__).parent / "results/plots"
SAME = ("model", "system", "atoms", "ranks")
"""What a peer's row and ours have in common where they are compared, beside the measurement."""
PEERS = {"forces": "evaluate"}
"""What peers.py calls our measurements, where it is something else."""
SERIES = ("model", "kernels", "system", "dtype", "compile", "wire", "strategy", "collective", "device", "measure")
"""What is the same along a line of a plot."""
MEASURES = {"evaluate": "energy and forces", "nvt": "NVT", "nve": "NVE"}
COLOURS = ["#1f4e79", "#b5532a", "#3f8f5b", "#7a4fa3", "#c79a1e", "#3f7cac", "#8c2d4b", "#5b5b5b"]
MARKERS = "osD^vP*X"


def read(paths):
    """Rows of all files, each once; peers' apart."""
    rows = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.get("rows", []) if isinstance(content, dict) else content
        known = [row for row in found if "peer" in row or row.get("measure") in (*MEASURES, "rebuild")]
        if not known:
            print(f"{path} has no rows of run.py or peers.py: passed over", file=sys.stderr)
        rows += [row for row in known if row not in rows]
    return [row for row in rows if "peer" not in row], [row for row in rows if "peer" in row]


def number(value, digits=3):
    """To so many digits, whole from a thousand on; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def table(heads, lines):
    """Markdown, numbers to the right."""
    rules = ["---"] + ["--:"] * (len(heads) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, rules, *lines])


def name(row):
    """What is computed, on what."""
    wire, strategy = row.get("wire"), " by ".join(filter(None, [row.get("strategy", "halo"), row.get("collective")]))
    parts = [row["model"], row["kernels"], row["dtype"], wire and f"wire {wire}", strategy if strategy != "halo" else None]
    return f"{row['system']}, {' '.join(part for part in parts if part)}"


def alone(row, rows):
    """The speed-up's one: the row of this series and size on the fewest ranks."""
    same = [r for r in whole(rows) if all(r.get(k) == row.get(k) for k in (*SERIES, "atoms", "weak"))]
    return min(same, key=lambda r: r["ranks"])


def whole(rows):
    """Those that were measured."""
    return [row for row in rows if "error" not in row]


def speed_up(row, rows):
    """How often faster than on the fewest ranks; for weak scaling there is no such row."""
    return "" if row.get("weak") else number(alone(row, rows)["ms_per_step"] / row["ms_per_step"])


def parity(row):
    """Differences in the order energy, forces or positions, and what they are from."""
    found = dict(row["parity"])
    against = found.pop("against")
    return against if against == "itself" else ", ".join(f"{value:.0e}" for value in found.values())


def comparable(peer, row):
    """Whether both are of the same measurement, model, system, atoms and ranks."""
    measure = PEERS.get(peer.get("measure"), peer.get("measure", "evaluate"))
    return measure == row["measure"] and all(peer.get(key) == row.get(key) for key in SAME)


def ratios(row, peers):
    """How often slower each peer is in the same measurement."""
    same = [peer for peer in whole(peers) if comparable(peer, row)]
    return "; ".join(f"{number(peer['ms_per_step'] / row['ms_per_step'])} ({peer_name(peer)})" for peer in same)


def peer_name(peer):
    """Whose, with which kernels, compiled how."""
    return " ".join(str(peer[key]) for key in ("peer", "kernels", "dtype", "compile") if peer.get(key))


def millions(n_bytes):
    """MB."""
    return number(None if n_bytes is None else n_bytes / 1e6)


def figure(key, *digits):
    """A column: a row's number."""
    return lambda row: number(row[key], *digits)


FIRST = {
    "system, model": name,
    "atoms": lambda r: f"{r['atoms']:,}",
    "ranks": lambda r: str(r["ranks"]),
    "compile": lambda r: r["compile"],
    "ms/step": figure("ms_per_step"),
}
SPEEDS = {
    "katom-step/s": figure("katom_steps_per_s"),
    "µs/atom/step": figure("us_per_atom_step"),
    "ns/day at 1 fs": figure("ns_per_day_1fs"),
    "peak, GiB": figure("peak_gib"),
    "MB sent": lambda r: millions(r["bytes"]),
    "messages": figure("messages"),
    "share of communication": figure("exchange_share", 2),
}
PARTS = {
    "between rebuilds, ms": figure("between_ms"),
    "bare, ms": figure("bare_ms"),
    "rebuild, ms": figure("rebuild_ms"),
    "rebuilds": lambda r: f"{r['rebuilds']} in {r['steps']}",
}
CUTS = {
    "cuts, ms": figure("cut_ms"),
    "migration, ms": figure("migrate_ms"),
    "lists and ghosts, ms": figure("lists_ms"),
    "first step, ms": figure("first_step_ms"),
    "ghosts": figure("ghosts"),
    "owned, most over mean": figure("imbalance", 4),
    "MB sent": SPEEDS["MB sent"],
    "messages": SPEEDS["messages"],
    "peak, GiB": SPEEDS["peak, GiB"],
}


def columns(measure, rows, peers):
    """Heads, and what stands under them."""
    speed = {"speed-up": lambda r: speed_up(r, rows)}
    if measure == "evaluate":
        beside = {"parity: energy, forces (eV/Å)": parity, "peer / this": lambda r: ratios(r, peers)}
        return FIRST | {"p95, ms": figure("p95_ms")} | speed | SPEEDS | beside
    if measure == "rebuild":
        return FIRST | CUTS | {"parity: energy, forces (eV/Å)": parity}
    drift = {"drift, eV/atom": lambda r: f"{r['drift_ev_per_atom']:.0e}"}
    beside = {"parity: positions (Å)": parity, "peer / this": lambda r: ratios(r, peers)}
    return FIRST | speed | PARTS | SPEEDS | beside | drift


def ours(measure, rows, peers):
    """The table of one kind of measurement; what failed is told below it."""
    some = [row for row in rows if row["measure"] == measure]
    shown = columns(measure, rows, peers)
    title = {"rebuild": "Rebuild"}.get(measure) or MEASURES[measure][0].upper() + MEASURES[measure][1:]
    lines = [[write(row) for write in shown.values()] for row in whole(some)]
    return "\n\n".join([f"## {title}", table(list(shown), lines), failures(some, name)]).rstrip()


def theirs(peers, rows):
    """Peers' speeds, and how far their results are from ours."""
    heads = ["peer", "system, model", "measure", "atoms", "ranks", "ms/step", "peak, GiB", "energy, relative", "largest force"]
    lines = [[*told(peer), *apart(peer, rows)] for peer in whole(peers)]
    return "\n\n".join(["## Peers", table(heads, lines), failures(peers, peer_name)])


def told(peer):
    """What a peer's row says."""
    numbers = [number(peer.get(key)) for key in ("ms_per_step", "peak_gib")]
    what = [peer_name(peer), f"{peer['system']}, {peer['model']}", peer.get("measure", "")]
    return [*what, f"{peer['atoms']:,}", str(peer["ranks"]), *numbers]


def apart(peer, rows):
    """The relative difference of the energy from ours, and that of the largest force (eV/Å)."""
    same = [row for row in whole(rows) if comparable(peer, row) and "energy" in row]
    if not same or peer.get("energy") is None or peer.get("max_force") is None:
        return ["", ""]
    energy, force = same[0]["energy"], same[0]["max_force"]
    return [f"{abs(peer['energy'] / energy - 1):.0e}", f"{abs(peer['max_force'] - force):.0e}"]


def failures(rows, naming):
    """A line for each row that failed."""
    failed = [row for row in rows if "error" in row]
    where = [f"{naming(r)}, {r['atoms']:,} atoms, {r['ranks']} ranks, {r['compile']}" for r in failed]
    return "\n".join(f"- {place}: {row['error']}" for place, row in zip(where, failed, strict=True))


def tables(rows, peers):
    """All of them."""
    kinds = [kind for kind in (*MEASURES, "rebuild") if any(row["measure"] == kind for row in rows)]
    return "\n\n".join([ours(kind, rows, peers) for kind in kinds] + ([theirs(peers, rows)] if peers else []))


def grouped(rows, keys):
    """Rows of the same values of `keys`, as lines of a plot; those of one point are none."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return groups.values()


def medians_by(rows, key):
    """One row for each value of `key`, in order: that of the median time, where it was measured again."""
    values = sorted({row[key] for row in rows})
    same = [sorted((r for r in rows if r[key] == value), key=lambda r: r["ms_per_step"]) for value in values]
    return [some[len(some) // 2] for some in same]


def lines_of(rows, keys, x):
    """The lines of a panel, each at two points or more."""
    lines = [medians_by(some, x) for some in grouped(rows, keys)]
    return [line for line in lines if len(line) > 1]


def label(row, *more):
    """What a line is called, without what its panel says."""
    wire = [f"wire {row['wire']}"] if row.get("wire") else []
    return ", ".join([f"{row['model']} {row['kernels']}", row["system"], row["compile"], *wire, *more])


def figure_of(rows, keys, x, draw, labels, path):
    """A figure with one panel for each kind of measurement that has lines; none where there are none."""
    kinds = {kind: lines_of([r for r in rows if r["measure"] == kind], keys, x) for kind in MEASURES}
    kinds = {kind: lines for kind, lines in kinds.items() if lines}
    if not kinds:
        return
    figure = Figure(figsize=(5.4 * len(kinds), 4.8), layout="constrained")
    for panel, (kind, lines) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds.items(), strict=True):
        panel.set(title=MEASURES[kind], xlabel=labels[0], ylabel=labels[1])
        panel.grid(alpha=0.3, linewidth=0.5)
        for line, colour, marker in zip(lines, cycle(COLOURS), cycle(MARKERS), strict=False):
            draw(panel, line, {"color": colour, "marker": marker, "markersize": 5})
        panel.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    for suffix, metadata in (("png", None), ("svg", {"Date": None})):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=150, metadata=metadata)


def strong(panel, line, style):
    """Time a step, and what it would be if ranks were all that it took."""
    ranks, times = [row["ranks"] for row in line], [row["ms_per_step"] for row in line]
    panel.set_xscale("log", base=2)
    logarithmic(panel, "y")
    panel.plot(ranks, times, label=label(line[0], f"{line[0]['atoms']:,} atoms"), **style)
    panel.plot(ranks, [times[0] * ranks[0] / n for n in ranks], "--", color=style["color"], linewidth=0.8)
    ticks_at(panel, ranks)


def weak(panel, line, style):
    """Atoms per rank and second, over that on the fewest ranks."""
    ranks, speeds = [row["ranks"] for row in line], [row["katom_steps_per_s"] / row["ranks"] for row in line]
    panel.set_xscale("log", base=2)
    panel.plot(
        ranks, [100 * speed / speeds[0] for speed in speeds], label=label(line[0], f"{line[0]['weak']:,} a rank"), **style
    )
    panel.axhline(100, color="black", linewidth=0.8, linestyle="--")
    panel.set_ylim(0, max(110, panel.get_ylim()[1]))
    ticks_at(panel, ranks)


def per_atom(panel, line, style):
    """Time an atom, which is even where the device is full."""
    logarithmic(panel, "xy")
    ranks = f"{line[0]['ranks']} rank{'s' * (line[0]['ranks'] > 1)}"
    panel.plot([r["atoms"] for r in line], [r["us_per_atom_step"] for r in line], label=label(line[0], ranks), **style)


def logarithmic(panel, axes):
    """Scales with plain numbers at 1, 2 and 5."""
    for name in axes:
        getattr(panel, f"set_{name}scale")("log")
        axis = getattr(panel, f"{name}axis")
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))  # as many as are legible
        axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def ticks_at(panel, ranks):
    """Numbers of ranks as they are, those of earlier lines kept."""
    ticks = sorted({*ranks, *(int(text.get_text()) for text in panel.get_xticklabels() if text.get_text().isdigit())})
    panel.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    panel.xaxis.set_minor_formatter(NullFormatter())


def plots(rows, folder):
    """The three figures."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "alchemi", "font.size": 9, "font.family": "sans-serif"})
    folder.mkdir(parents=True, exist_ok=True)
    rows = whole(rows)
    fixed, growing = [r for r in rows if not r.get("weak")], [r for r in rows if r.get("weak")]
    ms = ("ranks", "ms per step (dashed: ideal)")
    figure_of(fixed, (*SERIES, "atoms"), "ranks", strong, ms, folder / "strong")
    figure_of(
        growing,
        (*SERIES, "weak"),
        "ranks",
        weak,
        ("ranks", "atom-steps per second and rank, % of the fewest ranks'"),
        folder / "weak",
    )
    figure_of(fixed, (*SERIES, "ranks"), "atoms", per_atom, ("atoms", "µs per atom and step"), folder / "per_atom")


def main(words=None):
    """Read, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="the folder for them")
    options = parser.parse_args(words)
    rows, peers = read(options.results)
    print(tables(rows, peers).rstrip())
    plots(rows, options.plots)


if __name__ == "__main__":
    main()
