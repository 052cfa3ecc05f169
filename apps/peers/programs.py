"""This library's programs, cf-layer, cf-op and cf-model: their calls, and their reports as rows."""

import json
import os
import subprocess
import tempfile

APPS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(os.path.dirname(APPS), "build", "release", "apps")


def run_program(command, timeout_s):
    """What a program of this repository wrote with --json FILE; raises with its one line on stderr."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "report.json")
        done = subprocess.run([*command, "--json", path], capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip() or 'nothing on stderr'}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def commit_of(program):
    """The commit that a cf-model was built from, which its reports hold; "unknown" where it does not run."""
    with tempfile.TemporaryDirectory() as directory:
        report = os.path.join(directory, "smallest.json")
        smallest = "bench --backend cpu --preset pythia-14m --prompt-len 1 --new-tokens 1 --runs 1 --warmup 0 --json"
        try:
            subprocess.run([program, *smallest.split(), report], check=True, capture_output=True, timeout=60)
            with open(report, encoding="utf-8") as file:
                return json.load(file)["commit"]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return "unknown"


def impl_of(configuration):
    """The --impl of a configuration of cf-layer's JSON; earlier files name two of them otherwise."""
    impl = configuration["impl"]
    return {"fused": "layer", "stack": "persistent"}.get(impl, impl)


def kv_len_of(configuration):
    """A configuration's kv_len. Earlier files say seq_len."""
    return configuration["kv_len" if "kv_len" in configuration else "seq_len"]


def step_of(configuration):
    """The times of a configuration's step through many layers; None where it has one layer. Earlier files say stack."""
    return configuration.get("step", configuration.get("stack"))


def layer_rows(report, preset):
    """cf-layer's layers and whole stacks as rows of this report; times are a layer's."""
    return [
        {"preset": preset, "batch": c["batch"], "kv_len": kv_len_of(c), "system": "cf-layer " + impl_of(c)}
        | {key: c["total"][key] for key in ("median_us", "p10_us", "p99_us")}
        | {"bytes": c["total"]["bytes"], "read_best_gb_per_s": c["read_best_gb_per_s"]}
        | {key: c["total"][key] for key in ("limit_note",) if key in c["total"]}
        for c in report["configurations"]
        if c.get("step_layers", c.get("resident_layers")) == c.get("resident_layers")
    ]


def prompt_rows(report, preset):
    """Attention of cf-layer's prompts as rows of this report."""
    return [
        {"preset": preset, "batch": c["batch"], "kv_len": c["kv_len"], "system": "cf-layer " + impl_of(c)}
        | {key: site[key] for key in ("median_us", "p10_us", "p99_us", "bytes")}
        for c in report["configurations"]
        for site in c["sites"]
        if site["site"] == "attention.context"
    ]


def op_rows(report, preset):
    """cf-op's results as rows of this report. Of the layer's products only the row of all four counts."""
    return [
        {"preset": preset, "batch": r["batch"], "kv_len": r["kv_len"], "system": "cf-op"}
        | {key: r[key] for key in ("median_us", "p10_us", "p99_us", "bytes", "cold", "floor_us", "limit")}
        | {key: r[key] for key in ("limit_note",) if key in r}
        for r in report["results"]
        if report["op"] != "linear" or r["site"] == "layer"
    ]
