#!/usr/bin/env python3
"""Times cf-model on the CPU alone and beside loops that keep every core busy, with threads that wait in three ways:
  default  as the programs are: OpenMP's threads spin for microseconds while they wait for each other, then sleep
  sleep    OMP_WAIT_POLICY=PASSIVE: they sleep at once
  spin     GOMP_SPINCOUNT=300000, GCC's own default: they spin for milliseconds first

Every configuration runs --repeats times in turn; the figures are medians of the time per token (cf-model bench's TPOT,
an average over the tokens of a run).

Prints a markdown table. Needs numpy and cf-model; on Linux.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import numpy as np

import golden_file

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAITS = {"default": {}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}, "spin": {"GOMP_SPINCOUNT": "300000"}}
LOOP = "while True: pass"


@contextlib.contextmanager
def busy(count):
    """So many processes that never wait, until the block's end."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def report_of(command, environment):
    """What a run of cf-model bench writes as JSON."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "report.json")
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        done = subprocess.run(
            [*command, "--json", path], env=inherited | environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise console.Refusal(f"{shlex.join(command)}: {done.stderr.strip()}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def rows_of(model, times, loops):
    """A row for each way to wait: the median times per token alone and beside the loops, and their ratio."""
    rows = []
    for waits in WAITS:
        alone, beside = (float(np.median(times[waits, count])) for count in (0, loops))
        rows.append({"model": model, "waits": waits, "alone_ms": alone, "busy_ms": beside, "ratio": beside / alone})
    return rows


def main(argv):
    parser = console.Parser(description=__doc__)
    count = console.integer(1, 1 << 20)
    parser.add_argument("--cf-model", default="build/release/apps/cf-model", metavar="FILE", help="the program")
    parser.add_argument(
        "--model", action="append", required=True, help="a checkpoint directory or a preset; may be repeated"
    )
    parser.add_argument("--new-tokens", type=count, default=64, help="tokens of a run (default 64)")
    parser.add_argument("--loops", type=count, default=os.cpu_count(), help="busy loops (default: one a core)")
    parser.add_argument("--repeats", type=count, default=5, help="runs of each configuration (default 5)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    try:
        args = parser.parse_args(argv)
        if args.json:
            golden_file.check_writable(args.json)
        rows, report = [], {}
        for model in args.model:
            source = "--model" if os.path.isdir(model) else "--preset"
            command = [args.cf_model, "bench", source, model, "--prompt-len", "8", "--runs", "2"]
            command += ["--new-tokens", str(args.new_tokens)]
            times = {}
            for repeat in range(args.repeats):
                for loops in (0, args.loops):
                    with busy(loops):
                        for waits, environment in WAITS.items():
                            console.progress(f"{model}: run {repeat + 1} of {args.repeats}, {loops} loops, {waits}")
                            report = report_of(command, environment)
                            times.setdefault((waits, loops), []).append(report["results"][0]["tpot_ms"])
            rows += rows_of(os.path.basename(os.path.normpath(model)), times, args.loops)
        console.progress("")
    except (console.Refusal, OSError) as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    print(f"{report['threads']} threads of {report['cpu']}, time per token, alone and beside {args.loops} busy loops\n")
    print("| model | threads that wait | alone ms | busy ms | ratio |")
    print("|-|-|-|-|-|")
    for row in rows:
        print("| {model} | {waits} | {alone_ms:.2f} | {busy_ms:.2f} | {ratio:.1f} |".format(**row))
    if args.json:
        about = {
            "what": "cf-model on the CPU alone and beside busy loops: the median time per token",
            "command": shlex.join([f"apps/{NAME}", *argv]),
            "commit": report["commit"],
            "cpu": report["cpu"],
            "threads": report["threads"],
            "busy_loops": args.loops,
            "repeats": args.repeats,
            "new_tokens": args.new_tokens,
            "results": rows,
        }
        golden_file.write_text(args.json, json.dumps(about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
