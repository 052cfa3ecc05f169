"""Whole models beside cf-model: the prompts' pass and the steps after it, from ids on the host to ids on the host, by
Hugging Face and by torch alone. A preset of any family runs in its own dtype. bench_peers.py --what model runs them. To
import this needs no torch.

A peer is a function of a Hugging Face model and a Load. It returns a callable that runs the load once and returns its
Stream. What a careful user prepares once, such as graphs and compiled code, is made before or in the first run.
"""

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import families
import hf_model
import model_config
import procedural
from peers.hf_continuous import hf_continuous

SIZES = ("slots", "prompt_len", "new_tokens")
# The prompt behind which a token is the one that the front page and its picture show.
SHOWN_PROMPT_LEN = 512
TIMES = ("ttft_ms", "tpot_ms", "total_ms")
WEIGHTS_SEED = 0


@dataclass(frozen=True)
class Load:
    """As many prompts as slots, all of one length, and as many new tokens for each: those of cf-model bench."""

    slots: int
    prompt_len: int
    new_tokens: int

    @property
    def capacity(self):
        """The cache entries of a slot. The last token is not appended."""
        return self.prompt_len + self.new_tokens - 1

    def prompts(self, vocab_size):
        """The ids of each slot's prompt, those of apps/bench/model_bench.cpp."""
        return [
            [((i + 1) * 2654435761 + slot * 40503) % 2**64 % vocab_size for i in range(self.prompt_len)]
            for slot in range(self.slots)
        ]


class Stream:
    """Ids as they reach the host, all slots' at a time, and when: milliseconds since the stream was made."""

    def __init__(self):
        self.ids, self.times_ms = [], []
        self.start_s = time.perf_counter()

    def put(self, ids):
        self.ids.append(ids.flatten().tolist())  # waits for the GPU
        self.times_ms.append((time.perf_counter() - self.start_s) * 1e3)

    def end(self):
        """Part of the interface of transformers' streamers."""

    def of_slot(self, slot):
        return [ids[slot] for ids in self.ids]


# --- rows ---


def work(row):
    """The work that a row was timed on. Only rows of the same work are compared."""
    return tuple(row[key] for key in ("preset", *SIZES))


def is_ours(row):
    return row["system"].startswith("cf-")


def figures(runs_ms, load):
    """The fields of a row, from each run's times of its steps' ids; defined as in cf-model bench."""
    ttft, total = (float(np.median([times[place] for times in runs_ms])) for place in (0, -1))
    found = {"ttft_ms": ttft, "tpot_ms": (total - ttft) / max(1, load.new_tokens - 1), "total_ms": total}
    if gaps := [gap for times in runs_ms for gap in np.diff(times)]:
        p50, p99 = np.percentile(gaps, (50, 99))
        found |= {"inter_token_p50_ms": float(p50), "inter_token_p99_ms": float(p99)}
    return found | {"tokens_per_s": 1e3 * load.new_tokens * load.slots / total}


def program_rows(report, preset):
    """cf-model bench's results as rows."""
    keys = (*SIZES, *TIMES, "inter_token_p50_ms", "inter_token_p99_ms", "tokens_per_s", "decode_percent_of_read")
    return [
        {"preset": preset, "system": "cf-model " + r["impl"]} | {key: r[key] for key in keys} for r in report["results"]
    ]


def agreement(ids, reference):
    """How far greedy ids are those of a reference."""
    if len(ids) != len(reference):
        raise RuntimeError(f"expected {len(reference)} ids, got {len(ids)}")
    same = [a == b for a, b in zip(ids, reference)]
    return {
        "of": len(same),
        "equal": sum(same),
        "equal_fraction": sum(same) / len(same),
        "first_divergence": None if all(same) else same.index(False),
        # Random weights soon repeat an id, so that fewer choices than ids are compared.
        "distinct_ids": len(set(reference)),
    }


def margin(hf, prompt, ids, reference):
    """The agreement of greedy ids with those of a model's generate(). Where they part, also how far float64 puts the
    two ids apart there, `margin`: the reference's logit less the other's; and `own_error`: how far the model's own
    logits are from float64's at most. What the memory has no room for is left out."""
    found = agreement(ids, reference)
    if (first := found["first_divergence"]) is None:
        return found
    import torch

    try:
        wide = hf_model.random_causal(model_of(hf), "float64", hf_model.attention_implementations()[-1], hf.device)
        wide.load_state_dict(hf.state_dict())
        tokens = torch.tensor([[*prompt, *reference[:first]]], device=hf.device)
        with torch.no_grad():
            own, exact = (m(tokens, use_cache=False).logits[0, -1].double() for m in (hf, hf_model.widen_norms(wide)))
    except torch.OutOfMemoryError:
        return found
    theirs, ours = exact[[reference[first], ids[first]]].tolist()
    return found | {"margin": theirs - ours, "own_error": (own - exact).abs().max().item()}


def with_ratios(rows):
    """The rows, each peer's with its times over those of our fastest on the same work."""
    ours = {}
    for row in rows:
        if is_ours(row) and "total_ms" in row:
            ours[work(row)] = min(row, ours.get(work(row), row), key=lambda r: r["total_ms"])
    found = []
    for row in rows:
        if not is_ours(row) and "total_ms" in row and work(row) in ours:
            mine = ours[work(row)]
            row = row | {"ours": mine["system"]}
            row |= {key.replace("_ms", "_ratio"): row[key] / mine[key] for key in TIMES if mine[key]}
        found.append(row)
    return found


def shown_token(report):
    """A report's rows {system: row} of one sequence behind SHOWN_PROMPT_LEN ids, of which the fastest of ours is called
    ours; nothing where that was not measured."""
    rows = [r for r in report["results"]["model"] if (r["slots"], r["prompt_len"]) == (1, SHOWN_PROMPT_LEN)]
    rows = sorted((r for r in rows if "tpot_ms" in r), key=lambda r: r["tpot_ms"], reverse=True)
    found = {"ours" if is_ours(r) else r["system"]: r for r in rows}
    return found if "ours" in found else {}


def agreement_text(row):
    """A row's agreement with Hugging Face, as a table's cell."""
    found = row.get("agreement")
    if not found:
        return ""
    if "error" in found:
        return found["error"]
    text = f"{found['equal']} of {found['of']}"
    if found["first_divergence"] is not None:
        text += f", first other {found['first_divergence']}"
        if "margin" in found:
            text += f": float64 has {found['margin']:.2g} between them, 16 bits an error of {found['own_error']:.2g}"
    return text + (f" ({found['preset']})" if found["preset"] != row["preset"] else "")


def table(rows):
    """The lines of a Markdown table of rows that have their ratios."""
    headers = ["preset", "system", "slots", "prompt", "new", "TTFT ms", "of ours", "TPOT ms", "of ours", "tokens/s"]
    lines = ["| " + " | ".join([*headers, "ids as hf_generate's"]) + " |"]
    lines.append("|---|---|" + "---:|" * (len(headers) - 1))
    for row in sorted(rows, key=work):
        cells = [row["preset"], row["system"], *(str(row[key]) for key in SIZES)]
        if "total_ms" in row:
            for key in ("ttft", "tpot"):
                cells.append(f"{row[key + '_ms']:.2f}")
                cells.append(f"{row[key + '_ratio']:.2f}x" if key + "_ratio" in row else "")
            cells += [f"{row['tokens_per_s']:.1f}", agreement_text(row)]
        else:
            cells += [row["error"], "", "", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# --- torch ---


def random_model(preset, device="cuda"):
    """Hugging Face's model of the preset with random weights of the preset's dtype, made on the device."""
    import torch

    torch.manual_seed(1)
    return hf_model.random_causal(model_config.PRESETS[preset], model_config.PRESET_DTYPES[preset], "sdpa", device)


def procedural_weights(preset):
    """Name -> array as a checkpoint stores it, of the weights that cf-model makes for the preset. It makes q, k and v as
    one matrix, and gate and up as another. All cores make them."""
    model, dtype = model_config.PRESETS[preset], model_config.PRESET_DTYPES[preset]
    shapes = model_config.model_shapes(model)
    joined = families.join_shapes(model.names, shapes)
    with ThreadPoolExecutor() as pool:
        arrays = pool.map(lambda name: procedural.weight(dtype, joined[name], WEIGHTS_SEED, name), joined)
        return families.split(model.names, dict(zip(joined, arrays)), shapes)


def procedural_model(preset, device="cuda"):
    """The same with the weights that cf-model makes for the preset, bit by bit."""
    model, dtype = model_config.PRESETS[preset], model_config.PRESET_DTYPES[preset]
    return hf_model.build_causal(model, procedural_weights(preset), dtype, dtype, "sdpa", device, made_on=device)


def model_of(hf):
    """The golden tools' Model of a Hugging Face model: its names, sizes and arithmetic."""
    return model_config.parse_config(hf.config.to_json_string(use_diff=False), "transformers")


def host_prompts(hf, load):
    import torch

    return torch.tensor(load.prompts(hf.config.vocab_size))


def hf_generate(hf, load):
    prompts = host_prompts(hf, load)
    # No id ends a sequence. With an id that does, min_new_tokens would forbid it, and so choose other ids than we do.
    hf.generation_config.eos_token_id = None

    def run():
        stream = Stream()
        ids = prompts.to(hf.device)
        mask = ids.new_ones(ids.shape)
        hf.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=load.new_tokens, streamer=stream)
        del stream.ids[0], stream.times_ms[0]  # the prompts, which generate() puts first
        return stream

    return run


def hf_static_compile(hf, load):
    """The prompts go through the model as it is, as transformers advises; the steps are compiled."""
    import torch
    from transformers import StaticCache

    prompts = host_prompts(hf, load)
    cache = StaticCache(config=hf.config, max_cache_len=load.capacity)
    kept = {hf_model.cache_name(hf): cache}

    def forward(ids):
        return hf(input_ids=ids, **kept, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    torch._dynamo.reset()
    decode = torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def run():
        if any(layer.is_initialized for layer in cache.layers):
            cache.reset()
        stream = Stream()
        with torch.no_grad():
            ids = forward(prompts.to(hf.device))
            stream.put(ids)
            for _ in range(load.new_tokens - 1):
                torch.compiler.cudagraph_mark_step_begin()
                ids = decode(ids).clone()  # the graph's own output is overwritten by the next step
                stream.put(ids)
        return stream

    return run


def torch_norm(model, x, module):
    """LayerNorm, or RMSNorm where the model's family has it."""
    import torch.nn.functional as F

    if hf_model.has_rms_norms(model):
        return F.rms_norm(x, x.shape[-1:], module.weight, model.layer_norm_eps)
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, model.layer_norm_eps)


def torch_linear(x, module):
    import torch.nn.functional as F

    return F.linear(x, module.weight, module.bias)


def rotate(x, cos, sin):
    """RoPE of x (..., tokens, head_dim) over its first cos.shape[-1] elements."""
    import torch

    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def attend_prompts(q, k, v):
    """sdpa of whole prompts without a cache."""
    import torch.nn.functional as F

    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def attend_one(q, k, v, mask=None):
    """sdpa of one new token a sequence. Heads that share keys and values are given as that many tokens of one head, so
    that a kernel that knows no groups takes them without copies of the cache."""
    import torch.nn.functional as F

    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


class TorchLayer:
    """A layer by torch's operators, as its family computes it, with the products that checkpoints store."""

    def __init__(self, model, layer):
        def modules(*names):
            return [layer.get_submodule(name) for name in names]

        names, self.model = model.names, model
        self.norms = modules("input_layernorm", "post_attention_layernorm")
        self.qkv, self.mlp = modules(*names.qkv_parts), modules(*names.mlp_parts)
        self.dense, self.down = modules(names.dense, names.down)

    def heads_of(self, products):
        """q, k and v, (batch, heads, tokens, head_dim) each, from their products, or one in which a head's lie side by
        side."""
        by_head = [p.unflatten(-1, (-1, self.model.head_dim * 3 // len(products))).transpose(1, 2) for p in products]
        return by_head if len(by_head) == 3 else by_head[0].chunk(3, -1)

    def __call__(self, x, cos, sin, attend):
        """The layer's output of x (batch, tokens, hidden). attend(q, k, v), (batch, heads, tokens, head_dim) each,
        appends to the cache and returns the context."""
        import torch.nn.functional as F

        normed = torch_norm(self.model, x, self.norms[0])
        q, k, v = self.heads_of([torch_linear(normed, module) for module in self.qkv])
        context = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        attended = torch_linear(context.transpose(1, 2).flatten(2), self.dense)
        if not self.model.use_parallel_residual:
            x = attended + x
        normed = torch_norm(self.model, x, self.norms[1])
        act, *up = (torch_linear(normed, module) for module in self.mlp)
        act = F.silu(act) * up[0] if up else F.gelu(act)
        out = torch_linear(act, self.down)
        return out + attended + x if self.model.use_parallel_residual else out + x


class TorchModel:
    """The prompts' pass and a step by torch's operators, from ids in device memory to ids there. Both can be captured:
    whatever changes between two steps is in device memory."""

    def __init__(self, hf, load):
        import torch

        self.model, self.load = model_of(hf), load
        names, base = self.model.names, getattr(hf, self.model.names.base)
        self.embedding, self.head = hf.get_input_embeddings(), hf.get_output_embeddings()
        self.final_norm = hf.get_submodule(names.final_norm)
        self.layers = [TorchLayer(self.model, layer) for layer in base.layers]
        kind = {"device": hf.device, "dtype": hf.dtype}
        # sdpa copies a mask of another length before each use.
        capacity = -(-load.capacity // 16) * 16
        shape = (load.slots, self.model.kv_heads, capacity, self.model.head_dim)
        # Zeros: what a mask hides must be finite.
        self.caches = [tuple(torch.zeros(shape, **kind) for _ in range(2)) for _ in self.layers]
        self.entries = torch.arange(capacity, device=hf.device)
        tables = base.rotary_emb(self.caches[0][0], position_ids=self.entries[None])
        self.cos, self.sin = (t[0] for t in tables)
        self.position = torch.full((1,), load.prompt_len, device=hf.device)
        self.prompts = torch.zeros((load.slots, load.prompt_len), dtype=torch.long, device=hf.device)
        self.ids = torch.zeros((load.slots, 1), dtype=torch.long, device=hf.device)

    def _run(self, ids, cos, sin, attend):
        import torch.nn.functional as F

        x = F.embedding(ids, self.embedding.weight)
        for layer, cache in zip(self.layers, self.caches):
            x = layer(x, cos, sin, functools.partial(attend, cache))
        self.ids.copy_(torch_linear(torch_norm(self.model, x[:, -1:], self.final_norm), self.head).argmax(-1))

    def prefill(self):
        length = self.load.prompt_len

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side[:, :, :length] = new
            return attend_prompts(q, k, v)

        self._run(self.prompts, self.cos[:length], self.sin[:length], attend)
        self.rewind()

    def rewind(self):
        """The next step is the first one after the prompts."""
        self.position.fill_(self.load.prompt_len)

    def step(self):
        """A step at whatever position is next: attention reads the whole cache under a mask."""
        import torch

        cos, sin = (t.index_select(0, self.position) for t in (self.cos, self.sin))
        mask = torch.zeros(self.entries.shape, dtype=cos.dtype, device=cos.device)
        mask.masked_fill_(self.entries > self.position, float("-inf"))

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side.index_copy_(2, self.position, new)
            return attend_one(q, *cache, mask[None, None, None])

        self._run(self.ids, cos, sin, attend)
        self.position.add_(1)

    def step_of(self, kv_len):
        """The step of one kv_len alone: attention reads just its entries, without a mask."""
        last = slice(kv_len - 1, kv_len)

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side[:, :, last] = new
            return attend_one(q, *(side[:, :, :kv_len] for side in cache))

        self._run(self.ids, self.cos[last], self.sin[last], attend)


def replayed(model, prefill, steps, hf):
    """A run that replays the graph of the prompts' pass and one graph a step."""
    prompts = host_prompts(hf, model.load)

    def run():
        stream = Stream()
        model.prompts.copy_(prompts)
        prefill.replay()
        stream.put(model.ids)
        for graph in steps:
            graph.replay()
            stream.put(model.ids)
        return stream

    return run


def torch_graph(hf, load, captured):
    """One graph for the prompts' pass and one for every step."""
    model = TorchModel(hf, load)
    prefill = captured(model.prefill)
    steps = [captured(model.step, model.rewind)] * (load.new_tokens - 1) if load.new_tokens > 1 else []
    return replayed(model, prefill, steps, hf)


def torch_graphs(hf, load, captured):
    """One graph for the prompts' pass and one for each kv_len."""
    model = TorchModel(hf, load)
    kv_lens = range(load.prompt_len + 1, load.prompt_len + load.new_tokens)
    prefill, steps = captured(model.prefill), [captured(functools.partial(model.step_of, n)) for n in kv_lens]
    return replayed(model, prefill, steps, hf)


# In this order: the one that compiles for long comes last.
PEERS = {
    "hf_generate": lambda hf, load, captured: hf_generate(hf, load),
    "hf_continuous": lambda hf, load, captured: hf_continuous(hf, load, Stream),
    "torch_graph": torch_graph,
    "torch_graphs": torch_graphs,
    "hf_static_compile": lambda hf, load, captured: hf_static_compile(hf, load),
}


def timed(peer, hf, load, captured, runs, warmup):
    """The figures of `runs` runs after `warmup`, and the first slot's ids."""
    import torch

    run = PEERS[peer](hf, load, captured)
    streams = []
    try:
        for _ in range(warmup + runs):
            if hf.device.type == "cuda":
                torch.cuda.synchronize()
            streams.append(run())
            if len(streams[-1].ids) != load.new_tokens:
                raise RuntimeError(f"expected {load.new_tokens} new tokens, got {len(streams[-1].ids)}")
    finally:
        getattr(run, "end", lambda: None)()
    return figures([stream.times_ms for stream in streams[warmup:]], load), streams[-1].of_slot(0)
