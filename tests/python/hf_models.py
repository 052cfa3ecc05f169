"""Hugging Face's models of the repository's checkpoints, their float64 twins, and how far float32 may be from them."""

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

from transformers.pytorch_utils import Conv1D

from cf_ops import _core

# The models are so small that threads would only wait for each other.
torch.set_num_threads(1)
_core.set_num_threads(1)

CHECKPOINTS = [
    "neox-d64-sequential",
    "neox-d64-sharded",
    "neox-d80",
    "neox-d128",
    "neox-bf16",
    "neox-tanh",
    "neox-tied",
]
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
# What this transformers calls a cache, as an argument of forward() and generate() and in what they return.
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
# Models whose q, k and v, and whose gate and up, the library joins.
JOINED = ["llama-gqa1-biases", "llama-gqa3-scaled", "llama-gqa8", "mistral-gqa4-sharded", "qwen2-gqa7"]
JOINED += ["qwen3-gqa2", "qwen3-gqa5-tied"]
CHECKPOINTS += [*JOINED, "gpt2-d16", "gpt2-d64"]
_F32 = 2.0**-24


def load_from(directory, dtype, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()


def load(root, name, dtype="auto", **options):
    """A checkpoint's model, which generates until a length is reached and pads with id 0."""
    directory = root / "data" / "checkpoints" / name
    # A config that transformers 5 wrote has rope_theta where transformers 4 does not look for it.
    rope = json.loads((directory / "config.json").read_text()).get("rope_parameters") or {}
    if VERSION < (5, 0) and "rope_theta" in rope and "config" not in options:
        options["rope_theta"] = rope["rope_theta"]
    model = load_from(directory, dtype, **options)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def padded(lengths, seed=1, vocab=128):
    """Random prompts of these lengths, padded on the left, as arguments of generate()."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, vocab, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def sequences(inputs, generated):
    """The rows of what generate() returned, without padding, and each one's prompt length."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    places, repeats = inputs["input_ids"].shape[1], len(generated) // len(lengths)
    return [(row[places - lengths[i // repeats] :], lengths[i // repeats]) for i, row in enumerate(generated)]


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


class ErrorBound:
    """How far logits of float32 arithmetic may be from a model's float64 logits, relative to the largest logit.

    The library's own derivation (core/contract.hpp, apps/verify/model_walk.cpp): every site adds
    4 u sqrt(terms) times its condition, the ratio of its largest partial sum to its largest result, and one rounding
    where it stores its output. Conditions are measured on the float64 model's own tensors. Residuals are left out of
    the sums: that makes the conditions larger.
    """

    def __init__(self, model, ids):
        self._conditions = 0.0
        hooks = []
        joined = {}
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                hook = self._part(joined, last, model)
            elif isinstance(module, (torch.nn.Linear, Conv1D)):
                hook = self._linear
            elif isinstance(module, torch.nn.LayerNorm):
                hook = self._norm
            elif hasattr(module, "variance_epsilon"):
                hook = self._rms_norm
            else:
                continue
            hooks.append(module.register_forward_hook(hook))
            if last in ("q_norm", "k_norm"):
                hooks.append(module.register_forward_hook(self._head_norm(joined, last)))
            if last in ("query_key_value", "c_attn"):
                hooks.append(module.register_forward_hook(self._attention(model)))
        with torch.no_grad():
            model(ids[None])
        for hook in hooks:
            hook.remove()
        stores = 10 * model.config.num_hidden_layers  # sites of a layer, at most
        self.relative = _F32 * (1 + 4 * self._conditions + stores)

    def _add(self, terms, largest, result):
        self._conditions += math.sqrt(terms) * max(1.0, float(largest.abs().max() / result.abs().max()))

    def _linear(self, module, inputs, output):
        self._add(inputs[0].shape[-1], self._sums(module, inputs), output)

    @staticmethod
    def _sums(module, inputs):
        """The largest partial sum of each output, (tokens, out)."""
        weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
        products = inputs[0][0, :, None, :] * weight  # (tokens, out, in)
        return products.cumsum(-1).abs().amax(-1)

    def _part(self, joined, name, model):
        """A hook of a Linear that the library joins with others; the last of them adds the condition of all."""

        def hook(module, inputs, output):
            joined[name] = output[0], self._sums(module, inputs)
            if name == "v_proj":
                made, most = zip(*(joined[part] for part in ("q_proj", "k_proj", "v_proj")))
                self._add(module.in_features, torch.cat(most, 1), torch.cat(made, 1))
                head_dim = made[0].shape[1] // model.config.num_attention_heads
                q, k, v = (part.view(len(part), -1, head_dim) for part in made)
                q, k = joined.pop("q_norm", q), joined.pop("k_norm", k)
                self._add_attention(*(heads.transpose(0, 1) for heads in (q, k, v)))
            if name == "up_proj":
                # To first order a product's error is that of each factor times the other; silu's slope is at most 1.1.
                (gate, gate_most), (up, up_most) = joined["gate_proj"], joined["up_proj"]
                silu = torch.nn.functional.silu(gate)
                self._add(module.in_features, 1.1 * gate_most * up.abs() + silu.abs() * up_most, silu * up)

        return hook

    @staticmethod
    def _head_norm(joined, name):
        """A hook of the norm of q's or of k's heads."""

        def hook(module, inputs, output):
            joined[name] = output[0]  # (tokens, heads, head_dim)

        return hook

    def _rms_norm(self, module, inputs, output):
        """No sum cancels: half the error of a sum of squares, and five roundings."""
        root = math.sqrt(output.shape[-1])
        self._conditions += root * max(1.0, 0.5 + 5 / root)

    def _norm(self, module, inputs, output):
        x = inputs[0]
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=False)
        size = x.square().mean(-1, keepdim=True).sqrt()
        terms = (x.abs() + mean.abs() + size) / deviation * module.weight.abs() + module.bias.abs()
        self._add(x.shape[-1], terms, output)

    def _attention(self, model):
        def hook(module, inputs, output):
            heads = model.config.num_attention_heads
            tokens, head_dim = output.shape[1], model.config.hidden_size // heads
            if model.config.model_type == "gpt2":  # q, k and v side by side
                self._add_attention(*output[0].view(tokens, 3, heads, head_dim).permute(1, 2, 0, 3))
            else:
                self._add_attention(*output[0].view(tokens, heads, 3, head_dim).permute(2, 1, 0, 3))

        return hook

    def _add_attention(self, q, k, v):
        """Of queries, keys and values, (heads, tokens, head_dim) each; a key may have several queries."""
        tokens, head_dim = q.shape[1:]
        # Rotations keep a score's size; its largest partial sum is at most |q| |k|.
        keys = k.norm(dim=-1).repeat_interleave(len(q) // len(k), 0)
        largest_score = (q.norm(dim=-1)[:, :, None] * keys[:, None, :]).max() / math.sqrt(head_dim)
        scores = float(largest_score) * (math.sqrt(head_dim) + 2) / math.sqrt(tokens)
        # The weighted values of a row are positive sums of |v|; the first row's are its result itself.
        self._conditions += math.sqrt(tokens) * (1 + scores) * max(1.0, float(v.abs().max() / v[:, 0].abs().max()))
        self._conditions += 2.0  # RoPE: two terms, condition sqrt(2)


def check_tokens(reference, logits_dtype, inputs, generated):
    """Every new id is the one with the largest float64 logit, wherever that logit's margin exceeds twice the bound.

    The bound is that of float32 arithmetic, and the rounding of a logit to the dtype in which it is returned. Returns
    the share of new ids whose margin exceeds it.
    """
    decisive = total = 0
    for row, prompt in sequences(inputs, generated):
        bound = ErrorBound(reference, row).relative + unit_roundoff(logits_dtype)
        with torch.no_grad():
            logits = reference(row[None]).logits[0, prompt - 1 : -1]
        allowed = 2 * bound * logits.abs().max(-1).values
        top = logits.topk(2).values
        chosen = logits.gather(1, row[prompt:, None])[:, 0]
        is_decisive = top[:, 0] - top[:, 1] > allowed
        assert not (is_decisive & (chosen < top[:, 0])).any(), f"another id than float64's: {row.tolist()}"
        assert (top[:, 0] - chosen <= allowed).all(), f"an id further from float64's than the bound: {row.tolist()}"
        decisive += int(is_decisive.sum())
        total += len(chosen)
    return decisive / total
