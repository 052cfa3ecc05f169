#!/usr/bin/env python3
"""Times two builds in turn on one GPU, one process after the other: whole steps by cf-layer and prompts by cf-model.
Each configuration runs --rounds times in both builds. A figure is the median over the rounds, and a ratio is new / old.

Prints a markdown table of the ratios, a model's rows as soon as they are there; --json is written anew then. Exit code
1 where a ratio is further from 1 than --percent. Needs a GPU and the programs cf-layer and cf-model of both builds.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
BUILDS = ("old", "new")


def report_of(command):
    """What the program writes as JSON."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "report.json")
        done = subprocess.run([*command, "--json", path], capture_output=True, text=True, check=False)
        if done.returncode:
            raise console.Refusal(f"{shlex.join(command)}: {done.stderr.strip()}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def dtype_of(preset):
    """Pythia's presets are float16 models; --dtype is needed for the others alone."""
    if preset.startswith("pythia-"):
        return []
    return ["--dtype", "f16" if preset.startswith("llama-2") else "bf16"]


def step_times(build, preset, batch, impls, kv_lens, runs):
    """The median microseconds of a whole step, by (what, impl)."""
    command = [os.path.join(build, "apps", "cf-layer"), "--backend", "cuda", "--whole-model", "--preset", preset]
    command += [*dtype_of(preset), "--impl", impls, "--kv-len", kv_lens, "--batch", str(batch)]
    report = report_of([*command, "--runs", str(runs), "--warmup", "3"])
    times = {}
    for configuration in report["configurations"]:
        if "step" in configuration:
            what = f"step, batch {batch}, kv {configuration['kv_len']}"
            times[what, configuration["impl"]] = configuration["step"]["median_us"]
    return report, times


def prompt_times(build, preset, lengths, runs):
    """The median microseconds to the first token, by (what, impl)."""
    command = [os.path.join(build, "apps", "cf-model"), "bench", "--backend", "cuda", "--preset", preset]
    command += [*dtype_of(preset), "--prompt-len", lengths, "--new-tokens", "1", "--slots", "1"]
    report = report_of([*command, "--runs", str(runs), "--warmup", "2"])
    return report, {(f"prompt, {r['prompt_len']}", r["impl"]): 1e3 * r["ttft_ms"] for r in report["results"]}


def measure(args):
    """Of each model, the rows of the table and the last report of each build."""
    builds = dict(zip(BUILDS, (args.old, args.new)))
    for preset in args.preset.split(","):
        rows, reports, times = [], {}, {}
        for round_ in range(args.rounds):
            for name, build in builds.items():
                console.progress(f"{preset}: round {round_ + 1} of {args.rounds}, {name}")
                parts = []
                for batch in args.batch.split(",") if args.batch else []:
                    parts.append(step_times(build, preset, batch, args.impl, args.kv_len, args.runs))
                if args.prompt_len:
                    parts.append(prompt_times(build, preset, args.prompt_len, args.runs))
                for report, found in parts:
                    reports[name] = report
                    for key, value in found.items():
                        times.setdefault(key, {}).setdefault(name, []).append(value)
        for (what, impl), by_build in times.items():
            if set(by_build) != set(BUILDS):
                continue  # one of the builds does not have this
            old, new = (statistics.median(by_build[name]) for name in BUILDS)
            rows.append(
                {"preset": preset, "what": what, "impl": impl, "old_us": old, "new_us": new, "ratio": new / old}
            )
        console.progress("")
        yield rows, reports


def write_report(args, argv, rows, reports):
    about = {
        "what": "two builds in turn, one process after the other; medians over the rounds",
        "command": shlex.join([f"apps/{NAME}", *argv]),
        "gpu": reports["new"]["gpu"],
        "old_commit": reports["old"]["commit"],
        "commit": reports["new"]["commit"],
        "rounds": args.rounds,
        "runs": args.runs,
        "results": rows,
    }
    with open(args.json, "w", encoding="utf-8") as file:
        file.write(json.dumps(about, indent=1) + "\n")


def main(argv):
    parser = console.Parser(description=__doc__)
    count = console.integer(1, 1 << 20)
    parser.add_argument("old", help="the build to compare with")
    parser.add_argument("new", help="the build that is compared")
    parser.add_argument("--preset", required=True, metavar="LIST", help="models with procedural weights")
    parser.add_argument("--impl", default="graph,persistent", metavar="LIST", help="ways to run a step")
    parser.add_argument("--batch", default="1,4,8", metavar="LIST", help="sequences of a step; empty for no steps")
    parser.add_argument("--kv-len", default="512", metavar="LIST", help="entries that each sequence has")
    parser.add_argument("--prompt-len", default="128,512", metavar="LIST", help="ids of a prompt; empty for no prompts")
    parser.add_argument("--rounds", type=count, default=3, help="processes of each configuration and build (default 3)")
    parser.add_argument("--runs", type=count, default=20, help="timed runs of a process (default 20)")
    parser.add_argument("--percent", type=float, default=1.0, help="how far from 1 a ratio may be (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    rows = []
    try:
        args = parser.parse_args(argv)
        for found, reports in measure(args):
            if not rows:
                print(f"{reports['new']['gpu']}, {reports['old']['commit']} and {reports['new']['commit']}\n")
                print("| model | what | impl | old us | new us | new / old |")
                print("|-|-|-|-|-|-|")
            for row in found:
                print(
                    "| {preset} | {what} | {impl} | {old_us:.1f} | {new_us:.1f} | {ratio:.4f} |".format(**row),
                    flush=True,
                )
            rows += found
            if args.json:
                write_report(args, argv, rows, reports)
    except (console.Refusal, OSError) as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    if not rows:
        print(f"{NAME}: expected a configuration that both builds have, found none", file=sys.stderr)
        return 2
    far = [row for row in rows if abs(row["ratio"] - 1) > args.percent / 100]
    print(f"\n{len(rows) - len(far)} of {len(rows)} within {args.percent} %")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
