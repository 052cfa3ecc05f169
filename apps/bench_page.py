#!/usr/bin/env python3
"""Writes the page of recorded figures, DIR/README.md, from the JSON files in DIR that scripts/bench_gpu has made; in
README the result in words and the headline's table, each between its two marks; and where PYTHON_README is named the
package's headline between the same marks there:
  bench_page.py data/bench README.md python/README.md
Every table names its files, with the commit of their figures. The commands stand at the page's end. Needs numpy, and no
GPU.
"""

import json
import os
import re
import shlex
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import bench_python
import golden_file
import plot_bench
from console import Refusal
from peers import model_peers, programs

MODELS = ("pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b")
LLAMAS = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-7b", "llama-3.1-8b")
OTHER_FAMILIES = (*LLAMAS, "llama-2.8b-shape", "llama-3.1-8b-gptq")
IMPLS = ("unfused", "graph", "split", "layer", "persistent")
# The headline's peers, by their names in records.
PEERS = {"torch_graph": "torch in CUDA graphs", "hf_static_compile": "torch.compile", "hf_generate": "`generate()`"}
# What stands in the command of a trial's record for a value of each row.
OF_EACH_ROW = r"\b(MODEL|DTYPE|KV|P|BATCH)\b"


class Figures:
    """The recorded files of a directory, by name without .json; None for one that is not there."""

    def __init__(self, directory):
        self.directory, self.named = directory, []
        names = sorted(name.removesuffix(".json") for name in os.listdir(directory) if name.endswith(".json"))
        gpus = [gpu for name in names if (gpu := self[name].get("gpu"))]
        self.gpu = max(dict.fromkeys(gpus), key=gpus.count) if gpus else "GPU"

    def __getitem__(self, name):
        path = os.path.join(self.directory, name + ".json")
        return plot_bench.read_json(path) if os.path.exists(path) else None

    def steps(self, name):
        """{(impl, batch, kv_len): (time_ms, percent of the read)} of cf-layer's steps through a whole model."""
        report = self[name]
        found = {}
        for c in report["configurations"] if report else ():
            if step := programs.step_of(c):
                key = programs.impl_of(c), c["batch"], programs.kv_len_of(c)
                found[key] = step["median_us"] * 1e-3, step["percent_of_read"]
        return found

    def source(self, name):
        """What says where a file's figures come from. The page's commands have the file then, too."""
        if name not in self.named:
            self.named.append(name)
        report = self[name]
        gpu = report.get("gpu", self.gpu)
        return f"[`{name}.json`]({name}.json), commit {report['commit']}" + f", {gpu}" * (gpu != self.gpu)

    def sources(self, names):
        """The line that names the files of a table."""
        return "; ".join(map(self.source, dict.fromkeys(names))) + "."


def table(headers, rows):
    """A Markdown table whose columns but the first are numbers."""
    lines = ["| " + " | ".join(headers) + " |", "|---|" + "---:|" * (len(headers) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def unbroken(lines):
    """Lines of tables, in which no cell breaks between a number and its unit or its share."""
    return [re.sub(r"(?<=[\dx%]) (?=\(|%|ms\b|us\b)", "\u00a0", line) if line[:1] == "|" else line for line in lines]


def share(figure):
    return f"{figure[0]:.3f} ({figure[1]:.0f} %)" if figure else "-"


def factor(slower, faster):
    return f"{slower[0] / faster[0]:.2f}x" if slower and faster else "-"


def shown(figures):
    """[(model, GPU, {system: row})] of the records with a whole token beside its peers, each of one run: those on the
    GPU of most first."""
    found = []
    for kind in ("", "-h100"):
        for model in (*MODELS, *LLAMAS):
            report = figures[f"model-peers-{model}{kind}"]
            if report and (rows := model_peers.shown_token(report)):
                found.append((model, report["gpu"], rows))
    return found


def result(figures):
    """The first of these results in words."""
    token = next((token for token in shown(figures) if token[0] == "pythia-2.8b"), None)
    if not token:
        return ["Not recorded yet: `scripts/bench_gpu --only peers data/bench` does it."]
    model, gpu, rows = token
    ours = rows["ours"]
    text = f"{model.title()}: {ours['tpot_ms']:.2f} ms a token on an {gpu}, {ours['decode_percent_of_read']:.0f} % of "
    text += "the memory's speed"
    for peer, name in PEERS.items():
        if peer in rows:
            text += f", {rows[peer]['tpot_ms'] / ours['tpot_ms']:.1f}x {name}"
    text += " of transformers" * ("hf_generate" in rows)
    return textwrap.wrap(f"**{text}.**", 120)


def headline(figures):
    found = shown(figures)
    peers = {peer: name for peer, name in PEERS.items() if any(peer in rows for _, _, rows in found)}
    lines = []
    if found:
        body = []
        for model, gpu, rows in found:
            ours = rows["ours"]
            factors = (f"{rows[p]['tpot_ms'] / ours['tpot_ms']:.1f}x" if p in rows else "-" for p in peers)
            about = f"{ours['tpot_ms']:.2f}", f"{ours['decode_percent_of_read']:.0f} %"
            body.append([f"{model.title()}, {gpu.split()[1]}", *about, *factors])
        lines = unbroken(table(["model, GPU", "ms a token", "of the memory's speed", *peers.values()], body))
    more = [*four_bits(figures), *many_prompts(figures)]
    return lines + [""] * bool(lines and more) + textwrap.wrap(" ".join(more), 120)


def one_token(report):
    """The first row of a program's report of one sequence behind the prompt that the headline shows."""
    sizes = 1, model_peers.SHOWN_PROMPT_LEN
    return next((r for r in report["results"] if (r["slots"], r["prompt_len"]) == sizes), None) if report else None


def four_bits(figures):
    found = [(m, row) for m in (*MODELS, *LLAMAS) if (row := one_token(figures[f"model-{m}-gptq"]))]
    takes = (f"{model.title()} {row['tpot_ms']:.2f} ms" for model, row in found)
    return [f"With weights of 4 bits (GPTQ) a token takes {' and '.join(takes)}."] if found else []


def many_prompts(figures, model="pythia-2.8b"):
    report = figures[f"model-{model}-slots"]
    if not report:
        return []
    most = max(report["results"], key=lambda r: (r["slots"], r["new_tokens"]))
    prompts = f"{most['slots']} prompts of {most['prompt_len']} ids"
    return [f"With {prompts} at once {model.title()} makes {most['tokens_per_s']:,.0f} tokens a second."]


def ways_to_step(figures):
    lines, rows, sources = [], [], []
    for model in (*MODELS, *LLAMAS):
        steps = figures.steps(f"stack-{model}")
        if not steps:
            continue
        sources.append(f"stack-{model}")
        for kv_len in sorted({kv_len for _, _, kv_len in steps}):
            rows.append([model, str(kv_len), *(share(steps.get((impl, 1, kv_len))) for impl in IMPLS)])
    lines += table(["all layers, batch 1 [ms]", "kv_len", *(f"`{impl}`" for impl in IMPLS)], rows)
    return [*lines, "", figures.sources(sources), *both_ways(figures, "all layers [ms]", "h100", MODELS)]


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
            sources.append(name)
    if not rows:
        return []
    return ["", *table([header, "GPU", "kv_len", "`graph`", "`persistent`"], rows), "", figures.sources(sources)]


def batches(figures):
    rows, sources = [], []
    for batch in (1, 2, 4, 8, 16, 64):
        name = "stack-pythia-2.8b" + (f"-batch-{batch}" if batch > 1 else "")
        steps = figures.steps(name)
        if steps:
            both = (share(steps.get((impl, batch, 128))) for impl in ("graph", "persistent"))
            rows.append([f"Pythia-2.8B, {batch}", *both])
            sources.append(name)
    if llamas := figures["llama-batches"]:
        for row in llamas["rows"]:
            times = (f"{row[key] * 1e-3:.3f}" for key in ("graph_us", "persistent_us"))
            rows.append([f"{row['model'].title()}, {row['batch']}", *times])
        sources.append("llama-batches")
    if not rows:
        return ["Not recorded."]
    return [*table(["sequences at once", "`graph` [ms]", "`persistent` [ms]"], rows), "", figures.sources(sources)]


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
        sources += [f"stack-{model}-gptq", f"gptq-linears-{model}"]
    headers = [
        "int4, group 128",
        "`graph` [ms]",
        "faster than float16",
        "four products [us]",
        "of eight sequences [us]",
    ]
    lines = [*table(headers, rows), "", figures.sources(sources)] if rows else ["Not recorded."]
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
    source = figures.sources(["gptq-graph-tried"])
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
    return [*table(headers, rows), "", figures.sources(["shared-keys-graph"])]


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
    return [*table(headers, rows), "", figures.sources(["first-tokens"])]


def ablation(figures):
    report = figures["ablation-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    found = {}
    for a in report["ablations"]:
        for v in a["variants"]:
            if "median_us" in v:
                key = v.get("choice", v.get("part")), v.get("value", v.get("variant"))
                found.setdefault(key, {})[programs.kv_len_of(a)] = v
    kv_lens = [programs.kv_len_of(a) for a in report["ablations"]]
    rows = [[part, value, *(f"{of[k]['ratio']:.2f}x" if k in of else "-" for k in kv_lens)]
            for (part, value), of in found.items()]  # fmt: skip
    lines = [
        f"| choice | instead | {' | '.join(f'kv_len {k}' for k in kv_lens)} |",
        "|---|---|" + "---:|" * len(kv_lens),
    ]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), "", figures.sources(["ablation-pythia-2.8b"])]


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
            figures.sources(["layer-waits"])]  # fmt: skip


def growth(figures):
    report = figures["growth-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    lines = [
        f"- {heading}: {plot_bench.line_text(unit, points)}" for heading, unit, points in plot_bench.growths(report)
    ]
    return [*lines, "", "![A step's time against layers and kv_len](growth-pythia-2.8b.svg)", "",
            figures.sources(["growth-pythia-2.8b"])]  # fmt: skip


def peers(figures):
    lines = []
    for model in ("pythia-2.8b", "pythia-6.9b"):
        parts = {"": f"![A layer's time]({model}-layer.svg)", "kernel-peers-": ""}
        for part, picture in parts.items():
            name = part + model
            report = figures[name]
            if not report:
                continue
            # The kernels' own run is the later one.
            kernels = None if part else figures["kernel-peers-" + model]
            without = [what for what, rows in kernels["results"].items() if rows] if kernels else []
            _, _, *tables = plot_bench.tables(os.path.join(figures.directory, f"{name}.json"), without)
            lines += [f"### {model.title()}, kernels" if part else f"### {model.title()}", "", *tables, ""]
            report = report | {"results": {k: rows for k, rows in report["results"].items() if k not in without}}
            lines += [f"{versions(report)}. {figures.sources([name])}", "", *no_share(report)]
            if any("code_lines" in row for rows in report["results"].values() for row in rows):
                lines += [PEERS_OF_KERNELS, ""]
            lines += [picture, ""] * bool(picture)
    return lines


def versions(report):
    return ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def no_share(report):
    """Why rows have no share of the memory's speed, where there are such."""
    rows = (row for rows in report["results"].values() for row in rows if row["system"].startswith("cf-op"))
    if not any("limit_note" not in row and plot_bench.of_floor(row) > 100 for row in rows if "median_us" in row):
        return []
    probes = [p["copy_best_gb_per_s"] for p in report["programs"] if "copy_best_gb_per_s" in p]
    return [f"No share: the op was faster than the copy that this early run took for the memory's speed, "
            f"{max(probes):.0f} GB/s.", ""]  # fmt: skip


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
        about = f"{report['threads']} threads of {report['cpu']}, {report['weights']}. {figures.sources([name])}"
        lines += [about, "", *model_table(report["results"]), ""]
    return lines[:-1]


def cpu_busy(figures):
    report = figures["busy-cpu"]
    if not report:
        return ["Not recorded."]
    rows = [
        [r["model"], r["waits"], f"{r['alone_ms']:.2f}", f"{r['busy_ms']:.2f}", f"{r['ratio']:.1f}x"]
        for r in report["results"]
    ]
    about = f"{report['threads']} threads of {report['cpu']}, {report['busy_loops']} loops that never wait beside them."
    headers = ["model", "threads that wait", "alone, ms a token", "beside the loops", "ratio"]
    return [f"{about} {figures.sources(['busy-cpu'])}", "", *table(headers, rows)]


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
        sources.append(f"[`quality-{name}.json`](quality-{name}.json), commit {commit}")
    if not rows:
        return ["Not recorded."]
    headers = ["text", "run", "KL from float64", "KL, 99.9 %", "perplexity", "from float64's", "logits' relative L2"]
    return [*table(headers, rows), "", "; ".join(sources) + "."]


def measured(report):
    """A report of peers or of the package without the rows of what was not measured."""
    rows = {what: [row for row in rows if "error" not in row] for what, rows in report["results"].items()}
    return report | {"results": rows}


def whole_models(figures, names):
    """One table of cf-model's tokens of these records."""
    rows, sources = [], []
    for name in names:
        if report := figures[f"model-{name}"]:
            dtype = report["activation_dtype"] + (", weights of 4 bits" if "-gptq" in name else "")
            rows += [{"model": report["model"].title(), "dtype": dtype} | row for row in report["results"]]
            sources.append(f"model-{name}")
    return [*model_table(rows), "", figures.sources(sources), ""] if rows else []


def beside_others(figures):
    """A table for each GPU of the models that ran beside others."""
    found = {}
    for name in (*MODELS, *LLAMAS):
        for file in (f"model-peers-{name}", f"model-peers-{name}-h100"):
            if report := figures[file]:
                found.setdefault(report["gpu"], {})[file] = measured(report)
    lines = []
    for gpu, reports in found.items():
        rows = [model_peers.table(report["results"]["model"]) for report in reports.values()]
        lines += [*rows[0], *(row for of_one in rows[1:] for row in of_one[2:]), ""]
        with_versions = {}
        for file, report in reports.items():
            with_versions.setdefault(versions(report), []).append(file)
        about = " ".join(f"With {of}: {figures.sources(files)}" for of, files in with_versions.items())
        lines += [f"On an {gpu}. {about}", ""]
    return [BESIDE_OTHERS, "", *lines] if lines else []


def gpu_model(figures):
    single = whole_models(figures, ("pythia-2.8b", "pythia-2.8b-gptq", "pythia-6.9b", *OTHER_FAMILIES))
    several = whole_models(figures, ("pythia-2.8b-slots", "pythia-2.8b-gptq-slots", "llama-3.1-8b-slots"))
    lines = [*single, *["Several prompts go through the model one after the other.", ""] * bool(several), *several]
    if several and not figures["model-llama-3.1-8b-slots"]:
        lines += ["Llama's tokens with 8 to 64 slots are not recorded; its layers with 2 to 8 sequences are, under "
                  "[Several sequences](#several-sequences).", ""]  # fmt: skip
    if report := figures["load-pythia-2.8b"]:
        (sequence,) = report["sequences"]
        ms = 1e3 * sequence["first_token_s"]
        first = f"opened in {report['load_s']:.2f} s, first id {ms:.1f} ms after that"
        what = f"{report['model'].title()} from files in the page cache, a prompt of {len(sequence['prompt'])} ids"
        lines += [f"{what}: {first}. {figures.sources(['load-pythia-2.8b'])}", ""]
    lines += beside_others(figures)
    return lines[:-1] or ["Not recorded."]


def python(figures):
    """The package's calls, and how many times its time a token Hugging Face takes."""
    report = figures["python-pythia-2.8b"]
    if not report:
        return ["Not recorded."]
    report = measured(report)
    picture = ["![Milliseconds a token from Python](python-pythia-2.8b.svg)", ""] if report["results"]["model"] else []
    about = [f"{versions(report)}. {figures.sources(['python-pythia-2.8b'])}", ""]
    port = figures["python-port-pythia-2.8b"]
    if not port:
        return [*about, *picture, *bench_python.tables(report)]
    rest = report | {"results": report["results"] | {"clusterfusion": []}}
    of_port = ["", figures.sources(["python-port-pythia-2.8b"]), "", *bench_python.tables(measured(port))]
    return [*about, *picture, *bench_python.tables(rest), *of_port]


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
    "launches it (`apps/peers/triton_kernels.py`), and of our kernel's file with all that it includes of its family and "
    "of `cuda/device`."
)

BESIDE_OTHERS = (
    "Beside others, each model in one run in its own 16 bits. hf_generate is transformers' generate(), "
    "hf_static_compile the same model with a static cache and compiled steps; torch_graph is torch's operators in a "
    "CUDA graph for every step, torch_graphs in one for each kv_len. What did not run in the time that it was given "
    "has no row. The last column counts the greedy ids of one prompt that are generate()'s with the same weights; it "
    "names the model where that is a smaller one. The weights are random, so that the best two logits often lie close "
    "together; where ids part, both systems go on from another text. Then the column says, where it is recorded, how "
    "far float64 puts generate()'s id above the other one, beside the error of Hugging Face's own logits: where that "
    "error is larger, 16 bits cannot say which of the two is right."
)

PAGE = """# Recorded figures

Made from the JSON files beside this page by `apps/bench_page.py data/bench README.md`. `scripts/bench_gpu data/bench`
records them again, but for those of trial builds, in about half an hour, and needs a GPU with 80 GB, torch,
transformers and matplotlib; [Commands](#commands) has each file's own.

The GPU is an {gpu} where no other is named.

{contents}

## How to read them

Weights come cold from memory. A percentage is the share of the compulsory bytes' time at the best streaming read of the
same run, a kernel that reads 2 GiB once; of an op that writes a fifth or more of its bytes, at the best copy by a
kernel. A share above 100 % names its cause in its row, such as tensors that stay in the L2. A peer's factor is its time
over our fastest in the same run; a dash is what was not measured or did not finish.

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
tensors; a layer's and a step's time from call to call has the device's work in it. The column of ids is that of
[whole models](#tokens-from-a-whole-model).

{python}

## How far tokens are from float64

The held-out text of the small trained model: 32,768 ids in windows of 512, one id after the other as a decoder takes
them, against the same stored weights in float64; dequantised ones where they are quantised. Hugging Face's runs take a
window at once. `scripts/bench_gpu --only quality data/bench` records them again.

{quality}

## Several sequences

All layers, kv_len 128. The sequences share one pass over the weights.

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

Layers and kernels. torch_ops is torch op by op, torch_graph the same captured in a CUDA graph, hf_eager a layer of
transformers, hf_compile the same with a static cache and torch.compile.

{peers}
## The CPU backend, one layer

{cpu}

## The CPU backend, tokens from a whole model

{cpu_model}

## The CPU backend on a busy machine

OpenMP's threads wait for each other between the parts of a token. By *default* the programs let them spin for
microseconds and sleep then. *sleep*: `OMP_WAIT_POLICY=PASSIVE`, they sleep at once. *spin*: `GOMP_SPINCOUNT=300000`,
GCC's own default, they spin for milliseconds.

{cpu_busy}

## Commands

From the root of a clone. The programs are those of `scripts/layer`, in `build/release`.

{commands}
"""


def wrapped(line):
    """Breaks a line into lines of at most 120 columns. A table's row stays whole."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def typed(name, command):
    """The lines to type for a file: the recorded command with the programs of this tree, and the file as what it
    writes."""
    program, *words = shlex.split(command)
    program = os.path.basename(program)
    lines, kept = [], []
    while words:
        word = words.pop(0)
        if word == "--json":
            words[0] = f"data/bench/{name}.json"
        if word in ("--cf-model", "--cf-layer", "--cf-op"):  # their defaults
            words.pop(0)
            continue
        if word == "--model" and os.path.isabs(words[0]):
            preset = os.path.basename(words[0])
            lines.append(f"golden/tools/make_checkpoints.py --preset {preset} --out {words[0]}")
        kept += [word, words.pop(0)] if word in ("--json", "--model") else [word]
    folder = "apps" if program.endswith(".py") else "build/release/apps"
    return [*lines, shlex.join([f"{folder}/{program}", *kept])]


def commands(figures):
    """Those of the files that the page has named so far."""
    found = {name: figures[name]["command"] for name in figures.named}
    trials = {name: command for name, command in found.items() if re.search(OF_EACH_ROW, command)}
    lines = [line for name, command in found.items() if name not in trials for line in typed(name, command)]
    text = ["```sh", *lines, "```"] if lines else []
    if trials:
        text += ["", "Of several runs each, some of them of trial builds, whose changes are not in the tree. Capitals "
                 "stand for what differs from row to row:", ""]  # fmt: skip
        text += [f"- `{name}.json`: `{command}`" for name, command in trials.items()]
    return text or ["Not recorded."]


def contents(text):
    """A line for each of a page's headings."""
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    return "\n".join(f"- [{h}](#{re.sub('[^a-z0-9 -]', '', h.lower()).replace(' ', '-')})" for h in headings)


def page(figures):
    parts = (ways_to_step, gpu_model, first_tokens, python, quality, batches, shared_keys, quantised, gptq_tried,
             ablation, waits, timeline, growth, peers, cpu, cpu_model, cpu_busy, commands)  # fmt: skip
    made = {part.__name__: "\n".join(part(figures)) for part in parts}
    text = PAGE.format(**made, gpu=figures.gpu, contents=contents(PAGE))
    code, lines = False, []
    for line in text.split("\n"):
        code ^= line.startswith("```")
        lines.append(line if code else wrapped(line))
    return "\n".join(unbroken(lines))


def marks(block):
    """What stands before and behind a block that this program writes."""
    return f"<!-- {block}: written by apps/bench_page.py -->", f"<!-- {block} ends -->"


def with_block(text, block, lines):
    """The text with the lines between a block's two marks."""
    begin, end = marks(block)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise Refusal(f"expected one '{begin}' and behind it one '{end}'")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return before + begin + "\n" + "\n".join(lines) + "\n" + after


def updated(path, blocks):
    """A file's text with the lines of each block between its marks."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for block, lines in blocks.items():
            text = with_block(text, block, lines)
        return text
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal}") from None


def front(figures):
    """The blocks of the project's README."""
    return {"result": result(figures), "headline": headline(figures)}


def write(path, text):
    with golden_file.atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    print(path)


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="where the recorded files are")
    parser.add_argument("readme", metavar="README", help="the file that has the marks of result and headline")
    parser.add_argument("python", metavar="PYTHON_README", nargs="?", help="the package's, with the headline's marks")
    try:
        args = parser.parse_args(argv)
        if not os.path.isdir(args.directory):
            raise Refusal(f"{args.directory}: no such directory")
        figures = Figures(args.directory)
        texts = {args.readme: updated(args.readme, front(figures))}
        if args.python:
            lines = python_headline(figures, os.path.dirname(args.python))
            texts[args.python] = updated(args.python, {"headline": lines})
        write(os.path.join(args.directory, "README.md"), page(figures))
        for path, text in texts.items():
            write(path, text)
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
