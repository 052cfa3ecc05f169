"""A decode step of all layers by each peer that makes one."""

import statistics

import model_config
from peers.hf_stack import hf_stack
from peers.timing import one_line, spread
from peers.torch_stack import torch_stack

STACK_PEERS = ("torch_ops", "torch_graph", "hf_eager", "hf_compile")
COMPILE_MODES = ("reduce-overhead", "max-autotune-no-cudagraphs")


def build_model(preset, device="cuda"):
    """Hugging Face's model of the preset with random float16 weights, sdpa, and a vocabulary that no step reads."""
    from dataclasses import replace

    import torch
    from transformers import GPTNeoXConfig, GPTNeoXModel

    model = replace(model_config.PYTHIA_PRESETS[preset], vocab_size=8)
    config = GPTNeoXConfig(**model.hf_fields(), bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            return GPTNeoXModel(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


class Step:
    """One decode step's inputs: the hidden state, its position, each layer's old cache entries."""

    def __init__(self, hf, batch, kv_len):
        import torch

        c, parameter = hf.config, next(hf.parameters())
        self.kv_len, self.batch = kv_len, batch
        self.heads, self.head_dim = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        kind = {"device": parameter.device, "dtype": parameter.dtype}
        self.hidden = torch.randn(batch, 1, c.hidden_size, **kind)
        self.position = torch.full((batch, 1), kv_len - 1, device=parameter.device)
        shape = (batch, self.heads, kv_len - 1, self.head_dim)
        self.past = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in hf.layers]


def relative_l2(got, reference):
    return float((got.double() - reference.double()).norm() / reference.double().norm())


def check_same(hf, step):
    """Refuses to time two stacks that do not compute the same."""
    import torch
    from transformers import DynamicCache

    run, _ = hf_stack(hf, step, DynamicCache)
    with torch.no_grad():
        mine = hf.final_layer_norm(torch_stack(hf, step)())
    error = relative_l2(mine, run())
    if not error < 2e-2:
        raise RuntimeError(f"torch op by op differs from Hugging Face by {error:.1e} relative L2, expected below 2e-2")


def time_stack(peer, hf, step, timer, compile_modes):
    """The series of a peer's steps, and a note on it. Of torch.compile's modes the best one counts."""
    import torch
    from transformers import DynamicCache, StaticCache

    if peer == "torch_ops":
        return timer.eager(torch_stack(hf, step)), {}
    if peer == "torch_graph":
        return timer.graph(torch_stack(hf, step)), {}
    if peer == "hf_eager":
        return timer.eager(*hf_stack(hf, step, DynamicCache)), {}
    best, tried = None, {}
    for mode in compile_modes:
        torch._dynamo.reset()
        run, back = hf_stack(torch.compile(hf, mode=mode, fullgraph=True, dynamic=False), step, StaticCache)
        try:
            for _ in range(3):
                back()
                run()
            series = timer.eager(run, back) if mode == "reduce-overhead" else timer.graph(run, back)
        except Exception as error:  # the other mode may work
            if isinstance(error, TimeoutError) and best is None:
                raise
            tried[mode] = one_line(error)
            continue
        tried[mode] = spread(series)["median_us"] / len(hf.layers)
        if best is None or statistics.median(series) < statistics.median(best):
            best = series
    if best is None:
        raise RuntimeError("; ".join(f"{mode}: {why}" for mode, why in tried.items()))
    return best, {"modes": tried}
