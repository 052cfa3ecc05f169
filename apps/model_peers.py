"""Whole models beside cf-model: the prompts' pass and the steps after it, from ids on the host to ids on the host, by
Hugging Face and by torch alone. bench_peers.py --what model runs them. To import this needs no torch.

A peer is a function of a Hugging Face model and a Load. It returns a callable that runs the load once and returns its
Stream. What a careful user prepares once, such as graphs and compiled code, is made before or in the first run.
"""

import functools
import time
from dataclasses import dataclass

import numpy as np

import hf_model
import model_config
import procedural

SIZES = ("slots", "prompt_len", "new_tokens")
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
        # Random weights soon repeat an id: what is compared are not that many choices of their own.
        "distinct_ids": len(set(reference)),
    }


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
    """Hugging Face's model of the preset with random float16 weights, made on the device."""
    import torch

    torch.manual_seed(1)
    config = hf_model.transformers_config(model_config.PYTHIA_PRESETS[preset], "sdpa")
    with hf_model.default_dtype("float16"), torch.device(device):
        hf = hf_model.modeling().GPTNeoXForCausalLM(config)
    return hf_model.ready(hf, "float16", "sdpa", device)


def procedural_model(preset, device="cuda"):
    """The same with the weights that cf-model makes for the preset, bit by bit."""
    model = model_config.PYTHIA_PRESETS[preset]
    shapes = model_config.model_shapes(model)
    weights = {name: procedural.weight("float16", shape, WEIGHTS_SEED, name) for name, shape in shapes.items()}
    return hf_model.build_causal(model, weights, "float16", "float16", "sdpa", device)


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

    def forward(ids):
        return hf(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

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


def torch_norm(x, module):
    import torch.nn.functional as F

    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def torch_linear(x, module):
    import torch.nn.functional as F

    return F.linear(x, module.weight, module.bias)


def rotate(x, cos, sin):
    """RoPE of x (..., tokens, head_dim) over its first cos.shape[-1] elements."""
    import torch

    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, rest), -1)


def torch_layer(layer, x, heads, cos, sin, attend):
    """A layer of x (batch, tokens, hidden) by torch's operators. attend(q, k, v), (batch, heads, tokens, head_dim)
    each, appends to the cache and returns the context."""
    import torch.nn.functional as F

    qkv = torch_linear(torch_norm(x, layer.input_layernorm), layer.attention.query_key_value)
    q, k, v = qkv.view(*x.shape[:2], heads, -1).transpose(1, 2).chunk(3, -1)
    context = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    attended = torch_linear(context.transpose(1, 2).reshape(x.shape), layer.attention.dense)
    act = F.gelu(torch_linear(torch_norm(x, layer.post_attention_layernorm), layer.mlp.dense_h_to_4h))
    return torch_linear(act, layer.mlp.dense_4h_to_h) + attended + x


class TorchModel:
    """The prompts' pass and a step by torch's operators, from ids in device memory to ids there. Both can be captured:
    whatever changes between two steps is in device memory."""

    def __init__(self, hf, load):
        import torch

        c, self.base, self.head = hf.config, hf.gpt_neox, hf.get_output_embeddings()
        self.load, self.heads = load, c.num_attention_heads
        kind = {"device": hf.device, "dtype": hf.dtype}
        # sdpa copies a mask of another length before each use.
        capacity = -(-load.capacity // 16) * 16
        shape = (load.slots, self.heads, capacity, c.hidden_size // self.heads)
        # Zeros: what a mask hides must be finite.
        self.caches = [tuple(torch.zeros(shape, **kind) for _ in range(2)) for _ in self.base.layers]
        self.entries = torch.arange(capacity, device=hf.device)
        tables = self.base.rotary_emb(self.caches[0][0], position_ids=self.entries[None])
        self.cos, self.sin = (t[0] for t in tables)
        self.position = torch.full((1,), load.prompt_len, device=hf.device)
        self.prompts = torch.zeros((load.slots, load.prompt_len), dtype=torch.long, device=hf.device)
        self.ids = torch.zeros((load.slots, 1), dtype=torch.long, device=hf.device)

    def _run(self, ids, cos, sin, attend):
        import torch.nn.functional as F

        x = F.embedding(ids, self.base.embed_in.weight)
        for layer, cache in zip(self.base.layers, self.caches):
            x = torch_layer(layer, x, self.heads, cos, sin, functools.partial(attend, cache))
        self.ids.copy_(torch_linear(torch_norm(x[:, -1:], self.base.final_layer_norm), self.head).argmax(-1))

    def prefill(self):
        import torch.nn.functional as F

        length = self.load.prompt_len

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side[:, :, :length] = new
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        self._run(self.prompts, self.cos[:length], self.sin[:length], attend)
        self.rewind()

    def rewind(self):
        """The next step is the first one after the prompts."""
        self.position.fill_(self.load.prompt_len)

    def step(self):
        """A step at whatever position is next: attention reads the whole cache under a mask."""
        import torch
        import torch.nn.functional as F

        cos, sin = (t.index_select(0, self.position) for t in (self.cos, self.sin))
        mask = torch.zeros(self.entries.shape, dtype=cos.dtype, device=cos.device)
        mask.masked_fill_(self.entries > self.position, float("-inf"))

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side.index_copy_(2, self.position, new)
            return F.scaled_dot_product_attention(q, *cache, attn_mask=mask[None, None, None])

        self._run(self.ids, cos, sin, attend)
        self.position.add_(1)

    def step_of(self, kv_len):
        """The step of one kv_len alone: attention reads just its entries, without a mask."""
        import torch.nn.functional as F

        last = slice(kv_len - 1, kv_len)

        def attend(cache, q, k, v):
            for side, new in zip(cache, (k, v)):
                side[:, :, last] = new
            return F.scaled_dot_product_attention(q, *(side[:, :, :kv_len] for side in cache))

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
    "torch_graph": torch_graph,
    "torch_graphs": torch_graphs,
    "hf_static_compile": lambda hf, load, captured: hf_static_compile(hf, load),
}


def timed(peer, hf, load, captured, runs, warmup):
    """The figures of `runs` runs after `warmup`, and the first slot's ids."""
    import torch

    run = PEERS[peer](hf, load, captured)
    streams = []
    for _ in range(warmup + runs):
        if hf.device.type == "cuda":
            torch.cuda.synchronize()
        streams.append(run())
        if len(streams[-1].ids) != load.new_tokens:
            raise RuntimeError(f"expected {load.new_tokens} new tokens, got {len(streams[-1].ids)}")
    return figures([stream.times_ms for stream in streams[warmup:]], load), streams[-1].of_slot(0)
