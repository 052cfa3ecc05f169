#!/usr/bin/env python3
"""Writes the page of recorded figures, DIR/README.md, from the JSON files in DIR that scripts/bench_gpu has made, and
the table of headline figures between its two marks in README, and where PYTHON_README is named the package's between
the same marks there:
  bench_page.py data/bench README.md python/README.md
Every table names the command and the commit of its figures. Needs numpy, and no GPU.
"""

import json
import os
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import bench_peers
import bench_python
import golden_file
import plot_bench
from console import Refusal

BEGIN, END = "<!-- headline: written by apps/bench_page.py -->", "<!-- headline ends -->"
MODELS = ("pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b")
# In the headline, and with peers.
LLAMAS = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-7b", "llama-3.1-8b")
OTHER_FAMILIES = (*LLAMAS, "llama-2.8b-shape", "llama-3.1-8b-gptq")
IMPLS = ("unfused", "graph", "split", "layer", "persistent")


class Figures:
    """The recorded files of a directory, by name without .json; None for one that is not there."""

    def __init__(self, directory):
        self.directory = directory

    def __getitem__(self, name):
        path = os.path.join(self.directory, name + ".json")
        return plot_bench.read_json(path) if os.path.exists(path) else None

    def steps(self, name):
        """{(impl, batch, kv_len): (time_ms, percent of the read)} of cf-layer's steps through a whole model."""
        report = self[name]
        found = {}
        for c in report["configurations"] if report else ():
            if step := bench_peers.step_of(c):
                key = bench_peers.impl_of(c), c["batch"], bench_peers.kv_len_of(c)
                found[key] = step["median_us"] * 1e-3, step["percent_of_read"]
        return found

    def token(self, name, prompt_len):
        """(time_ms, percent of the read) of a whole token of one sequence behind a prompt, by cf-model bench."""
        report = self[name]
        rows = [r for r in report["results"] if (r["prompt_len"], r["slots"]) == (prompt_len, 1)] if report else []
        return (rows[0]["tpot_ms"], rows[0]["decode_percent_of_read"]) if rows else None

    def source(self, name):
        """The line that says where a file's figures come from."""
        report = self[name]
        return f"[`{name}.json`]({name}.json), commit {report['commit']}: `{report['command']}`"


def table(headers, rows):
    """A Markdown table whose columns but the first are numbers."""
    lines = ["| " + " | ".join(headers) + " |", "|---|" + "---:|" * (len(headers) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def share(figure):
    return f"{figure[0]:.3f} ({figure[1]:.0f} %)" if figure else "-"


def factor(slower, faster):
    return f"{slower[0] / faster[0]:.2f}x" if slower and faster else "-"


def peer_factor(figures, model, system, batch, kv_len):
    """A peer's time over our fastest, both of one run."""
    report = figures[model]
    for r in report["ratios"]["stack"] if report else ():
        if (r["peer"], r["batch"], r["kv_len"]) == (system, batch, kv_len):
            return f"{r['ratio']:.2f}x"
    return "-"


def other_gpu(figures, name, model):
    """The GPU of a file, in brackets, where that of the model's stack is another one."""
    report, stack = figures[name], figures[f"stack-{model}"]
    return f" ({report.get('gpu')})" if report and stack and report.get("gpu") != stack.get("gpu") else ""


def token_factor(figures, model, system, prompt_len):
    """A peer's time for a whole token of one sequence behind a prompt over our fastest, both of one run."""
    name = f"model-peers-{model}"
    for r in figures[name]["results"]["model"] if figures[name] else ():
        if (r["system"], r["slots"], r["prompt_len"]) == (system, 1, prompt_len) and "tpot_ratio" in r:
            return f"{r['tpot_ratio']:.2f}x" + other_gpu(figures, name, model)
    return "-"


def token_share(figures, model, prompt_len):
    """The time of a whole token of one sequence behind a prompt, and its share of the memory's speed."""
    name = f"model-{model}"
    figure = figures.token(name, prompt_len)
    return share(figure) + (other_gpu(figures, name, model) if figure else "")


def headline(figures):
    rows = []
    for model in (*MODELS, *LLAMAS):
        steps, gptq = figures.steps(f"stack-{model}"), figures.steps(f"stack-{model}-gptq")
        graph, persistent = steps.get(("graph", 1, 128)), steps.get(("persistent", 1, 128))
        if model in LLAMAS:
            factors = [token_factor(figures, model, peer, 512) for peer in ("torch_graph", "hf_static_compile")]
        else:
            factors = [peer_factor(figures, model, peer, 1, 128) for peer in ("torch_graph", "hf_compile")]
        rows.append([
            model,
            share(graph),
            share(persistent),
            share(gptq.get(("graph", 1, 128))),
            token_share(figures, model, 512),
            *factors,
        ])  # fmt: skip
    peers = "torch in a graph", "HF, compiled"
    headers = ["ms a token", "`graph`", "`persistent`", "int4 `graph`", "whole token", *peers]
    return table(headers, rows) + whole_token(figures)


def whole_token(figures, model="pythia-2.8b", prompt_len=128):
    """What a token takes from the embedding to the choice, beside the peers of the same run; nothing where no run is
    recorded."""
    report = figures[f"model-peers-{model}"]
    rows = [r for r in report["results"]["model"] if r["prompt_len"] == prompt_len] if report else []
    ours = [r for r in rows if r["system"].startswith("cf-model") and "tpot_ms" in r]
    peers = {r["system"]: r for r in rows if r["slots"] == 1 and "tpot_ratio" in r and "ttft_ratio" in r}
    if not ours or not {"hf_generate", "torch_graph"} <= peers.keys():
        return []
    best = min(ours, key=lambda r: r["tpot_ms"])
    factors = [
        f"{peers[name][key]:.1f}" for name in ("hf_generate", "torch_graph") for key in ("tpot_ratio", "ttft_ratio")
    ]
    text = (
        f"In the run with these peers a whole token of {model}, embedding and head with it, takes {best['tpot_ms']:.2f} ms behind {prompt_len} ids, "
        f"and the first one {best['ttft_ms']:.1f} ms. Hugging Face's `generate()` takes {factors[0]} and {factors[1]} "
        f"times as long, torch in CUDA graphs {factors[2]} and {factors[3]} times."
    )
    return ["", *textwrap.wrap(text, 120)]


def ways_to_step(figures):
    lines, rows, sources = [], [], []
    for model in (*MODELS, *LLAMAS):
        steps = figures.steps(f"stack-{model}")
        if not steps:
            continue
        sources.append(figures.source(f"stack-{model}"))
        for kv_len in sorted({kv_len for _, _, kv_len in steps}):
            rows.append([model, str(kv_len), *(share(steps.get((impl, 1, kv_len))) for impl in IMPLS)])
    lines += table(["all layers, batch 1 [ms]", "kv_len", *(f"`{impl}`" for impl in IMPLS)], rows)
    return [*lines, "", *(f"- {s}" for s in sources), *both_ways(figures, "all layers [ms]", "h100", MODELS)]


def both_ways(figures, header, kind, models):
    """A table of stack-MODEL-KIND.json: both fast ways to step a model, with the GPU of their run."""
    rows, sources = [], []
    for model in models:
        name = f"stack-{model}-{kind}"
        steps = figures.steps(name)
        for batch, kv_len in sorted({(batch, kv_len) for _, batch, kv_len in steps}):
            both = (share(steps.get((impl, batch, kv_len))) for impl in ("graph", "persistent"))
            rows.append([model, figures[name]["gpu"], str(kv_len), *both])
        if steps:
            sources.append(figures.source(name))
    if not rows:
        return []
    return ["", *table([header, "GPU", "kv_len", "`graph`", "`persistent`"], rows), "", *(f"- {s}" for s in sources)]


def batches(figures):
    rows, sources = [], []
    for batch in (1, 2, 4, 8, 16, 64):
        name = "stack-pythia-2.8b" + (f"-batch-{batch}" if batch > 1 else "")
        steps = figures.steps(name)
        if steps:
            rows.append([str(batch), *(share(steps.get((impl, batch, 128))) for impl in ("graph", "persistent"))])
            sources.append(figures.source(name))
    return [*table(["batch", "`graph` [ms]", "`persistent` [ms]"], rows), "", *(f"- {s}" for s in sources)]


def quantised(figures):
    rows, sources = [], []
    for model in MODELS:
        steps, dense = figures.steps(f"stack-{model}-gptq"), figures.steps(f"stack-{model}")
        linears = figures[f"gptq-linears-{model}"]
        if not steps or not linears:
            continue
        of_batch = {r["batch"]: r for r in linears["results"] if r["site"] == "layer"}
        cells = [f"{of_batch[b]['median_us']:.1f} ({of_batch[b]['percent_of_limit']:.0f} %)" for b in (1, 8)]
        int4 = steps.get(("graph", 1, 128))
        rows.append([model, share(int4), factor(dense.get(("graph", 1, 128)), int4), *cells])
        sources += [figures.source(f"stack-{model}-gptq"), figures.source(f"gptq-linears-{model}")]
    headers = [
        "int4, group 128",
        "`graph` [ms]",
        "faster than float16",
        "four products [us]",
        "of eight sequences [us]",
    ]
    lines = [*table(headers, rows), "", *(f"- {s}" for s in sources)]
    models = (*MODELS, *LLAMAS)
    return [
        *lines,
        *both_ways(figures, "int4, group 128 [ms]", "gptq-persistent", models),
        *both_ways(figures, "int4, group 128, four sequences [ms]", "gptq-persistent-batch-4", models),
    ]


def gptq_tried(figures):
    """The graph of packed weights with a change that is not in it, over the time without."""
    report = figures["gptq-graph-tried"]
    if not report:
        return ["Not recorded."]
    rows = [
        [f"{change['change']}: {variant}", f"{row['model']}, kv_len {row['kv_len']}", f"{us / row['us']:.2f}x"]
        for change in report["changes"]
        for row in change["rows"]
        if row["us"]
        for variant, us in zip(change["variants"], row["variant_us"])
        if us
    ]
    source = figures.source("gptq-graph-tried") + f", {report['gpu']}"
    return [*table(["not in the graph", "all layers of", "over the graph"], rows), "", source]


def shared_keys(figures):
    """All layers in the graph where the heads of a group share loads of keys, over the time where each head loads."""
    report = figures["shared-keys-graph"]
    if not report:
        return ["Not recorded."]
    ratios = {}
    for row in report["rows"]:
        ratios.setdefault((row["model"], row["weights"]), {})[row["kv_len"]] = row["ratio"]
    kv_lens = sorted({kv_len for of in ratios.values() for kv_len in of})
    rows = [[f"{model}, {weights}", *(f"{of[k]:.2f}x" if k in of else "-" for k in kv_lens)]
            for (model, weights), of in ratios.items()]  # fmt: skip
    headers = ["shared loads over own, kv_len", *(f"{k:,}" for k in kv_lens)]
    return [*table(headers, rows), "", figures.source("shared-keys-graph") + f", {report['gpu']}"]


def first_tokens(figures):
    """How long the first tokens behind a prompt take, and those that follow."""
    report = figures["first-tokens"]
    if not report:
        return ["Not recorded."]
    rows = []
    for run in report["runs"]:
        ms = {row["new_tokens"]: row["behind_first_ms"] for row in run["rows"]}
        most = max(ms)
        third = f"{ms[3] - ms[2]:.2f}" if 3 in ms else "-"
        later = (ms[most] - ms[5]) / (most - 5)
        rows.append([f"{run['model']}, {run['prompt_len']} ids", f"{ms[2]:.2f}", third, f"{later:.2f}"])
    headers = ["ms a token behind a prompt", "second", "third", "mean behind the fifth"]
    return [*table(headers, rows), "", figures.source("first-tokens") + f", {report['gpu']}"]


def ablation(figures):
    report = figures["ablation-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    found = {}
    for a in report["ablations"]:
        for v in a["variants"]:
            if "median_us" in v:
                key = v.get("choice", v.get("part")), v.get("value", v.get("variant"))
                found.setdefault(key, {})[bench_peers.kv_len_of(a)] = v
    kv_lens = [bench_peers.kv_len_of(a) for a in report["ablations"]]
    rows = [[part, value, *(f"{of[k]['ratio']:.2f}x" if k in of else "-" for k in kv_lens)]
            for (part, value), of in found.items()]  # fmt: skip
    lines = [
        f"| choice | instead | {' | '.join(f'kv_len {k}' for k in kv_lens)} |",
        "|---|---|" + "---:|" * len(kv_lens),
    ]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), "", figures.source("ablation-pythia-2.8b")]


def timeline(figures):
    """When a layer's events come, of one build or of an earlier and a later one."""
    lines = []
    for model in ("pythia-2.8b", "pythia-2.8b-gptq", "llama-3.1-8b"):
        report = figures[f"timeline-{model}"]
        if not report:
            continue
        rows = [[f"{e['phase']}: {e['event']}", *(f"{us:.1f}" for us in e["us"])] for e in report["events"]]
        headers = [f"{model}, kv_len {report['kv_len']} [us]", *(f"commit {c}" for c in report["commits"])]
        lines += [*table(headers, rows), "", f"`{report['command']}`, {report['gpu']}. {report['method']}", ""]
    return lines[:-1] or ["Not recorded."]


def waits(figures):
    """All layers with parts of the kernel taken out, and the events from q, k and v to the MLP, model by model."""
    report = figures["layer-waits"]
    if not report:
        return ["Not recorded."]
    parts, chains = report["parts"]["rows"], report["chains"]["rows"]
    us = {(row["model"], row["variant"]): row["us"] for row in parts}
    models = list(dict.fromkeys(model for model, _ in us))
    variants = dict.fromkeys(variant for _, variant in us)
    rows = [[variant, *(f"{us[model, variant]:.0f}" for model in models)] for variant in variants]
    events = [[e["event"], *(f"{c['events'][i]['mean_us']:.1f} ({c['events'][i]['last_us']:.1f})" for c in chains)]
              for i, e in enumerate(chains[0]["events"])]  # fmt: skip
    return [*table(["all layers [us]", *models], rows), "",
            *table(["from the last q, k and v on: mean (last block) [us]", *(c["model"] for c in chains)], events), "",
            figures.source("layer-waits") + f", {report['gpu']}"]  # fmt: skip


def growth(figures):
    report = figures["growth-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    lines = [
        f"- {heading}: {plot_bench.line_text(unit, points)}" for heading, unit, points in plot_bench.growths(report)
    ]
    return [*lines, "", "![A step's time against layers and kv_len](growth-pythia-2.8b.svg)", "",
            figures.source("growth-pythia-2.8b")]  # fmt: skip


def peers(figures):
    lines = []
    for model in ("pythia-2.8b", "pythia-6.9b"):
        parts = {"": f"![A layer's time]({model}-layer.svg)", "kernel-peers-": ""}
        for part, picture in parts.items():
            report = figures[part + model]
            if not report:
                continue
            heading = f"### {model}, kernels" if part else f"### {model}"
            counted = any("code_lines" in row for rows in report["results"].values() for row in rows)
            lines += [heading, "", *plot_bench.tables(os.path.join(figures.directory, f"{part}{model}.json")), ""]
            lines += [PEERS_OF_KERNELS, ""] * counted + [picture, ""] * bool(picture)
    return lines


def cpu(figures):
    report = figures["cpu-layer"]
    if not report:
        return ["Not recorded."]
    rows = []
    for run in report["runs"]:
        total = run["cf_layer"]["configurations"][0]["total"]
        hf = {r["dtype"]: r["median_us"] for r in run["hugging_face"]["results"]}
        best = min(hf, key=hf.get)
        rows.append([
            str(run["threads"]),
            f"{total['median_us'] * 1e-3:.2f} ms",
            f"{total['percent_of_read']:.0f} %",
            f"{hf['float16'] * 1e-3:.2f} ms",
            f"{hf[best] * 1e-3:.2f} ms ({best})",
        ])  # fmt: skip
    headers = ["threads", "cf-layer", "of the streaming read", "Hugging Face, float16", "Hugging Face, best dtype"]
    about = f"{report['what']}; {report['machine']}; commit {report['commit']} ([`cpu-layer.json`](cpu-layer.json))."
    return [about, "", *table(headers, rows)]


def model_table(results):
    """The rows of cf-model bench. On a GPU each has the impl of its steps, and beside other models its own."""
    names = {"model": "model", "dtype": "dtype", "impl": "impl"}
    names |= {"prompt_len": "prompt", "new_tokens": "new", "slots": "slots"}
    texts = [key for key in names if key in results[0]]
    rows = [
        [
            *(str(r[key]) for key in texts),
            *(f"{r[key]:.{2 if 'impl' in r else 1}f}" for key in ("ttft_ms", "tpot_ms", "inter_token_p99_ms")),
            f"{r['tokens_per_s']:.1f}",
            f"{r['decode_percent_of_read']:.0f} %",
        ]
        for r in results
    ]
    headers = [*(names[key] for key in texts), "TTFT ms", "TPOT ms", "p99 ms", "tokens/s"]
    return table([*headers, "decode, of the streaming read"], rows)


def cpu_model(figures):
    lines = []
    for name in ("cpu-model-pythia-2.8b", "cpu-model-pythia-2.8b-gptq"):
        report = figures[name]
        if not report:
            lines += [f"{name}: not recorded.", ""]
            continue
        about = f"{report['threads']} threads of {report['cpu']}, {report['weights']}. {figures.source(name)}"
        lines += [about, "", *model_table(report["results"]), ""]
    return lines[:-1]


def quality(figures):
    rows, sources = [], []
    for name in ("stdlib-4m", "stdlib-4m-bfloat16", "stdlib-4m-gptq", "stdlib-llama-2m", "stdlib-llama-2m-gptq"):
        report = figures[f"quality-{name}"]
        if not report:
            continue
        runs = {f"Hugging Face, {run}": f for run, f in report["figures"].items()}
        runs |= {f"`{about['impl']}`": f for about, f in zip(report["programs"], report["beside"].values())}
        for run, f in runs.items():
            rows.append([
                name,
                run,
                f"{f['kl']['mean']:.3g} ± {f['kl']['error']:.1g}",
                f"{f['kl_p99_9']:.2g}",
                f"{f['perplexity']['mean']:.4f}",
                f"{100 * (f['perplexity']['mean'] / f['reference_perplexity']['mean'] - 1):+.3f} %",
                f"{f['logits_rel_l2']:.2e}",
            ])  # fmt: skip
        commit = report["programs"][0]["commit"]
        sources.append(f"- [`quality-{name}.json`](quality-{name}.json), commit {commit}: `{report['command']}`")
    if not rows:
        return ["Not recorded."]
    headers = ["text", "run", "KL from float64", "KL, 99.9 %", "perplexity", "from float64's", "logits' relative L2"]
    return [*table(headers, rows), "", *sources]


def what_ran(report):
    return f"{report['model']} on {report['gpu']}, {report['weights']}"


def other_families(figures):
    """One table of the models beside Pythia's that are recorded."""
    rows, sources = [], []
    for name in OTHER_FAMILIES:
        if report := figures[f"model-{name}"]:
            dtype = report["activation_dtype"] + (", int4 weights" if name.endswith("-gptq") else "")
            about = {"model": report["model"], "dtype": dtype}
            rows += [about | r for r in report["results"]]
            sources.append(f"- {what_ran(report)}. {figures.source(f'model-{name}')}")
    return [*model_table(rows), "", *sources, ""] if rows else []


def peers_of_a_model(report):
    return (
        f"Beside others in one run, {report['dtype']}: transformers' generate(), the same model with a static cache "
        "and compiled steps, and torch's operators in CUDA graphs, one for every step (torch_graph) or one for each "
        "kv_len (torch_graphs). The last column counts the greedy ids of one prompt that are generate()'s with the "
        f"same weights; where it names a model, the ids are that model's. Measured on {report['gpu']}."
    )


def gpu_model(figures):
    lines = []
    quantised = "pythia-2.8b-gptq", "pythia-2.8b-gptq-slots"
    for name in ("pythia-2.8b", "pythia-2.8b-slots", *quantised, "pythia-6.9b"):
        report = figures[f"model-{name}"]
        if report:
            lines += [f"{what_ran(report)}. {figures.source(f'model-{name}')}", "", *model_table(report["results"]), ""]
    lines += other_families(figures)
    if report := figures["load-pythia-2.8b"]:
        (sequence,) = report["sequences"]
        ms = 1e3 * sequence["first_token_s"]
        first = f"opened in {report['load_s']:.2f} s, first id {ms:.1f} ms after that"
        what = f"{report['model']}, files in the page cache, {len(sequence['prompt'])} ids, on {report['gpu']}"
        lines += [f"{what}: {first}. {figures.source('load-pythia-2.8b')}", ""]
    for name in ("pythia-2.8b", "compile-pythia-2.8b", *LLAMAS):
        if report := figures[f"model-peers-{name}"]:
            _, _, *rows = plot_bench.tables(os.path.join(figures.directory, f"model-peers-{name}.json"))
            lines += [peers_of_a_model(report) + " " + figures.source(f"model-peers-{name}"), "", *rows, ""]
    return lines[:-1] or ["Not recorded."]


def python(figures):
    """The package's calls, and how many times its time a token Hugging Face takes."""
    report = figures["python-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    about = f"{report['gpu']}, {versions}. {figures.source('python-pythia-2.8b')}"
    picture = ["![Milliseconds a token from Python](python-pythia-2.8b.svg)", ""] if report["results"]["model"] else []
    port = figures["python-port-pythia-2.8b"]
    if not port:
        return [about, "", *picture, *bench_python.tables(report)]
    rest = report | {"results": report["results"] | {"clusterfusion": []}}
    source = f"{port['gpu']}. {figures.source('python-port-pythia-2.8b')}"
    return [about, "", *picture, *bench_python.tables(rest), "", source, "", *bench_python.tables(port)]


def python_headline(figures, beside):
    """A token's time from Python, with the picture's path as seen from the folder `beside`."""
    report = figures["python-pythia-2.8b"]
    ratios = report["ratios"] if report else []
    if not ratios:
        return ["Not recorded yet: `scripts/bench_gpu --only python data/bench` does it."]
    directory = os.path.relpath(figures.directory, beside or os.curdir)
    text = f"On one {report['gpu']}, greedy, in one run: " + "; ".join(map(bench_python.ratio_text, ratios)) + "."
    page = f"[`data/bench/README.md`]({directory}/README.md) has the times of single calls too."
    return [
        f"![Milliseconds a token: Hugging Face, speed_up, cf-model]({directory}/python-pythia-2.8b.svg)",
        "",
        *textwrap.wrap(f"{text} {page}", 120, break_long_words=False, break_on_hyphens=False),
    ]


PEERS_OF_KERNELS = (
    "gptq_linear is the four products of a layer, one token, int4 weights in groups of 128. torch's kernel has no "
    "bias, and of its three layouts the best one counts; Triton's has a bias and takes the weights as GPTQ stores "
    "them. Lines are those of code, without blank ones and comments: of Triton's kernel with the function that "
    "launches it (`apps/triton_kernels.py`), and of our kernel's file with all that it includes of its family and of "
    "`cuda/device`."
)

PAGE = """# Recorded figures

Made from the JSON files beside this page by `apps/bench_page.py data/bench README.md`; `scripts/bench_gpu data/bench`
records them again, but for those of trial builds, in about half an hour and needs a GPU with 80 GB, torch, transformers
and matplotlib. Each file holds the GPU, the command and the commit of its figures.

How to read them. Weights come cold from memory. A percentage is the share of the compulsory bytes' time at the best
streaming read of the same run, a kernel that reads 2 GiB once; of an op that writes a fifth or more of its bytes, at
the best copy by a kernel. A share above 100 % names its cause in its row, such as tensors that stay in the L2. A peer's
factor is its time over our fastest in the same run; a dash is what was not measured or did not finish. torch in a graph
is torch op by op, captured; Hugging Face is transformers with a static cache and torch.compile.

Runs of one build differ, by 0.7 % for all layers of Pythia-2.8B in two runs on an H200 (`eased` in
[`layer-waits.json`](layer-waits.json)). So builds are compared in one run.

## Ways to step a model

{ways_to_step}

## Tokens from a whole model

TTFT is the time from the prompts to the last slot's first id, TPOT the time between a slot's ids after it, both by the
host's clock.

{gpu_model}

The second and the third token behind a short prompt take longer than the rest, and count in TPOT.

{first_tokens}

## From Python

`generate()` of transformers as it is (hf_generate) and with `cf_ops.hf.speed_up` (speed_up) beside `cf-model`, greedy.
Then calls of the package `cf_ops`: the host's time is the call's own, which launches and does not wait; ops have small
tensors; a layer's and a step's time from call to call has the device's work in it.

{python}

## How far tokens are from float64

The held-out text of the small trained model: 32,768 ids in windows of 512, one id after the other as a decoder takes
them, against the same stored weights in float64; dequantised ones where they are quantised. Hugging Face's runs take a
window at once.

{quality}

## Several sequences

Pythia-2.8B, kv_len 128. All sequences share one pass over the weights.

{batches}

## Query heads that share keys

In the graph the query heads of a kv head attend in one block in caches of more than 65,536 elements a kv head. In
smaller ones each head has blocks of its own (`small`), which run at once. A step of all layers:

{shared_keys}

## Quantised weights

GPTQ of 4 bits, kv_len 128. The four products of a layer run in a graph of 32 layers, those side by side that do not
wait for each other.

{quantised}

Changes that were tried:

{gptq_tried}

## What each choice of the persistent kernel is worth

Pythia-2.8B: a layer's time with one choice of the plan another way, over its time with the plan's own.

{ablation}

## Where a layer's time goes

In the persistent kernel no weights are multiplied while a block waits. Meanwhile the ring takes the weights that the
memory delivers in 5 to 6 us. Longer waits are those for hidden with the norms behind it, and Llama's from the rows of
q, k and v to the MLP: two more waits lie between them. The kernel then prefetches the weights that follow into the L2
([`prefetches.json`](prefetches.json)).

Without copies and waits the kernel still takes half to three quarters of the time, and nearly all of a small model's.
A phase has 1 to 2 us beside its waits and its product (`phases` in `layer-waits.json`). A layer runs through more code
than the instruction cache holds ([`instruction-cache.json`](instruction-cache.json)).

A load of what other blocks have made waits behind the weights in flight. With Llama-3.1-8B and 48 KB in flight it takes
0.4 to 1.5 us. Fewer bytes in flight make it faster and the memory slower (`polls` and `eased` there).

{waits}

The timelines below are of earlier kernels. They do not prefetch. Llama's is the last one that loaded keys with bank
conflicts.

The 4-bit layers of Pythia-2.8B are the graph's. The later build multiplies activations as digits, which takes fewer
instructions: from activations in registers to the product it needs 0.2 to 0.5 us less in each kernel. All its kernels
divide an SM's memory alike, so that their blocks start 1 to 1.6 us earlier. The longest waits left are those of ln_qkv
for its activations and of linear_sum for the context.

{timeline}

## How a step's time grows

{growth}

## Beside torch, cuBLAS and Hugging Face

{peers}
## The CPU backend, one layer

{cpu}

## The CPU backend, tokens from a whole model

{cpu_model}
"""


def wrapped(line):
    """Breaks a line into lines of at most 120 columns. A table's row stays whole."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page(figures):
    parts = (ways_to_step, gpu_model, first_tokens, python, quality, batches, shared_keys, quantised, gptq_tried,
             ablation, waits, timeline, growth, peers, cpu, cpu_model)  # fmt: skip
    text = PAGE.format(**{part.__name__: "\n".join(part(figures)) for part in parts})
    return "\n".join(map(wrapped, text.split("\n")))


def with_headline(readme, lines):
    """The text with the lines between its two marks."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise Refusal(f"expected one '{BEGIN}' and behind it one '{END}'")
    before, after = readme[: readme.index(BEGIN)], readme[readme.index(END) :]
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + after


def updated(path, lines):
    """A file's text with these lines between its marks."""
    try:
        with open(path, encoding="utf-8") as file:
            return with_headline(file.read(), lines)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None


def write(path, text):
    with golden_file.atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    print(path)


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="where the recorded files are")
    parser.add_argument("readme", metavar="README", help="the file that has the headline's marks")
    parser.add_argument("python", metavar="PYTHON_README", nargs="?", help="the package's, with the same marks")
    try:
        args = parser.parse_args(argv)
        if not os.path.isdir(args.directory):
            raise Refusal(f"{args.directory}: no such directory")
        figures = Figures(args.directory)
        texts = {args.readme: updated(args.readme, headline(figures))}
        if args.python:
            texts[args.python] = updated(args.python, python_headline(figures, os.path.dirname(args.python)))
        write(os.path.join(args.directory, "README.md"), page(figures))
        for path, text in texts.items():
            write(path, text)
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
