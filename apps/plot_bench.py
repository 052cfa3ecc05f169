#!/usr/bin/env python3
"""Draws recorded figures of the GPU: a layer's time against seq_len beside the floor that the memory's bandwidth sets,
and each site's share of that limit. Reads what bench_peers.py or cf-layer --backend cuda wrote as JSON, and writes SVG
files beside it:
  plot_bench.py data/bench/h200.json   ->   data/bench/h200-layer.svg, data/bench/h200-sites.svg
  plot_bench.py data/bench/growth.json ->   data/bench/growth.svg, of a cf-layer --stack-layers
The floor is the layer's compulsory bytes at the best streaming read of the same run. Growth is a stack's time against
its layers and against seq_len, with the least-squares line. Needs matplotlib.
With --tables it prints what was recorded as Markdown tables instead, with growth's lines and how far the farthest
measurement is from each, and needs no matplotlib.
"""

import argparse
import json
import os
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden"))

import bench_peers
import console
import golden_file
import neox
from neox import Refusal

NAME = os.path.basename(__file__)


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {getattr(error, 'strerror', None) or 'expected JSON'}") from None


def read_report(path):
    """The rows of stacks, cf-layer's reports and the GPU's name of a recorded file."""
    report = read_json(path)
    programs = report.get("programs", [report]) if isinstance(report, dict) else []
    layers = [p for p in programs if p.get("program") == "cf-layer" and "gpu" in p]
    if not layers:
        raise Refusal(f"{path}: expected a file of bench_peers.py or of cf-layer --backend cuda")
    rows = report["results"]["stack"] if "results" in report else []
    if not rows:
        rows = [row for p in layers for row in bench_peers.layer_rows(p, p["model"])]
    return [row for row in rows if "median_us" in row], layers, layers[0]["gpu"]


def curves(rows):
    """{(preset, batch): {system: [(kv_len, time_us)]}}, with the floor as a system of its own."""
    found = {}
    for row in sorted(rows, key=bench_peers.work):
        systems = found.setdefault((row["preset"], row["batch"]), {})
        systems.setdefault(row["system"], []).append((row["kv_len"], row["median_us"]))
        if "read_best_gb_per_s" in row:
            floor = dict(systems.get("floor", [])) | {row["kv_len"]: row["bytes"] / row["read_best_gb_per_s"] * 1e-3}
            systems["floor"] = sorted(floor.items())
    return found


def shares(layers):
    """[(heading, [(site, percent of the limit)])], the longest seq_len of each model, batch and implementation."""
    longest = {}
    for report in layers:
        for c in report["configurations"]:
            key = report["model"], c["batch"], c["impl"]
            if c["sites"] and c["seq_len"] >= longest.get(key, c)["seq_len"]:
                longest[key] = c
    return [
        (
            f"{model}, batch {batch}, {impl}, seq_len {c['seq_len']}",
            [(t["site"], t["percent_of_read"]) for t in (*c["sites"], c["total"])],
        )
        for (model, batch, impl), c in sorted(longest.items())
    ]


def growths(report):
    """[(heading, unit, [(count, time_us)])]: a stack's time against its layers, at the least seq_len, and of the most
    layers against seq_len; each where there are three or more."""
    found = []
    times = {}
    for c in report["configurations"]:
        if "stack" in c:
            of_impl = times.setdefault((report["model"], c["batch"], c["impl"]), {})
            of_impl[c.get("step_layers", c["resident_layers"]), c["seq_len"]] = c["stack"]["median_us"]
    for (model, batch, impl), of_impl in times.items():
        most, shortest = max(layers for layers, _ in of_impl), min(seq_len for _, seq_len in of_impl)
        heading = f"{model}, batch {batch}, {impl}"
        by_layers = [(layers, time) for (layers, seq_len), time in sorted(of_impl.items()) if seq_len == shortest]
        by_seq_len = [(seq_len, time) for (layers, seq_len), time in sorted(of_impl.items()) if layers == most]
        found.append((f"{heading}, seq_len {shortest}", "layer", by_layers))
        found.append((f"{heading}, {most} layers", "cache entry", by_seq_len))
    return [growth for growth in found if len(growth[2]) >= 3]


def line_of(points):
    """The least-squares line through points: its slope, its intercept, and the largest distance of a point in y."""
    slope, intercept = statistics.linear_regression(*zip(*points))
    return slope, intercept, max(abs(y - intercept - slope * x) for x, y in points)


def line_text(unit, points):
    slope, intercept, farthest_us = line_of(points)
    return (
        f"{intercept:.1f} us + {slope:.4g} us a {unit}, largest residual {farthest_us:.1f} us "
        f"({100 * farthest_us / max(points)[1]:.2f} % of the longest)"
    )


def save(figure, path):
    with golden_file.atomic(path) as temporary:
        # No date: the same figures give the same file.
        figure.savefig(temporary, format="svg", metadata={"Date": None}, bbox_inches="tight")
    print(path)


def draw_layer(plt, found, gpu, path):
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 3.5), squeeze=False, layout="constrained")
    for ax, ((preset, batch), systems) in zip(axes[0], found.items()):
        for system, points in systems.items():
            style = {"color": "black", "linestyle": "--"} if system == "floor" else {"marker": "o"}
            ax.plot(*zip(*points), label=system, **style)
        ax.set(title=f"{preset}, batch {batch}", xlabel="seq_len", ylabel="time of a layer [us]", yscale="log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:.0f}")
        ax.legend(fontsize="small")
    figure.suptitle(gpu)
    save(figure, path)


def draw_sites(plt, found, gpu, path):
    figure, axes = plt.subplots(len(found), 1, figsize=(6, 3 * len(found)), squeeze=False, layout="constrained")
    for ax, (heading, sites) in zip(axes[:, 0], found):
        names, percents = zip(*reversed(sites))
        ax.bar_label(ax.barh(names, percents), fmt="%.0f", fontsize="small")
        ax.axvline(100, color="black", linestyle="--")
        ax.set(title=heading, xlabel="% of the streaming read")
    figure.suptitle(gpu)
    save(figure, path)


def draw_growth(plt, found, gpu, path):
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 3.5), squeeze=False, layout="constrained")
    for ax, (heading, unit, points) in zip(axes[0], found):
        slope, intercept, _ = line_of(points)
        ax.plot(*zip(*points), linestyle="", marker="o")
        ends = (0, max(points)[0])
        ax.plot(ends, [intercept + slope * x for x in ends], color="black", linestyle="--")
        ax.set(xlabel={"layer": "layers", "cache entry": "seq_len"}[unit], ylabel="time of a step [us]")
        ax.set_ylim(0, 1.1 * max(time_us for _, time_us in points))
        ax.set_title(f"{heading}\n{line_text(unit, points)}", fontsize="small")
    figure.suptitle(gpu)
    save(figure, path)


def of_floor(row):
    """The floor of one of our rows in percent of its time: bytes at the rate that limits them."""
    floor_us = row["floor_us"] if "floor_us" in row else row["bytes"] / row["read_best_gb_per_s"] * 1e-3
    return 100 * floor_us / row["median_us"]


def cell(row, what, ratio):
    """A row's time, of a stack all layers' in milliseconds, and its share of the floor or how many times ours it is."""
    if row is None:
        return ""
    if "median_us" not in row:
        return "-"
    layers = neox.PRESETS[row["preset"]].num_hidden_layers
    time = f"{row['median_us'] * layers * 1e-3:.3f}" if what == "stack" else f"{row['median_us']:.2f}"
    if row["system"].startswith("cf-"):
        return f"{time} ({of_floor(row):.0f} %)"
    return time + (f" ({ratio:.2f}x)" if ratio else "")


def stack_table(report):
    """The lines of a table of cf-layer's ways to run a stack: all layers in milliseconds, and the share of the read."""
    rows = bench_peers.layer_rows(report, report["model"])
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [f"{report['gpu']}, commit {report['commit']}: `{report['command']}`", ""]
    lines.append(f"| {report['model']} [ms] | batch | kv_len | " + " | ".join(systems) + " |")
    lines.append("|---|---:|---:|" + "---:|" * len(systems))
    for key in sorted({bench_peers.work(row) for row in rows}):
        found = {row["system"]: row for row in rows if bench_peers.work(row) == key}
        cells = [cell(found.get(system), "stack", None) for system in systems]
        lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    for heading, unit, points in growths(report):
        lines += ["", f"{heading}: {line_text(unit, points)}"]
    return lines


def tables(path):
    """The lines of a table for each thing that a file of bench_peers.py has times of, or cf-layer's stacks."""
    report = read_json(path)
    if isinstance(report, dict) and report.get("program") == "cf-layer" and "gpu" in report:
        return stack_table(report)
    if not (isinstance(report, dict) and "results" in report):
        raise Refusal(f"{path}: expected a file of bench_peers.py or of cf-layer --backend cuda")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['gpu']}, {versions}, commit {report['commit']}: `{report['command']}`"]
    for what, rows in report["results"].items():
        rows = [row for row in rows if row["batch"]]
        if not rows:
            continue
        systems = list(dict.fromkeys(row["system"] for row in rows))
        ratio = {(*bench_peers.work(r), r["peer"]): r["ratio"] for r in report["ratios"][what]}
        by_work = {}
        for row in rows:
            by_work.setdefault(bench_peers.work(row), {})[row["system"]] = row
        unit, count = "ms" if what == "stack" else "us", "tokens" if what in bench_peers.NORM_PEERS else "batch"
        lines += ["", f"| {what} [{unit}] | {count} | kv_len | " + " | ".join(systems) + " |"]
        lines.append("|---|---:|---:|" + "---:|" * len(systems))
        for key, found in sorted(by_work.items()):
            cells = [cell(found.get(system), what, ratio.get((*key, system))) for system in systems]
            lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    return lines


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="print Markdown tables; draw nothing")
    parser.add_argument("json", nargs="+", metavar="FILE", help="what bench_peers.py or cf-layer wrote")
    try:
        args = parser.parse_args(argv)
        if args.tables:
            print("\n\n".join("\n".join(tables(path)) for path in args.json))
            return 0
        reports = [read_report(path) for path in args.json]
        import matplotlib
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; matplotlib is needed", file=sys.stderr)
        return 2

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = NAME
    import matplotlib.pyplot as plt

    for path, (rows, layers, gpu) in zip(args.json, reports):
        stem = os.path.splitext(path)[0]
        partial = any(
            c.get("step_layers", c.get("resident_layers")) != c.get("resident_layers")
            for c in layers[0]["configurations"]
        )
        if partial and (found := growths(layers[0])):
            draw_growth(plt, found, gpu, f"{stem}.svg")
            continue
        draw_layer(plt, curves(rows), gpu, f"{stem}-layer.svg")
        if found := shares(layers):
            draw_sites(plt, found, gpu, f"{stem}-sites.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
