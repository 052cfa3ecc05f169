#!/usr/bin/env python3
"""Makes a record of data/bench of what a measurement of scripts/bench_gpu has written:
  bench_record.py data/bench/stack-pythia-2.8b.json --fault "stopped after 60 s"
Every record has its GPU (or CPU), command and commit at its top, and no white space. Its paths begin at the project's
folder; of files elsewhere their names alone are kept. A measurement in which no program of ours ended does not know
the commit: --cf-model names a program of the same build. The times of single sites are left out where all layers were
timed, since no page shows them. A fault is kept as `error`; it is the only content where the measurement wrote no
file. Exit status: 1 where there is neither a file nor a fault.
"""

import json
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console
import golden_file
from peers import programs

NAME = os.path.basename(__file__)
ROOT = os.path.realpath(os.path.join(HERE, os.pardir))
ELSEWHERE = re.compile(r"(?<![\w./])(?:/[^\s/,:]+)+/(?=[^\s/,:])")  # what stands before a file's name


def commit_of(report):
    """The commit that a record's programs were built from. A comparison of texts has it in its programs' own reports."""
    return report.get("commit") or next((p["commit"] for p in report.get("programs", ())), "unknown")


def gpu_of(report):
    """A record's GPU, or None for one of the CPU. A comparison of texts calls it device."""
    return report.get("gpu") or report.get("device")


def slim(report):
    """The report without the sites of steps through all layers, its programs' reports too."""
    found = dict(report)
    if "configurations" in found:
        found["configurations"] = [c | {"sites": []} if "step" in c else c for c in found["configurations"]]
    if "programs" in found:
        found["programs"] = [slim(program) for program in found["programs"]]
    return found


def of_project(value):
    """The same with paths that say something on every machine."""
    if isinstance(value, dict):
        return {key: of_project(item) for key, item in value.items()}
    if isinstance(value, list):
        return [of_project(item) for item in value]
    return ELSEWHERE.sub("", value.replace(ROOT + os.sep, "")) if isinstance(value, str) else value


def record(report, fault=None, cf_model=None, took_s=None):
    """What is kept of a report; of None, the fault alone. `took_s` is how long the whole measurement took."""
    if report is None:
        return {"error": fault}
    commit = commit_of(report)
    if commit == "unknown" and cf_model:
        commit = programs.commit_of(cf_model)
    found = of_project(slim(report)) | {"commit": commit}
    if gpu := gpu_of(report):
        found["gpu"] = gpu
    if took_s is not None:
        found["took_s"] = took_s
    return found | {"error": fault} if fault else found


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("file", metavar="FILE", help="what the measurement has written, or should have")
    parser.add_argument("--fault", metavar="TEXT", help="why it ended early")
    parser.add_argument("--cf-model", metavar="FILE", help="the program, to ask for the commit")
    parser.add_argument("--took-s", type=int, metavar="N", help="the seconds that it took, preparations with it")
    try:
        args = parser.parse_args(argv)
        report = None
        if os.path.exists(args.file):
            with open(args.file, encoding="utf-8") as file:
                report = json.load(file)
        elif not args.fault:
            print(f"{NAME}: {args.file}: no such file, expected what a measurement has written", file=sys.stderr)
            return 1
        text = json.dumps(
            record(report, args.fault, args.cf_model, args.took_s), ensure_ascii=False, separators=(",", ":")
        )
        golden_file.write_text(args.file, text + "\n")
    except (console.Refusal, OSError, ValueError) as error:
        print(f"{NAME}: {args.file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
