#!/usr/bin/env python3
"""Draws recorded figures of the GPU: a layer's time against kv_len beside the roofline of the memory's bandwidth, and
each site's percentage of it. Reads what bench_peers.py or cf-layer --backend cuda wrote as JSON, and writes SVG files
beside it:
  plot_bench.py data/bench/pythia-2.8b.json  ->  data/bench/pythia-2.8b-layer.svg, data/bench/pythia-2.8b-sites.svg
  plot_bench.py --hero data/bench/hero.svg data/bench/model-peers-pythia-2.8b.json   ->   a bar for each system that
                                       makes whole tokens
  plot_bench.py data/bench/growth.json ->   data/bench/growth.svg, of a report by cf-layer --first-layers
  plot_bench.py data/bench/python.json ->   data/bench/python.svg, a token's time from Python, of bench_python.py
The floor is the layer's compulsory bytes at the best streaming read of the same run. Growth is a stack's time against
its layers and against kv_len, with the least-squares line. Needs matplotlib.
With --tables it prints what was recorded as Markdown tables instead, with growth's lines and how far the farthest
measurement is from each, and needs no matplotlib.
"""

import json
import os
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import bench_python
import golden_file
import model_config
from console import Refusal
from peers import model_peers, programs, table, torch_norm


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {getattr(error, 'strerror', None) or 'expected JSON'}") from None


def is_of_python(report):
    return isinstance(report, dict) and report.get("program") == bench_python.NAME


def is_of_models(report):
    return isinstance(report, dict) and "model" in report.get("results", {})


def of_today(row):
    """A row under its system's name of today: earlier files name two ways to step a model otherwise."""
    names = {"cf-layer stack": "cf-layer persistent", "cf-layer fused": "cf-layer layer"}
    return row | {"system": names.get(row["system"], row["system"])}


def read_report(path):
    """The rows of stacks, cf-layer's reports and the GPU's name of a recorded file."""
    report = read_json(path)
    reports = report.get("programs", [report]) if isinstance(report, dict) else []
    layers = [p for p in reports if p.get("program") == "cf-layer" and "gpu" in p]
    if not layers:
        raise Refusal(f"{path}: expected a file of bench_peers.py or of cf-layer --backend cuda")
    rows = report["results"]["stack"] if "results" in report else []
    if not rows:
        rows = [row for p in layers for row in programs.layer_rows(p, p["model"])]
    return [of_today(row) for row in rows if "median_us" in row], layers, layers[0]["gpu"]


def curves(rows):
    """{(preset, batch): {system: [(kv_len, time_us)]}}, with the floor as a system of its own."""
    found = {}
    for row in sorted(rows, key=table.work):
        systems = found.setdefault((row["preset"], row["batch"]), {})
        systems.setdefault(row["system"], []).append((row["kv_len"], row["median_us"]))
        if "read_best_gb_per_s" in row:
            floor = dict(systems.get("floor", [])) | {row["kv_len"]: row["bytes"] / row["read_best_gb_per_s"] * 1e-3}
            systems["floor"] = sorted(floor.items())
    return found


def shares(layers):
    """[(heading, [(site, percent of the roofline)])] at the longest kv_len of each model, batch and implementation."""
    longest = {}
    for report in layers:
        for c in report["configurations"]:
            key = report["model"], c["batch"], programs.impl_of(c)
            if c["sites"] and programs.kv_len_of(c) >= programs.kv_len_of(longest.get(key, c)):
                longest[key] = c
    return [
        (
            f"{model}, batch {batch}, {impl}, kv_len {programs.kv_len_of(c)}",
            [(t["site"] + cause(t["percent_of_read"], t), t["percent_of_read"]) for t in (*c["sites"], c["total"])],
        )
        for (model, batch, impl), c in sorted(longest.items())
    ]


def growths(report):
    """[(heading, unit, [(count, time_us)])]: a stack's time against its number of layers, at the least kv_len, and the
    time of the most layers against kv_len; each where there are three points or more."""
    found = []
    times = {}
    for c in report["configurations"]:
        if step := programs.step_of(c):
            of_impl = times.setdefault((report["model"], c["batch"], programs.impl_of(c)), {})
            of_impl[c.get("step_layers", c["resident_layers"]), programs.kv_len_of(c)] = step["median_us"]
    for (model, batch, impl), of_impl in times.items():
        most, shortest = max(layers for layers, _ in of_impl), min(kv_len for _, kv_len in of_impl)
        heading = f"{model}, batch {batch}, {impl}"
        by_layers = [(layers, time) for (layers, kv_len), time in sorted(of_impl.items()) if kv_len == shortest]
        by_kv_len = [(kv_len, time) for (layers, kv_len), time in sorted(of_impl.items()) if layers == most]
        found.append((f"{heading}, kv_len {shortest}", "layer", by_layers))
        found.append((f"{heading}, {most} layers", "cache entry", by_kv_len))
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


# Each system's colour, the same in every panel and picture; others take what is left.
COLOURS = {
    "cf-layer persistent": "tab:blue",
    "cf-layer layer": "tab:cyan",
    "cf-layer split": "tab:olive",
    "cf-layer graph": "tab:green",
    "cf-layer unfused": "tab:gray",
    "torch_graph": "tab:orange",
    "torch_ops": "tab:brown",
    "hf_compile": "tab:red",
    "hf_eager": "tab:purple",
    "hf_generate": "tab:purple",
    "speed_up": "tab:blue",
    "cf-model persistent": "tab:gray",
    "cf-model graph": "tab:green",
    "floor": "black",
}


def colour(system):
    return COLOURS.get(system, "tab:pink")


def caption(reports, gpu):
    """What stands above a picture: the GPU, the dtype and the commit of its figures."""
    found = {key: sorted({str(r[key]) for r in reports if r.get(key)}) for key in ("activation_dtype", "commit")}
    dtypes, commits = ", ".join(found["activation_dtype"]), ", ".join(c[:12] for c in found["commit"])
    return ", ".join(part for part in (gpu, dtypes, f"commit {commits}" if commits else "") if part)


def add_legend(figure, axes):
    """One legend for all panels, outside of them."""
    handles = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")


def save(figure, path):
    with golden_file.atomic(path) as temporary:
        # No date: the same figures give the same file.
        figure.savefig(temporary, format="svg", metadata={"Date": None}, bbox_inches="tight")
    print(path)


def draw_layer(plt, found, about, path):
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found) + 2, 3.5), squeeze=False, layout="constrained")
    for ax, ((preset, batch), systems) in zip(axes[0], found.items()):
        for system, points in systems.items():
            style = {"linestyle": "--"} if system == "floor" else {"marker": "o"}
            ax.plot(*zip(*points), label=system, color=colour(system), **style)
        ax.set(title=f"{preset}, batch {batch}", xlabel="kv_len", ylabel="time of a layer [us]", yscale="log")
        ax.set_xticks(sorted({kv_len for points in systems.values() for kv_len, _ in points}))
        ax.tick_params("x", labelrotation=45)
        # 1, 2 and 5 of each decade, in plain numbers.
        ax.yaxis.set_major_locator(plt.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(plt.matplotlib.ticker.NullLocator())
        ax.yaxis.set_major_formatter("{x:.0f}")
    add_legend(figure, axes[0])
    figure.suptitle(about)
    save(figure, path)


def draw_sites(plt, found, about, path):
    figure, axes = plt.subplots(len(found), 1, figsize=(7, 3 * len(found)), squeeze=False, layout="constrained")
    for ax, (heading, sites) in zip(axes[:, 0], found):
        names, percents = zip(*reversed(sites))
        ax.bar_label(ax.barh(names, percents, color=colour("cf-layer graph")), fmt="%.0f", fontsize="small")
        ax.axvline(100, color="black", linestyle="--")
        ax.set(title=heading, xlabel="% of the streaming read; above 100: what the L2 keeps between kernels")
    figure.suptitle(about)
    save(figure, path)


def draw_growth(plt, found, about, path):
    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 3.5), squeeze=False, layout="constrained")
    for ax, (heading, unit, points) in zip(axes[0], found):
        slope, intercept, _ = line_of(points)
        ax.plot(*zip(*points), linestyle="", marker="o", color=colour("cf-layer persistent"))
        ends = (0, max(points)[0])
        ax.plot(ends, [intercept + slope * x for x in ends], color="black", linestyle="--")
        ax.set(xlabel={"layer": "layers", "cache entry": "kv_len"}[unit], ylabel="time of a step [us]")
        ax.set_ylim(0, 1.1 * max(time_us for _, time_us in points))
        ax.set_title(f"{heading}\n{line_text(unit, points)}", fontsize="small")
    figure.suptitle(about)
    save(figure, path)


# What a system is called in the first picture.
NAMES = {
    "ours": "cf-ops",
    "torch_graph": "torch in a CUDA graph",
    "hf_static_compile": "transformers, torch.compile",
    "hf_generate": "transformers, generate()",
}


def hero_bars(rows):
    """[(name, ms a token, words behind its bar)] of a whole token by each system, the slowest first; and the end of the
    axis. A bar that would dwarf the others is cut there."""
    ours = rows["ours"]["tpot_ms"]
    bars = [
        (NAMES[system], row["tpot_ms"], f"{row['tpot_ms']:.2f} ms, {row['tpot_ms'] / ours:.1f}x")
        for system, row in rows.items()
        if system in NAMES
    ]
    bars[-1] = *bars[-1][:2], f"{ours:.2f} ms"
    longest, *rest = (time for _, time, _ in bars)
    return bars, 1.5 * max(rest) if rest and longest > 2 * max(rest) else 1.25 * longest


def draw_hero(plt, report, path):
    """A bar a system: a whole token's time, with the time of its bytes as a line."""
    rows = model_peers.shown_token(report)
    bars, end = hero_bars(rows)
    ours = rows["ours"]
    limit = ours["tpot_ms"] * ours["decode_percent_of_read"] / 100
    figure, ax = plt.subplots(figsize=(8, 0.5 * len(bars) + 1.2), layout="constrained")
    for at, (name, time, words) in enumerate(bars):
        shown = min(time, 0.8 * end)
        mine = name == NAMES["ours"]
        ax.barh(name, shown, color="tab:blue" if mine else "tab:gray")
        ax.text(shown + 0.01 * end, at, words, va="center", fontweight="bold" if mine else "normal")
        for cut in (0.72, 0.74) if time > end else ():
            ax.plot([cut * end, (cut + 0.02) * end], [at - 0.45, at + 0.45], color="white", linewidth=3)
    ax.axvline(limit, color="black", linestyle="--")
    words = f"{ours['preset'].title()} on an {report['gpu']}: {ours['tpot_ms']:.2f} ms a token, of which"
    ax.set_title(f"{words} the memory needs {limit:.2f} ms (dashed)", loc="left", x=0, fontsize="medium")
    ax.set(xlim=(0, end), xlabel=f"ms a token behind a prompt of {ours['prompt_len']} ids, {report['dtype']}")
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 0.7 * end])
    ax.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def token_times(report):
    """[(heading, [(system, ms a token)])] of bench_python.py's whole models: the slowest system first."""
    found = {}
    for row in report["results"]["model"]:
        if "tpot_ms" in row:
            found.setdefault(model_peers.work(row), []).append((row["system"], row["tpot_ms"]))
    return [
        (
            f"{preset}, {slots} prompt{'s' if slots > 1 else ''} of {prompt_len}, {new_tokens} new tokens",
            sorted(systems, key=lambda system: -system[1]),
        )
        for (preset, slots, prompt_len, new_tokens), systems in found.items()
    ]


def draw_token_times(plt, found, about, path):
    """A panel for each work, with a bar a system."""
    bars = max(len(systems) for _, systems in found)
    figure, axes = plt.subplots(
        len(found), 1, figsize=(8, (0.45 * bars + 0.9) * len(found)), squeeze=False, layout="constrained"
    )
    for ax, (heading, systems) in zip(axes[:, 0], found):
        names, times = zip(*systems)
        ax.bar_label(ax.barh(names, times, color=[colour(name) for name in names]), fmt=" %.2f ms", fontsize="small")
        ax.set(title=heading, xlim=(0, 1.15 * max(times)))
    axes[-1, 0].set_xlabel("time of one token of each prompt [ms]")
    figure.suptitle(about, fontsize="small")
    save(figure, path)


def of_floor(row):
    """The roofline's time in percent of a row's time."""
    floor_us = row["floor_us"] if "floor_us" in row else row["bytes"] / row["read_best_gb_per_s"] * 1e-3
    return 100 * floor_us / row["median_us"]


def cause(percent, timing):
    """Why a share is above 100 %, as text behind it; nothing for any other share, and where no cause was recorded."""
    return ": " + timing["limit_note"] if percent > 100 and "limit_note" in timing else ""


def cell(row, what, ratio):
    """A row's time, its share of the floor or its factor over ours, and its kernel's lines of code where they are
    counted. A stack's time is all layers', in ms."""
    if row is None:
        return ""
    if "median_us" not in row:
        return "-"
    layers = model_config.PRESETS[row["preset"]].num_hidden_layers
    time = f"{row['median_us'] * layers * 1e-3:.3f}" if what == "stack" else f"{row['median_us']:.2f}"
    lines = f", {row['code_lines']} lines" if "code_lines" in row else ""
    if row["system"].startswith("cf-"):
        percent = of_floor(row)
        if percent > 100 and "limit_note" not in row:
            # An early run, which measured the memory's speed too low.
            return f"{time} (no share){lines}"
        return f"{time} ({percent:.0f} %{cause(percent, row)}){lines}"
    return time + (f" ({ratio:.2f}x)" if ratio else "") + lines


def stack_table(report):
    """The lines of a table of cf-layer's ways to run a stack: all layers in milliseconds, and the share of the read."""
    rows = programs.layer_rows(report, report["model"])
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [f"{report['gpu']}, commit {report['commit']}: `{report['command']}`", ""]
    lines.append(f"| {report['model']} [ms] | batch | kv_len | " + " | ".join(systems) + " |")
    lines.append("|---|---:|---:|" + "---:|" * len(systems))
    for key in sorted({table.work(row) for row in rows}):
        found = {row["system"]: row for row in rows if table.work(row) == key}
        cells = [cell(found.get(system), "stack", None) for system in systems]
        lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    for heading, unit, points in growths(report):
        lines += ["", f"{heading}: {line_text(unit, points)}"]
    return lines


def tables(path, without=()):
    """The lines of a table for each kind of work in a file of bench_peers.py, but for some kinds, its rows of whole
    models, or for the stacks in a file of cf-layer."""
    report = read_json(path)
    if isinstance(report, dict) and report.get("program") == "cf-layer" and "gpu" in report:
        return stack_table(report)
    if not (isinstance(report, dict) and "results" in report):
        raise Refusal(f"{path}: expected a file of bench_peers.py or of cf-layer --backend cuda")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"{report['gpu']}, {versions}, commit {report['commit']}: `{report['command']}`"]
    if is_of_python(report):
        return [*lines, "", *bench_python.tables(report)]
    if "model" in report["results"]:
        return [*lines, "", *model_peers.table(report["results"]["model"])]
    for what, rows in report["results"].items():
        rows = [of_today(row) for row in rows if row["batch"]]
        if not rows or what in without:
            continue
        systems = list(dict.fromkeys(row["system"] for row in rows))
        ratio = {(*table.work(r), r["peer"]): r["ratio"] for r in report["ratios"][what]}
        by_work = {}
        for row in rows:
            by_work.setdefault(table.work(row), {})[row["system"]] = row
        unit, count = "ms" if what == "stack" else "us", "tokens" if what in torch_norm.NORM_PEERS else "batch"
        lines += ["", f"| {what} [{unit}] | {count} | kv_len | " + " | ".join(systems) + " |"]
        lines.append("|---|---:|---:|" + "---:|" * len(systems))
        for key, found in sorted(by_work.items()):
            cells = [cell(found.get(system), what, ratio.get((*key, system))) for system in systems]
            lines.append("| " + " | ".join([*map(str, key), *cells]) + " |")
    return lines


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("--tables", action="store_true", help="print Markdown tables; draw nothing")
    parser.add_argument("--hero", metavar="SVG", help="draw the bars of the one FILE's systems into this picture")
    parser.add_argument("json", nargs="+", metavar="FILE", help="what bench_peers.py or cf-layer wrote")
    try:
        args = parser.parse_args(argv)
        if args.tables:
            print("\n\n".join("\n".join(tables(path)) for path in args.json))
            return 0
        if args.hero:
            hero = [read_json(path) for path in args.json]
            if len(hero) != 1 or not is_of_models(hero[0]) or not model_peers.shown_token(hero[0]):
                raise Refusal(
                    "--hero: expected one file of bench_peers.py --what model, with one prompt of "
                    f"{model_peers.SHOWN_PROMPT_LEN} ids"
                )
            args.json = []
        python = {path: report for path in args.json if is_of_python(report := read_json(path))}
        reports = [(path, read_report(path)) for path in args.json if path not in python]
        import matplotlib
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; matplotlib is needed", file=sys.stderr)
        return 2

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = NAME
    # Text stays text, in the reader's own font: a third of the size of drawn letters.
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    if args.hero:
        draw_hero(plt, hero[0], args.hero)
        return 0
    for path, report in python.items():
        if found := token_times(report):
            draw_token_times(plt, found, caption([report], report["gpu"]), f"{os.path.splitext(path)[0]}.svg")
    for path, (rows, layers, gpu) in reports:
        stem = os.path.splitext(path)[0]
        about = caption(layers, gpu)
        partial = any(
            c.get("step_layers", c.get("resident_layers")) != c.get("resident_layers")
            for c in layers[0]["configurations"]
        )
        if partial and (found := growths(layers[0])):
            draw_growth(plt, found, about, f"{stem}.svg")
            continue
        draw_layer(plt, curves(rows), about, f"{stem}-layer.svg")
        if found := shares(layers):
            draw_sites(plt, found, about, f"{stem}-sites.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
