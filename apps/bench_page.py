#!/usr/bin/env python3
"""Writes the page of recorded figures, DIR/README.md, from the JSON files in DIR that scripts/bench_gpu has made; in
README the result in words and the headline's table, each between its two marks; and where PYTHON_README is named the
package's headline between the same marks there:
  bench_page.py data/bench README.md python/README.md
With --records NEW_DIR the files of NEW_DIR first take the place of all that DIR has of a GPU. Files of two commits or
of two kinds of GPU are refused then, and nothing is changed.
Every table names its files. The commands stand at the page's end. Needs numpy, and no GPU.
"""

import os
import re
import shlex
import shutil
import sys
import textwrap

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import bench_python
import bench_record
import golden_file
import model_config
import plot_bench
from console import Refusal
from peers import int4_products, model_peers, programs

MODELS = ("pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b")
LLAMAS = ("llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-7b", "llama-3.1-8b")
OTHER_FAMILIES = (*LLAMAS, "llama-2.8b-shape", "llama-3.1-8b-gptq")
IMPLS = ("unfused", "graph", "split", "layer", "persistent")
# The headline's peers, by their names in records.
PEERS = {"torch_graph": "torch in CUDA graphs", "hf_static_compile": "torch.compile", "hf_generate": "`generate()`"}


class Figures:
    """The recorded files of a directory, by name without .json; None for one that is not there or has a fault alone."""

    def __init__(self, directory):
        self.directory, self.named = directory, []
        self.names = sorted(name.removesuffix(".json") for name in os.listdir(directory) if name.endswith(".json"))
        runs = self.runs()
        gpus = [gpu for gpu, _ in runs.values()]
        commits = {commit for _, commit in runs.values()}
        self.gpu = max(dict.fromkeys(gpus), key=gpus.count) if gpus else "GPU"
        self.commit = commits.pop() if len(commits) == 1 else None

    def runs(self):
        """{name: (GPU, commit)} of the files of a GPU."""
        found = {name: self[name] for name in self.names}
        return {
            name: (gpu, bench_record.commit_of(report))
            for name, report in found.items()
            if report and (gpu := bench_record.gpu_of(report))
        }

    def faults(self):
        """{name: why the measurement ended early}."""
        reports = {name: self.read(name) for name in self.names}
        return {name: report["error"] for name, report in reports.items() if "error" in report}

    def read(self, name):
        return plot_bench.read_json(os.path.join(self.directory, name + ".json"))

    def __getitem__(self, name):
        report = self.read(name) if name in self.names else {}
        return report if report.keys() - {"error"} else None

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
        return self.origin(name)

    def origin(self, name):
        """The same of a file that the page's commands do not have: more than one makes it."""
        report = self[name]
        gpu, commit = bench_record.gpu_of(report) or self.gpu, bench_record.commit_of(report)
        about = [f"commit {commit}"] * (commit != self.commit) + [gpu] * (gpu != self.gpu)
        return ", ".join([f"[`{name}.json`]({name}.json)", *about])

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
    """[(model, GPU, {system: row})] of the records with a whole token beside its peers, each of one run."""
    found = []
    for model in (*MODELS, *LLAMAS):
        report = figures[f"model-peers-{model}"]
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
            body.append([model.title() + f", {gpu}" * (gpu != figures.gpu), *about, *factors])
        headers = [f"on one {figures.gpu}", "ms a token", "of the memory's speed", *peers.values()]
        lines = unbroken(table(headers, body))
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
    return [*lines, "", figures.sources(sources)]


def both_ways(figures, header, kind, models):
    """A table of stack-MODEL-KIND.json: both fast ways to step a model."""
    rows, sources = [], []
    for model in models:
        name = f"stack-{model}-{kind}"
        steps = figures.steps(name)
        for batch, kv_len in sorted({(batch, kv_len) for _, batch, kv_len in steps}):
            both = (share(steps.get((impl, batch, kv_len))) for impl in ("graph", "persistent"))
            rows.append([model, str(kv_len), *both])
        if steps:
            sources.append(name)
    if not rows:
        return []
    return ["", *table([header, "kv_len", "`graph`", "`persistent`"], rows), "", figures.sources(sources)]


def batches(figures):
    rows, sources = [], []
    for batch in (1, 2, 4, 8, 16, 64):
        name = "stack-pythia-2.8b" + (f"-batch-{batch}" if batch > 1 else "")
        steps = figures.steps(name)
        if steps:
            both = (share(steps.get((impl, batch, 128))) for impl in ("graph", "persistent"))
            rows.append([f"Pythia-2.8B, {batch}", *both])
            sources.append(name)
    if not rows:
        return ["Not recorded."]
    return [*table(["sequences at once", "`graph` [ms]", "`persistent` [ms]"], rows), "", figures.sources(sources)]


def same_bits(figures):
    """Models with --invariant beside the same models without, each pair of one run."""
    rows, sources = [], []
    for model in (*MODELS, *LLAMAS):
        names = f"model-{model}-invariant", f"model-{model}-invariant-off"
        invariant, plain = (figures[name] for name in names)
        if not (invariant and plain):
            continue
        sources += names
        without = {(r["slots"], r["prompt_len"]): r for r in plain["results"]}
        for with_it in invariant["results"]:
            key = with_it["slots"], with_it["prompt_len"]
            if not (other := without.get(key)):
                continue
            times = []
            for time in ("ttft_ms", "tpot_ms"):
                ratio = with_it[time] / other[time]
                times += [f"{other[time]:.2f}", f"{with_it[time]:.2f} ({ratio:.2f}x)"]
            rows.append([model, *map(str, key), *times])
    headers = ["model", "slots", "prompt", "TTFT [ms]", "invariant", "TPOT [ms]", "invariant"]
    return [*table(headers, rows), "", figures.sources(sources)] if rows else ["Not recorded."]


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


def int4(figures):
    """A layer's four products with int4 weights beside others, and what float64 says of their outputs."""
    report = figures["int4-peers"]
    if not report:
        return ["Not recorded."]
    rows = report["results"]["int4"]
    systems, layers = int4_products.layer_rows(rows)

    def text(layer, system):
        time, ours = layer[system], layer.get(int4_products.OURS)
        if time is None:
            return "-"
        return f"{time:.1f}" + (f" ({time / ours:.2f}x)" if ours and system != int4_products.OURS else "")

    cells = [
        [layer["preset"].title(), str(layer["tokens"]), *(text(layer, system) for system in systems)]
        for layer in layers
    ]
    lines = table(["model", "tokens", *(f"{system}, us" for system in systems)], cells)
    about = f"With {versions(report)}: {figures.sources(['int4-peers'])}"
    return [*lines, "", about, "", "Against float64:", "", *int4_products.findings(rows)]


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


def model_table(results):
    """The rows of cf-model bench. On a GPU each has the impl of its steps, and beside other models its own. With
    --joiner-len a row has how long a prompt that joins stops the others."""
    names = {"model": "model", "dtype": "dtype", "impl": "impl"}
    names |= {"prompt_len": "prompt", "new_tokens": "new", "slots": "slots"}
    joiner = {"stall_ms": "stall ms", "joiner_ttft_ms": "joiner TTFT ms"}
    if not any("stall_ms" in r for r in results):
        joiner = {}
    texts = [key for key in names if key in results[0]]
    rows = [
        [
            *(str(r[key]) for key in texts),
            *(f"{r[key]:.{2 if 'impl' in r else 1}f}" for key in ("ttft_ms", "tpot_ms", "inter_token_p99_ms")),
            f"{r['tokens_per_s']:.1f}",
            f"{r['decode_percent_of_read']:.0f} %",
            *(f"{r[key]:.2f}" if key in r else "-" for key in joiner),
        ]
        for r in results
    ]
    headers = [*(names[key] for key in texts), "TTFT ms", "TPOT ms", "p99 ms", "tokens/s"]
    return table([*headers, "decode, of the streaming read", *joiner.values()], rows)


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
        sources.append(figures.origin(f"quality-{name}"))
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
    """A table of the models that ran beside others."""
    files = [f"model-peers-{name}" for name in (*MODELS, *LLAMAS)]
    reports = {file: measured(figures[file]) for file in files if figures[file]}
    if not reports:
        return []
    first, *rest = [model_peers.table(report["results"]["model"]) for report in reports.values()]
    lines = [BESIDE_OTHERS, "", *first, *(row for of_one in rest for row in of_one[2:]), ""]
    with_versions = {}
    for file, report in reports.items():
        with_versions.setdefault(versions(report), []).append(file)
    return [*lines, " ".join(f"With {of}: {figures.sources(files)}" for of, files in with_versions.items()), ""]


def gpu_model(figures):
    single = whole_models(figures, ("pythia-2.8b", "pythia-2.8b-gptq", "pythia-6.9b", *OTHER_FAMILIES))
    several = whole_models(figures, ("pythia-2.8b-slots", "pythia-2.8b-gptq-slots", "llama-3.1-8b-slots"))
    lines = [*single, *several]
    if report := figures["load-pythia-2.8b"]:
        (sequence,) = report["sequences"]
        ms = 1e3 * sequence["first_token_s"]
        first = f"opened in {report['load_s']:.2f} s, first id {ms:.1f} ms after that"
        what = f"{report['model'].title()} from files in the page cache, a prompt of {len(sequence['prompt'])} ids"
        lines += [f"{what}: {first}. {figures.sources(['load-pythia-2.8b'])}", ""]
    lines += beside_others(figures)
    return lines[:-1] or ["Not recorded."]


def many(figures):
    """Many sequences at once: prompts, a joiner, a thousand slots, scores, and Hugging Face beside."""
    lines = []
    for about, name in MANY:
        file = f"model-pythia-2.8b-{name}"
        if report := figures[file]:
            lines += [about, "", *many_table(report["results"]), "", figures.sources([file]), ""]
    file = "model-peers-pythia-2.8b-many"
    if report := figures[file]:
        rows = model_peers.table(measured(report)["results"]["model"])
        lines += ["Beside Hugging Face, in one run.", "", *rows, ""]
        lines += [f"With {versions(report)}: {figures.sources([file])}", ""]
    return lines[:-1] or ["Not recorded."]


def many_table(results):
    """The rows of cf-model bench; with --score those have other columns."""
    if "scored" not in results[0]:
        return model_table(results)
    names = {"prompt_len": "prompt", "scored": "ids scored", "slots": "slots", "texts": "texts", "score_ms": "score ms"}
    names |= {"prefill_ms": "prefill ms", "percent_of_prefill": "of the prefill's ids a second"}
    texts = {float: "{:.1f}".format, int: str}
    rows = [[texts[type(r[key])](r[key]) + " %" * (key == "percent_of_prefill") for key in names] for r in results]
    return table(list(names.values()), rows)


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


def users(figures):
    """The server beside the decoder alone, and what researchers ask of the package."""
    lines = []
    if serve := figures["serve-pythia-2.8b"]:
        alone, http, kill = (serve[part] for part in ("decoder", "http", "kill"))
        rows = [
            [what, *(f"{of[key]:,.{digits}f}" for of in (alone, http)), more]
            for what, key, digits, more in (
                ("ids a second", "ids_per_s", 0, f"{100 * serve['ids_per_s_over_decoder']:.0f} %"),
                ("ms to the first id, median", "ttft_ms_p50", 1, f"+ {serve['ttft_ms_more'][0]:.1f}"),
                ("ms to the first id, 99 %", "ttft_ms_p99", 1, f"+ {serve['ttft_ms_more'][1]:.1f}"),
            )
        ]
        after = (
            f"A worker that was killed under this load: its requests had all ended after {kill['all_ended_s']:.1f} s, and "
            f"the next answer came after {kill['next_answer_s']:.1f} s."
        )
        lines += [*table(["64 at once", "decoder alone", "over HTTP", "beside it"], rows), "", after, ""]
    if research := figures["research-pythia-2.8b"]:
        memorize, swap, taps = (research[part] for part in ("memorize", "swap", "taps"))
        rows = [
            [f"sequences a second, 32 ids in and 32 out, {memorize['slots']:,} at once",
             f"{memorize['sequences_per_s']:,.0f}", f"{100 * memorize['over_decoder_alone']:.0f} % of the decoder's alone"],
            ["s to swap to weights in the page cache", f"{min(swap['swap_s']):.2f}",
             f"{min(swap['copy_s']):.2f} where they were read meanwhile; a fresh load {swap['fresh_load_s']:.2f}"],
            [f"ids a second, {taps['taps']} residuals of each to a file, 16 bits", f"{taps['ids_per_s']:,.0f}",
             f"{100 * taps['over_prefill']:.0f} % of the prefill's; one residual {100 * taps['one_tap_over_prefill']:.0f} %"],
        ]  # fmt: skip
        lines += [*table(["what", "figure", "beside"], rows), ""]
    names = [name for name in ("serve-pythia-2.8b", "research-pythia-2.8b") if figures[name]]
    return [*lines, figures.sources(names)] if names else ["Not recorded."]


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

MANY = (
    (
        "64 prompts that are read together; TTFT is the time to the last one's first id. Then 63 sequences run when a "
        "prompt of 2,048 ids joins: *stall* is the longest time that they wait for an id.",
        "prompts",
    ),
    ("1,024 sequences in as many slots.", "thousand"),
    ("Long and short prompts with a contiguous cache a slot.", "contiguous"),
    ("The same with a cache in pages of 64 entries.", "pages"),
    ("Log-probabilities of the last ids of texts, beside a prefill of the same ids in the same run.", "score"),
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

Made from the JSON files beside this page by `apps/bench_page.py data/bench README.md python/README.md`.
`scripts/bench_gpu data/bench` records them again, in half an hour on one GPU and in 8 minutes on four. It needs 80 GB
of GPU memory, torch, transformers and matplotlib; [Commands](#commands) has each file's own.
[Trials](TRIALS.md) chose some of the numbers in the code, and [some figures of an H200](TRIALS.md#h200) are of
earlier commits.

The GPU is an {gpu} where no other is named. {commits} Figures of the CPU backend have a commit and a machine of their own.

{contents}

## How to read them

Weights come cold from memory. A percentage is the roofline's time over the measured time. The roofline is the memory's:
the time of the compulsory bytes at the best streaming read of the same run, a kernel that reads 2 GiB once; of an op
that writes a fifth or more of its bytes, at the best copy by a kernel. A row above 100 % names its cause, such as
tensors that stay in the L2. `2.7x`: the peer takes 2.7 times as long as our fastest in the same run. A dash is what was
not measured or did not finish.

Runs of one build differ, by 0.7 % for all layers of Pythia-2.8B in two runs on an H200 ([`layer-waits`](TRIALS.md#layer-waits)). So builds are compared in one run.

## Ways to step a model

{ways_to_step}

## Tokens from a whole model

TTFT is the time from the prompts to the last slot's first id, TPOT the time between a slot's ids after it, both by the
host's clock.

{gpu_model}

The second and the third token behind a short prompt take longer than the rest
([`first-tokens`](TRIALS.md#first-tokens)), and count in TPOT.

## Many at once

Pythia-2.8B, float16.

{many}

## From Python

`generate()` of transformers as it is (hf_generate) and with `cf_ops.hf.speed_up` (speed_up) beside `cf-model`, greedy.
Then calls of the package `cf_ops`: the host's time is the call's own, which launches and does not wait; ops have small
tensors; a layer's and a step's time from call to call has the device's work in it. The column of ids is that of
[whole models](#tokens-from-a-whole-model).

{python}

## Served, and asked by researchers

Pythia-2.8B, float16. `python -m cf_ops serve` with 64 clients on loopback for two minutes, beside the same load through
the decoder alone; then `memorize`, `swap` and `activations` of `cf_ops`. `scripts/bench_gpu --only users data/bench`
records them again, where the [server](../../python/SERVING.md) is installed.

{users}

## How far tokens are from float64

The held-out text of the small trained model: 32,768 ids in windows of 512, one id after the other as a decoder takes
them, against the same stored weights in float64; dequantised ones where they are quantised. Hugging Face's runs take a
window at once. `scripts/bench_gpu --only quality data/bench` records them again.

{quality}

## Several sequences

All layers, kv_len 128. All sequences' products read the weights once.

{batches}

## The price of the same bits

`cf-model bench` with `--invariant` and without. With it a token's bits are the same in chunks of any size, beside any
neighbours and with any number of slots ([which kernels](../../cuda/ops/linear/README.md#the-same-bits)). The prompts of
all slots are read together.

{same_bits}

## Quantised weights

GPTQ of 4 bits, kv_len 128. The four products of a layer run in a graph of 32 layers, those side by side that do not
wait for each other.

{quantised}

## Int4 products beside others

A layer's four products, each measured by itself with cold weights, added up. Weights are GPTQ's, of 4 bits in groups of
128; torch's int4 is its own format in bfloat16; cublaslt_float16 has weights of 16 bits. In brackets: over ours. cf_ops
is our Python package, whose outputs are checked; cf-op has the times of the same kernels.

{int4}

## What each choice of the persistent kernel is worth

Pythia-2.8B: a layer's time with one choice of the plan another way, over its time with the plan's own.

{ablation}

## How a step's time grows

{growth}

## Beside torch, cuBLAS and Hugging Face

Layers and kernels. torch_ops is torch op by op, torch_graph the same captured in a CUDA graph, hf_eager a layer of
transformers, hf_compile the same with a static cache and torch.compile.

{peers}
## The CPU backend, tokens from a whole model

{cpu_model}

## The CPU backend on a busy machine

OpenMP's threads wait for each other between the parts of a token. By *default* the programs let them spin for
microseconds and sleep then. *sleep*: `OMP_WAIT_POLICY=PASSIVE`, they sleep at once. *spin*: `GOMP_SPINCOUNT=300000`,
GCC's own default, they spin for milliseconds.

{cpu_busy}

## Not measured

{not_measured}

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
        if word == "--model" and program == "cf-model" and words[0] in model_config.PRESETS:  # a folder that was made
            lines.append(f"golden/tools/make_checkpoints.py --preset {words[0]} --out {words[0]}")
        kept += [word, words.pop(0)] if word in ("--json", "--model") else [word]
    folder = "apps" if program.endswith(".py") else "build/release/apps"
    return [*lines, shlex.join([f"{folder}/{program}", *kept])]


def commands(figures):
    """Those of the files that the page has named so far."""
    lines = [line for name in figures.named for line in typed(name, figures[name]["command"])]
    return ["```sh", *lines, "```"] if lines else ["Not recorded."]


def not_measured(figures):
    """The measurements that ended early, and why."""
    found = [f"- `{name}`: {fault}" for name, fault in figures.faults().items()]
    return found or ["All was measured."]


def commits(figures):
    """The one commit of all figures of a GPU; where there are several, that each table names its own."""
    if figures.commit:
        return f"The commit is {figures.commit}, and all figures are of one run of the script."
    return "Each table names the commit of its files; one run of the script gives all of them one."


def contents(text):
    """A line for each of a page's headings."""
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    return "\n".join(f"- [{h}](#{re.sub('[^a-z0-9 -]', '', h.lower()).replace(' ', '-')})" for h in headings)


def page(figures):
    parts = (ways_to_step, gpu_model, many, python, users, quality, batches, same_bits, quantised, int4, ablation, growth,
             peers, cpu_model, cpu_busy, not_measured, commands)  # fmt: skip
    made = {part.__name__: "\n".join(part(figures)) for part in parts}
    text = PAGE.format(**made, gpu=figures.gpu, commits=commits(figures), contents=contents(PAGE))
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


def refuse_mixed(figures):
    """Refuses a folder without records of a GPU, and records of several commits or kinds of GPU."""
    runs = figures.runs()
    if not runs:
        raise Refusal(f"{figures.directory}: expected records of a GPU, got none")
    for what, i in (("GPU", 0), ("commit", 1)):
        first = {}
        for name, run in runs.items():
            first.setdefault(run[i], name)
        if len(first) > 1:
            found = " and ".join(f"{value} ({name}.json)" for value, name in first.items())
            raise Refusal(f"{figures.directory}: expected records of one {what}, got {found}")


def take_records(source, directory):
    """Puts the records of `source` in the place of all of a GPU in `directory`, of failed measurements too."""
    new = Figures(source)
    refuse_mixed(new)
    if os.path.realpath(source) == os.path.realpath(directory):
        return
    old = Figures(directory)
    for name in {*old.runs(), *old.faults()}:
        os.remove(os.path.join(directory, name + ".json"))
    for name in new.names:
        shutil.copy(os.path.join(source, name + ".json"), directory)


def write(path, text):
    with golden_file.atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    print(path)


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="where the recorded files are")
    parser.add_argument("readme", metavar="README", help="the file that has the marks of result and headline")
    parser.add_argument("python", metavar="PYTHON_README", nargs="?", help="the package's, with the headline's marks")
    parser.add_argument(
        "--records", metavar="NEW_DIR", help="a folder whose files take the place of DIR's of a GPU before that"
    )
    try:
        args = parser.parse_args(argv)
        for directory in (args.directory, *[args.records] * bool(args.records)):
            if not os.path.isdir(directory):
                raise Refusal(f"{directory}: no such directory")
        if args.records:
            updated(args.readme, front(Figures(args.records)))  # a page without marks is refused before files go
            take_records(args.records, args.directory)
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
