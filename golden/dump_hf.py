#!/usr/bin/env python3
"""Dumps one step of one GPT-NeoX layer from Hugging Face into a golden file.

The layer runs in float64 (the reference) and in the stored dtype with eager and sdpa attention, all on the same stored
bits. The file holds what went in and what every step of the layer made, in the schema of golden_file.hpp. Before it is
written, the float64 taps are compared with an independent layer in numpy: a hook at the wrong place, a wrong mask or a
lossy conversion is refused.

Needs torch, transformers (4.40 to 5.x), safetensors, numpy and h5py.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import struct
import sys
import tempfile
from dataclasses import MISSING, asdict, dataclass, fields, replace

import h5py
import numpy as np
import procedural

EXAMPLES = """
examples
  a layer of your own model, with its weights in the file:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17 --out mine.h5
  three sequences of different lengths, the weights left in the checkpoint:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17,5,12 --weights checkpoint --out mine.h5
  a prefill of 7 tokens that ends at position 22:
    dump_hf.py --model path/to/checkpoint --kv-len 23 --q-len 7 --out prefill.h5
  a full-size layer without a download, its weights and cache made from a hash:
    dump_hf.py --preset pythia-2.8b --layer 3 --kv-len 2048 --seed 1 --out pythia.h5

The checkpoint is a directory with config.json and safetensors files, as save_pretrained writes it:
    python3 -c "from transformers import AutoModelForCausalLM as M; \\
      M.from_pretrained('NAME', torch_dtype='auto').save_pretrained('DIR', safe_serialization=True)"
Exit status: 0 when the file is written, 2 when the arguments or the input are refused.
"""

SCHEMA_VERSION = 1
SEAL_BYTES = 512
MAX_ERROR = 1e-10  # relative L2 between Hugging Face's float64 taps and numpy's
NAME = os.path.basename(__file__)


class Refusal(Exception):
    """Bad arguments or input, in one line."""


# The model ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What config.json says of the network's shape and arithmetic; the fields are those of core/model_config.hpp."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 2048
    rotary_pct: float = 0.25
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    hidden_act: str = "gelu"

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.rotary_pct)

    def hf_fields(self):
        """The fields under the names that transformers 4.x writes and 5.x still takes."""
        fields = asdict(self)
        fields["rotary_emb_base"] = fields.pop("rope_theta")
        return fields


# Vocabulary sizes are padded to a multiple that grows with the model.
PRESETS = {
    f"pythia-{size}": Model(hidden, layers, heads, 4 * hidden, vocab)
    for size, hidden, layers, heads, vocab in [
        ("14m", 128, 6, 4, 50304),
        ("31m", 256, 6, 8, 50304),
        ("70m", 512, 6, 8, 50304),
        ("160m", 768, 12, 12, 50304),
        ("410m", 1024, 24, 16, 50304),
        ("1b", 2048, 16, 8, 50304),
        ("1.4b", 2048, 24, 16, 50304),
        ("2.8b", 2560, 32, 32, 50304),
        ("6.9b", 4096, 32, 32, 50432),
        ("12b", 5120, 36, 40, 50688),
    ]
}

ERF = np.frompyfunc(math.erf, 1, 1)


def gelu_erf(x):
    return x / 2 * (1 + ERF(x * math.sqrt(0.5)).astype(np.float64))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"gelu": gelu_erf, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}


def parse_config(text, source):
    """The Model of a config.json's text, of transformers 4.x or 5.x."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{source}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Refusal(f"{source}: expected a JSON object, got {type(config).__name__}")
    if config.get("model_type") != "gpt_neox":
        raise Refusal(f"{source}: model_type must be gpt_neox, got {config.get('model_type')!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise Refusal(f"{source}: rope_type must be default, got {rope_type!r}")
    given = config | {
        "rotary_pct": rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25)),
        "rope_theta": rope.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
    }
    values = {}
    for field in fields(Model):
        value = given.get(field.name, field.default)
        if value is MISSING:
            raise Refusal(f"{source}: {field.name} is missing")
        fits = type(value) in ((int, float) if field.type is float else (field.type,))
        if not fits or (field.type in (int, float) and not 0 < value < math.inf):
            expected = {int: "a positive integer", float: "a positive number", bool: "true or false", str: "a string"}
            raise Refusal(f"{source}: {field.name} must be {expected[field.type]}, got {value!r}")
        values[field.name] = value
    model = Model(**values)
    if model.hidden_size % model.num_attention_heads:
        raise Refusal(
            f"{source}: num_attention_heads must divide hidden_size {model.hidden_size}, "
            f"got {model.num_attention_heads}"
        )
    if model.rotary_dim < 2 or model.rotary_dim > model.head_dim or model.rotary_dim % 2:
        raise Refusal(f"{source}: rotary_dim must be even, 2 to head_dim {model.head_dim}, got {model.rotary_dim}")
    if model.hidden_act not in ACTIVATIONS:
        raise Refusal(f"{source}: hidden_act must be one of {', '.join(ACTIVATIONS)}, got {model.hidden_act!r}")
    return model


class Checkpoint:
    """A directory with config.json and safetensors files. Tensors are read one at a time, as they are asked for."""

    def __init__(self, directory):
        self.directory = directory
        if not os.path.isdir(directory):
            raise Refusal(f"{directory}: no such directory")
        path = os.path.join(directory, "config.json")
        try:
            with open(path, encoding="utf-8") as file:
                self.config_text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        self.model = parse_config(self.config_text, path)
        self._shard_of = self._index()

    def _index(self):
        """Tensor name -> file name; None where a single file holds all."""
        index = os.path.join(self.directory, "model.safetensors.index.json")
        if os.path.exists(index):
            try:
                with open(index, encoding="utf-8") as file:
                    shard_of = dict(json.load(file)["weight_map"])
            except OSError as error:
                raise Refusal(f"{index}: {error.strerror}") from None
            except (ValueError, KeyError, TypeError):
                shard_of = {"": None}
            if not all(isinstance(file, str) for file in shard_of.values()):
                raise Refusal(f"{index}: expected a JSON object with weight_map, tensor names to file names")
            return shard_of
        if os.path.exists(os.path.join(self.directory, "model.safetensors")):
            return None
        hint = ""
        if any(name.endswith(".bin") for name in os.listdir(self.directory)):
            hint = "; for .bin files see --help on how to convert them"
        raise Refusal(f"{self.directory}: no model.safetensors and no model.safetensors.index.json{hint}")

    def tensors(self, names_and_shapes):
        """The named tensors as stored arrays, and their one dtype."""
        from safetensors import SafetensorError, safe_open

        arrays, dtype = {}, None
        with contextlib.ExitStack() as stack:
            files = {}
            for name, shape in names_and_shapes.items():
                file = "model.safetensors" if self._shard_of is None else self._shard_of.get(name)
                path = os.path.join(self.directory, file or "model.safetensors.index.json")
                try:
                    if file and path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt"))
                        files[path, "names"] = set(files[path].keys())
                    if not file or name not in files[path, "names"]:
                        raise Refusal(f"{path}: tensor {name} is missing")
                    tensor = files[path].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise Refusal(f"{path}: {error}") from None
                got = str(tensor.dtype).removeprefix("torch.")
                if got not in procedural.DTYPES or dtype not in (None, got):
                    raise Refusal(
                        f"{path}: tensor {name} must be of dtype {dtype or 'float16, bfloat16 or float32'}, got {got}"
                    )
                if tuple(tensor.shape) != shape:
                    raise Refusal(f"{path}: tensor {name} must have shape {shape}, got {tuple(tensor.shape)}")
                dtype = got
                arrays[name] = to_numpy(tensor)
        return arrays, dtype


# numpy's own layer ----------------------------------------------------------------------------------------------------


def layernorm(x, gamma, beta, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma + beta


def rotate(x, cos, sin):
    """RoPE of x (tokens, heads, head_dim) over its first 2 * cos.shape[1] elements."""
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def reference_layer(model, weights, step, cos, sin):
    """Every tap of the layer in float64, from the stored bits and the given cos and sin (tokens, rotary_dim / 2)."""
    heads, head_dim = model.num_attention_heads, model.head_dim
    x = procedural.widen(step.hidden, step.dtype)
    tokens = len(x)

    def linear(name, y):
        product = y @ procedural.widen(weights[name + ".weight"], step.dtype).T
        bias = weights.get(name + ".bias")
        return product if bias is None else product + procedural.widen(bias, step.dtype)

    def norm(name, y):
        gamma, beta = (procedural.widen(weights[f"{name}.{part}"], step.dtype) for part in ("weight", "bias"))
        return layernorm(y, gamma, beta, model.layer_norm_eps)

    attn_in = norm("input_layernorm", x)
    qkv = linear("attention.query_key_value", attn_in).reshape(tokens, heads, 3, head_dim)
    q, k, v = rotate(qkv[:, :, 0], cos, sin), rotate(qkv[:, :, 1], cos, sin), qkv[:, :, 2]
    context = np.empty_like(q)
    appended = {"k_cache": k, "v_cache": v}
    for b in range(len(step.kv_len)):
        rows = slice(b * step.q_len, (b + 1) * step.q_len)
        keys, values = (
            np.concatenate([procedural.widen(old, step.dtype), new[rows].transpose(1, 0, 2)], 1)
            for old, new in zip(step.past(b), (k, v))
        )
        scores = np.einsum("qhd,hkd->hqk", q[rows], keys) / math.sqrt(head_dim)
        unseen = np.arange(step.kv_len[b]) > step.positions(b)[:, None]
        scores[:, unseen] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        context[rows] = np.einsum("hqk,hkd->qhd", p / p.sum(-1, keepdims=True), values)
    dense = linear("attention.dense", context.reshape(tokens, -1))
    residual = x + dense
    mlp_in = norm("post_attention_layernorm", x if model.use_parallel_residual else residual)
    up = linear("mlp.dense_h_to_4h", mlp_in)
    act = ACTIVATIONS[model.hidden_act](up)
    down = linear("mlp.dense_4h_to_h", act)
    return {
        "input_layernorm": attn_in,
        "attention.query_key_value": qkv,
        "attention.rotary_emb.q": q,
        "attention.rotary_emb.k": k,
        "attention.rotary_emb.v": v,
        **{
            f"attention.kv_append.{name}": rows.reshape(-1, step.q_len, heads, head_dim).transpose(0, 2, 1, 3)
            for name, rows in appended.items()
        },
        "attention.context": context,
        "attention.residual": residual,
        "post_attention_layernorm": mlp_in,
        "mlp.act": act,
        "output": residual + down,
        "hf.attention.dense": dense,
        "hf.mlp.dense_h_to_4h": up,
        "hf.mlp.dense_4h_to_h": down,
    }


def relative_l2(got, reference):
    """||got - reference|| / ||reference||; infinite where got has a non-finite element."""
    error = np.linalg.norm(got - reference)
    if not math.isfinite(error):
        return math.inf
    return error / (np.linalg.norm(reference) or 1)


def check_taps(variant, taps, reference, limit):
    """Refuses taps that are further than `limit` from the reference, in relative L2."""
    if taps.keys() != reference.keys():
        raise Refusal(f"{variant}: expected the taps {sorted(reference)}, got {sorted(taps)}")
    for name, tap in taps.items():
        if tap.shape != reference[name].shape:
            raise Refusal(f"{variant}: tap {name} must have shape {reference[name].shape}, got {tap.shape}")
        error = relative_l2(tap, reference[name])
        if not error <= limit:
            raise Refusal(
                f"{variant}: tap {name} must be within {limit:g} of its reference in relative L2, got {error:.3g}"
            )


def check_rope(model, step, cos, sin):
    """Refuses cos and sin that are not those of float32 angles: an inv_freq of 16 bits is off by far more."""
    exponent = np.arange(0, model.rotary_dim, 2) / model.rotary_dim
    position = step.all_positions()[:, None].astype(np.float64)
    angle = position * model.rope_theta**-exponent
    for name, got, expected in (("cos", cos, np.cos(angle)), ("sin", sin, np.sin(angle))):
        if got.shape != expected.shape:
            raise Refusal(f"float64: {name} must have shape {expected.shape}, got {got.shape}")
        if not np.array_equal(got.astype(np.float32), got):
            raise Refusal(f"float64: {name} must hold float32 values, got wider ones")
        worst = float((np.abs(got - expected) - position * 4e-7).max())
        if not worst <= 1e-6:
            raise Refusal(f"float64: {name} must be that of float32 angles, got values {worst:.3g} off")


# What goes in ---------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step's inputs, as stored: q_len new tokens for each sequence, kv_len entries after they are appended."""

    dtype: str
    q_len: int
    kv_len: list
    hidden: np.ndarray  # (tokens, hidden)
    cache: str  # its origin, as in the file
    k_cache: np.ndarray = None  # (batch, heads, max(kv_len) - q_len, head_dim)
    v_cache: np.ndarray = None

    def past(self, b):
        """Sequence b's old keys and values, (heads, kv_len - q_len, head_dim) each."""
        return tuple(cache[b, :, : self.kv_len[b] - self.q_len] for cache in (self.k_cache, self.v_cache))

    def positions(self, b):
        return np.arange(self.kv_len[b] - self.q_len, self.kv_len[b])

    def all_positions(self):
        return np.concatenate([self.positions(b) for b in range(len(self.kv_len))])


def made_step(model, dtype, q_len, kv_len, cache, seed):
    """A step without a model's own prefill: hidden is procedural, the cache procedural or normally distributed."""
    hidden = procedural.values(dtype, (len(kv_len) * q_len, model.hidden_size), "activation", seed, "hidden")
    step = Step(dtype, q_len, kv_len, hidden, cache)
    shape = (len(kv_len), model.num_attention_heads, max(kv_len) - q_len, model.head_dim)
    if cache == "random":
        rng = np.random.default_rng(seed)
        step.k_cache, step.v_cache = (
            procedural.round_to(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)
        )
        for b, n in enumerate(kv_len):
            step.k_cache[b, :, n - q_len :] = step.v_cache[b, :, n - q_len :] = 0
    else:
        step.k_cache, step.v_cache = (
            procedural.values(dtype, shape, "activation", seed, name) for name in ("k_cache", "v_cache")
        )
    return step


def prefill_step(checkpoint, layer, q_len, kv_len, seed, device):
    """A step cut out of the model's own run over random token ids: layer `layer`'s cache after a prefill of
    kv_len - q_len tokens, and its input for the next q_len. Computed in the stored dtype with sdpa."""
    import torch

    model = checkpoint.model
    names = {"gpt_neox.embed_in.weight": (model.vocab_size, model.hidden_size)}
    names |= {f"gpt_neox.final_layer_norm.{part}": (model.hidden_size,) for part in ("weight", "bias")}
    for n in range(layer + 1):
        names |= {f"gpt_neox.layers.{n}.{name}": shape for name, shape in layer_shapes(model).items()}
    arrays, dtype = checkpoint.tensors(names)
    state = {name.removeprefix("gpt_neox."): array for name, array in arrays.items()}
    hf = build(model, state, dtype, dtype, attention_implementations()[-1], device, layer + 1)

    inputs = []
    hf.layers[layer].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    shape = (len(kv_len), model.num_attention_heads, max(kv_len) - q_len, model.head_dim)
    caches = np.zeros((2, *shape), procedural.DTYPES[dtype])
    hidden = []
    for b, n in enumerate(kv_len):
        ids = torch.from_numpy(np.random.default_rng([seed, b]).integers(0, model.vocab_size, (1, n))).to(device)
        positions = torch.arange(n, device=device)[None]
        cache, past = empty_cache(), n - q_len
        if past:
            cache = call(hf, cache, input_ids=ids[:, :past], position_ids=positions[:, :past])
            for side, entries in zip(caches, cache_entries(cache, layer)):
                # Versions before 4.46 keep float32 keys, RoPE's product, whatever the model's dtype.
                side[b, :, :past] = to_numpy(entries[0].to(hf.dtype))
        call(hf, cache, input_ids=ids[:, past:], position_ids=positions[:, past:])
        hidden.append(to_numpy(inputs[-1][0]))
    return Step(dtype, q_len, kv_len, np.concatenate(hidden), "prefill", *caches)


# Hugging Face ---------------------------------------------------------------------------------------------------------


def layer_shapes(model):
    return procedural.weight_shapes(model.hidden_size, model.intermediate_size, model.attention_bias)


def to_torch(array, dtype):
    """A stored array as a tensor of the same bits."""
    import torch

    tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.int16 if dtype == "bfloat16" else array.dtype))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def to_numpy(tensor):
    """A tensor as an array of the same bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def modeling():
    """transformers' module of the model."""
    from transformers.models.gpt_neox import modeling_gpt_neox

    return modeling_gpt_neox


def attention_implementations():
    """What this version of transformers offers of eager and sdpa; the last is the one whose float64 is double
    throughout. Versions with sdpa compute the eager softmax in float32; those without do not."""
    return ["eager", "sdpa"] if getattr(modeling().GPTNeoXPreTrainedModel, "_supports_sdpa", False) else ["eager"]


@contextlib.contextmanager
def default_dtype(name):
    import torch

    old = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def build(model, state, stored, dtype, implementation, device, layers=1):
    """A GPTNeoXModel of that many layers computing in `dtype` on weights given as stored arrays; names as its own.

    The model is built in its dtype. Converting a built one would round RoPE's inv_freq with the weights."""
    import torch
    from transformers import GPTNeoXConfig

    # The vocabulary is that of the embedding given: a layer by itself needs none.
    model = replace(model, num_hidden_layers=layers, vocab_size=len(state["embed_in.weight"]))
    config = GPTNeoXConfig(**model.hf_fields(), bos_token_id=0, eos_token_id=0, attn_implementation=implementation)
    with default_dtype(dtype):
        hf = modeling().GPTNeoXModel(config)
    hf.load_state_dict({name: to_torch(array, stored) for name, array in state.items()}, strict=True)
    inv_freq = {name: buffer.dtype for name, buffer in hf.named_buffers() if name.endswith("inv_freq")}
    if not inv_freq or any(d != torch.float32 for d in inv_freq.values()):
        raise Refusal(f"transformers: RoPE's inv_freq must be float32, got {inv_freq}")
    if any(p.dtype != getattr(torch, dtype) for p in hf.parameters()):
        raise Refusal(f"transformers: every parameter must be {dtype}")
    if hf.config._attn_implementation != implementation:
        raise Refusal(f"transformers: attention must be {implementation}, got {hf.config._attn_implementation}")
    return hf.to(device).eval().requires_grad_(False)


def one_layer(model, weights, stored, dtype, implementation, device):
    """The model whose only layer has these weights; around it a vocabulary and a norm that nobody reads."""
    h = model.hidden_size
    state = {f"layers.0.{name}": array for name, array in weights.items()}
    for name, shape in (
        ("embed_in.weight", (8, h)),
        ("final_layer_norm.weight", (h,)),
        ("final_layer_norm.bias", (h,)),
    ):
        state[name] = np.zeros(shape, procedural.DTYPES[stored])
    return build(model, state, stored, dtype, implementation, device)


def empty_cache():
    """An empty cache; None stands for it where transformers keeps tuples of keys and values."""
    module = modeling()
    return module.DynamicCache() if hasattr(module, "DynamicCache") else None


def filled_cache(entries):
    """A cache that holds keys and values (1, heads, entries, head_dim), a pair a layer."""
    cache = empty_cache()
    if entries[0][0].shape[2] == 0:
        return cache
    if cache is None:
        return tuple(entries)
    for layer, (k, v) in enumerate(entries):
        cache.update(k, v, layer)
    return cache


def cache_entries(cache, layer):
    """Keys and values of one layer, (1, heads, entries, head_dim) each, whatever the version's cache is made of."""
    if isinstance(cache, tuple):
        return cache[layer][:2]
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def call(hf, cache, **inputs):
    """Runs the model and returns the cache with the new entries."""
    import torch

    with torch.no_grad():
        return hf(past_key_values=cache, use_cache=True, **inputs).past_key_values


class Recorder:
    """Records what the steps of the model's only layer make in one run: module outputs and inputs through hooks, RoPE
    by wrapping transformers' function."""

    def __init__(self, hf, model):
        self.hf, self.model, self.tensors = hf, model, {}
        self.rope = modeling().apply_rotary_pos_emb

    def __enter__(self):
        layer = self.hf.layers[0]
        outputs = {
            "layer": layer,
            "input_layernorm": layer.input_layernorm,
            "query_key_value": layer.attention.query_key_value,
            "dense": layer.attention.dense,
            "post_attention_layernorm": layer.post_attention_layernorm,
            "dense_h_to_4h": layer.mlp.dense_h_to_4h,
            "dense_4h_to_h": layer.mlp.dense_4h_to_h,
        }
        inputs = {
            "context": layer.attention.dense,
            "norm_in": layer.post_attention_layernorm,
            "act": layer.mlp.dense_4h_to_h,
        }
        self.handles = [m.register_forward_hook(self._output(name)) for name, m in outputs.items()]
        self.handles += [m.register_forward_pre_hook(self._input(name)) for name, m in inputs.items()]
        modeling().apply_rotary_pos_emb = self._rope
        return self

    def __exit__(self, *_):
        modeling().apply_rotary_pos_emb = self.rope
        for handle in self.handles:
            handle.remove()

    def _keep(self, name, tensor):
        if name in self.tensors:
            raise Refusal(f"transformers: {name} was made twice in one step")
        self.tensors[name] = tensor.detach().clone()

    def _output(self, name):
        return lambda module, args, result: self._keep(name, result[0] if isinstance(result, tuple) else result)

    def _input(self, name):
        return lambda module, args: self._keep(name, args[0])

    def _rope(self, q, k, cos, sin, *args, **kwargs):
        q_out, k_out = self.rope(q, k, cos, sin, *args, **kwargs)
        # Versions before 4.46 pass whole tables and the positions to gather.
        positions = kwargs.get("position_ids", args[0] if args and hasattr(args[0], "dtype") else None)
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        for name, tensor in (("q", q_out), ("k", k_out), ("cos", cos), ("sin", sin)):
            self._keep(name, tensor)
        return q_out, k_out

    def taps(self, hidden, cache):
        """The taps of the run as arrays, and cos and sin (tokens, rotary_dim / 2)."""
        import torch

        t, model = self.tensors, self.model
        tokens, heads, head_dim = hidden.shape[1], model.num_attention_heads, model.head_dim
        qkv = t["query_key_value"].view(tokens, heads, 3, head_dim)

        def rotated(name, part):
            """(1, heads, tokens, rotary_dim or head_dim), with what passes through added where it is not there."""
            x = t[name][0].transpose(0, 1)
            return torch.cat([x, qkv[:, :, part, x.shape[-1] :]], -1)

        k, v = (entries[:, :, -tokens:] for entries in cache_entries(cache, 0))
        taps = {
            "input_layernorm": t["input_layernorm"][0],
            "attention.query_key_value": qkv,
            "attention.rotary_emb.q": rotated("q", 0),
            "attention.rotary_emb.k": rotated("k", 1),
            "attention.rotary_emb.v": qkv[:, :, 2],
            "attention.kv_append.k_cache": k,
            "attention.kv_append.v_cache": v,
            "attention.context": t["context"].view(tokens, heads, head_dim),
            # The parallel form adds it up only with the MLP's output.
            "attention.residual": (t["dense"] + hidden if model.use_parallel_residual else t["norm_in"])[0],
            "post_attention_layernorm": t["post_attention_layernorm"][0],
            "mlp.act": t["act"][0],
            "output": t["layer"][0],
            "hf.attention.dense": t["dense"][0],
            "hf.mlp.dense_h_to_4h": t["dense_h_to_4h"][0],
            "hf.mlp.dense_4h_to_h": t["dense_4h_to_h"][0],
        }
        half = model.rotary_dim // 2
        for name in ("cos", "sin"):
            if not bool((t[name][..., :half] == t[name][..., half:]).all()):
                raise Refusal(f"transformers: the two halves of {name} must be the same")
        tables = {name: to_numpy(t[name].reshape(tokens, -1)[:, :half]) for name in ("cos", "sin")}
        return {name: to_numpy(tensor.to(hidden.dtype)) for name, tensor in taps.items()}, tables


def run_variant(model, weights, step, dtype, implementation, device):
    """All taps of the step computed in `dtype`, and cos and sin. Each sequence runs by itself, so that none is
    padded."""
    import torch

    hf = one_layer(model, weights, step.dtype, dtype, implementation, device)
    compute = getattr(torch, dtype)

    def tensor(array):
        return to_torch(array, step.dtype).to(device, compute)

    runs = []
    for b in range(len(step.kv_len)):
        rows = slice(b * step.q_len, (b + 1) * step.q_len)
        hidden = tensor(step.hidden[rows])[None]
        positions = torch.from_numpy(step.positions(b))[None].to(device)
        with Recorder(hf, model) as recorder:
            cache = filled_cache([tuple(tensor(side)[None] for side in step.past(b))])
            cache = call(hf, cache, inputs_embeds=hidden, position_ids=positions)
            runs.append(recorder.taps(hidden, cache))
    return tuple(
        {name: np.concatenate([run[part][name] for run in runs]) for name in runs[0][part]} for part in range(2)
    )


# The file -------------------------------------------------------------------------------------------------------------


def seal(path):
    """Fills in the user block: see golden_file.hpp."""
    with open(path, "r+b") as file:
        file.seek(SEAL_BYTES)
        body = file.read()
        file.seek(0)
        file.write(struct.pack("<8sQQ", b"cfgolden", len(body), procedural.checksum(body)))
        file.flush()
        os.fsync(file.fileno())


def check_writable(path):
    """Refuses a path that could not be written, before the work is done."""
    directory = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise Refusal(f"{path}: is a directory, expected a file")
    if not os.path.isdir(directory):
        raise Refusal(f"{directory}: no such directory")
    if not os.access(directory, os.W_OK):
        raise Refusal(f"{directory}: not writable")


@contextlib.contextmanager
def atomic(path):
    """Gives a temporary path beside `path` and renames it when the block ends well: a reader finds the old file, the
    new one or none. On any failure the temporary file is removed."""
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{os.path.basename(path)}.", suffix=".tmp", dir=os.path.dirname(path) or "."
        )
        os.close(handle)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_text(path, text):
    """Writes a text file atomically."""
    with atomic(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def write_golden(path, attributes, groups, variants):
    """Writes a golden file atomically.

    groups: "inputs" and "weights" -> {name: (array, dtype name)}; variants: name -> (attributes, {tap: array}, dtype).
    """

    def put(group, name, array, dtype):
        group[name] = array
        if dtype == "bfloat16":
            group[name].attrs["dtype"] = dtype

    with atomic(path) as temporary:
        with h5py.File(temporary, "w", libver=("earliest", "v110"), userblock_size=SEAL_BYTES) as file:
            for name, value in attributes.items():
                file.attrs[name] = value
            for group_name, arrays in groups.items():
                group = file.create_group(group_name)
                for name, (array, dtype) in arrays.items():
                    put(group, name, array, dtype)
            for variant, (about, taps, dtype) in variants.items():
                group = file.create_group(f"taps/{variant}")
                group.attrs.update(about)
                for name, array in taps.items():
                    put(group, name, array, dtype)
        seal(temporary)


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_sealed(path):
    """A golden file whose seal holds, opened by h5py."""
    with open(path, "rb") as file:
        magic, length, checksum = struct.unpack("<8sQQ", file.read(24))
        file.seek(SEAL_BYTES)
        body = file.read()
    if magic != b"cfgolden" or length != len(body) or checksum != procedural.checksum(body):
        raise Refusal(f"{path}: the seal does not fit the content")
    return h5py.File(path, "r")


# The program ----------------------------------------------------------------------------------------------------------


def progress(text):
    """One line on stderr that the next call overwrites; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def versions():
    import safetensors
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
    }


def device_name(device):
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU {platform.machine()}"


def lengths(text):
    """A comma list of positive integers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer or a comma list of them, got {text!r}")
    return values


def integer(low, high):
    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected an integer from {low} to {high}, got {text!r}")
        return value

    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refusal(message)


def parse_arguments(argv):
    parser = Parser(
        prog=NAME, description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a checkpoint directory: config.json beside safetensors files")
    source.add_argument("--preset", metavar="NAME", help=f"a shape with procedural weights: {', '.join(PRESETS)}")
    parser.add_argument("--layer", type=integer(0, 1 << 16), default=0, help="the layer's index, from 0 (default 0)")
    parser.add_argument(
        "--kv-len",
        type=lengths,
        default=[17],
        metavar="N[,N...]",
        help="valid cache entries after the new tokens are appended, one for all sequences or one each (default 17)",
    )
    parser.add_argument("--batch", type=integer(1, 1 << 16), help="sequences (default: as many as --kv-len names)")
    parser.add_argument(
        "--q-len",
        type=integer(1, 1 << 16),
        default=1,
        metavar="N",
        help="new tokens of each sequence: 1 is a decode step, more a prefill (default 1)",
    )
    parser.add_argument(
        "--cache",
        choices=["prefill", "random", "procedural"],
        help="the old cache entries and the hidden state: from the model's own run over random tokens "
        "(prefill, the default with --model), normally distributed beside a procedural hidden "
        "state, or both procedural and the cache not stored (the default with --preset)",
    )
    parser.add_argument(
        "--weights",
        choices=["stored", "checkpoint", "procedural"],
        help="where a reader finds the weights: in the file (the default with --model), in the "
        "checkpoint's directory, or made from the seed (the default with --preset)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(procedural.DTYPES),
        help="of hidden, cache and weights (default: the checkpoint's; float16 with --preset)",
    )
    parser.add_argument(
        "--seed", type=integer(0, procedural.MASK), default=0, help="of all that is random or procedural (default 0)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where Hugging Face runs (default: the GPU where torch has one)",
    )
    parser.add_argument("--out", metavar="FILE", help="the golden file to write")
    parser.add_argument(
        "--selfcheck",
        action="store_true",
        help="dump tiny models through every path into a temporary directory and print OK",
    )
    args = parser.parse_args(argv)
    if args.selfcheck:
        return args
    if not args.model and not args.preset:
        raise Refusal("one of --model and --preset is required")
    if not args.out:
        raise Refusal("--out is required")
    if args.preset and args.preset not in PRESETS:
        raise Refusal(f"--preset must be one of {', '.join(PRESETS)}, got {args.preset!r}")
    args.batch = args.batch or len(args.kv_len)
    if len(args.kv_len) == 1:
        args.kv_len *= args.batch
    args.cache = args.cache or ("prefill" if args.model else "procedural")
    args.weights = args.weights or ("stored" if args.model else "procedural")
    return args


def check_arguments(args, model):
    """Refuses what does not go together."""
    if len(args.kv_len) != args.batch:
        raise Refusal(f"--kv-len must name 1 or --batch {args.batch} lengths, got {len(args.kv_len)}")
    if args.layer >= model.num_hidden_layers:
        raise Refusal(f"--layer must be 0 to {model.num_hidden_layers - 1}, got {args.layer}")
    if max(args.kv_len) > model.max_position_embeddings:
        raise Refusal(
            f"--kv-len must be at most max_position_embeddings {model.max_position_embeddings}, got {max(args.kv_len)}"
        )
    if min(args.kv_len) < args.q_len:
        raise Refusal(f"--kv-len must be at least --q-len {args.q_len}, got {min(args.kv_len)}")
    if args.preset and args.weights == "checkpoint":
        raise Refusal("--weights checkpoint needs --model, got --preset")
    if args.cache == "prefill" and (args.preset or args.weights == "procedural"):
        raise Refusal("--cache prefill needs the weights of a --model, got procedural ones")


def dump(args, command):
    """Writes the golden file that the arguments ask for."""
    checkpoint = Checkpoint(args.model) if args.model else None
    model = checkpoint.model if checkpoint else PRESETS[args.preset]
    check_arguments(args, model)
    check_writable(args.out)

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch finds no GPU")

    progress("weights")
    dtype = args.dtype or "float16"
    if checkpoint and args.weights != "procedural":
        prefix = f"gpt_neox.layers.{args.layer}."
        arrays, stored = checkpoint.tensors({prefix + name: shape for name, shape in layer_shapes(model).items()})
        if args.dtype not in (None, stored):
            raise Refusal(f"--dtype must be the checkpoint's {stored}, got {args.dtype}")
        dtype = stored
        weights = {name.removeprefix(prefix): array for name, array in arrays.items()}
    else:
        weights = procedural.layer_weights(layer_shapes(model), args.layer, args.seed, dtype)

    progress("inputs")
    if args.cache == "prefill":
        step = prefill_step(checkpoint, args.layer, args.q_len, args.kv_len, args.seed, device)
    else:
        step = made_step(model, dtype, args.q_len, args.kv_len, args.cache, args.seed)
    if step.k_cache.size == 0:
        step.cache = "none"

    variants = {}
    implementations = attention_implementations()
    progress(f"float64 {implementations[-1]}")
    taps, tables = run_variant(model, weights, step, "float64", implementations[-1], device)
    variants["float64"] = (about("float64", implementations[-1], device), taps, "float64")
    check_rope(model, step, tables["cos"], tables["sin"])
    progress("float64 numpy")
    check_taps("float64", taps, reference_layer(model, weights, step, tables["cos"], tables["sin"]), MAX_ERROR)
    # The bound finds what is wrong; rounding alone stays far below it.
    rough = 64 * {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for implementation in implementations:
        progress(f"{dtype} {implementation}")
        low, _ = run_variant(model, weights, step, dtype, implementation, device)
        name = f"{dtype}_{implementation}"
        check_taps(name, {tap: procedural.widen(array, dtype) for tap, array in low.items()}, taps, rough)
        # What is no tap of the layer is kept of the reference alone.
        low = {tap: array for tap, array in low.items() if not tap.startswith("hf.")}
        variants[name] = (about(dtype, implementation, device), low, dtype)

    inputs = {
        "hidden": (step.hidden, dtype),
        "kv_len": (np.array(step.kv_len, np.int32), "int32"),
        "positions": (step.all_positions().astype(np.int32), "int32"),
        **{name: (table.astype(np.float32), "float32") for name, table in tables.items()},
    }
    if step.cache in ("prefill", "random"):
        inputs |= {"k_cache": (step.k_cache, dtype), "v_cache": (step.v_cache, dtype)}
    groups = {"inputs": inputs}
    attributes = {
        "schema": "cf-golden",
        "schema_version": np.int64(SCHEMA_VERSION),
        "producer": "golden/dump_hf.py",
        "command": command,
        "versions": json.dumps(versions()),
        "config": checkpoint.config_text if checkpoint else preset_config(args.preset),
        "model": os.path.basename(os.path.abspath(args.model)) if checkpoint else args.preset,
        "layer": np.int64(args.layer),
        "dtype": dtype,
        "seed": np.uint64(args.seed),
        "batch": np.int64(args.batch),
        "q_len": np.int64(args.q_len),
        "cache": step.cache,
        "weights": args.weights,
        "weights_checksum": np.uint64(procedural.weights_checksum(weights)),
    }
    if step.cache == "procedural":
        sums = [procedural.checksum(cache) for cache in (step.k_cache, step.v_cache)]
        attributes["cache_checksum"] = np.uint64((sums[0] + 3 * sums[1]) & procedural.MASK)
    if args.weights == "checkpoint":
        attributes["weights_checkpoint"] = os.path.relpath(args.model, os.path.dirname(args.out) or ".")
    if args.weights == "stored":
        groups["weights"] = {name: (array, dtype) for name, array in weights.items()}
    progress("writing")
    write_golden(args.out, attributes, groups, variants)
    progress("")


def about(dtype, implementation, device):
    return {"dtype": dtype, "attn_implementation": implementation, "device": device_name(device)}


def preset_config(name):
    return json.dumps({"model_type": "gpt_neox", **PRESETS[name].hf_fields()}, indent=2)


def selfcheck():
    """Dumps tiny models through every path and reads the files back."""
    import make_checkpoints

    steps = [
        "--kv-len 1",
        "--kv-len 17 --batch 2",
        "--kv-len 17,5,12 --cache random --weights checkpoint",
        "--kv-len 23,7 --q-len 7 --weights checkpoint",
        "--kv-len 9 --q-len 9",
        "--kv-len 33,2,8 --q-len 2 --cache procedural --weights procedural",
    ]
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "x.h5")
        commands = [f"--preset pythia-14m --layer 5 {steps[5]} --dtype {dtype}" for dtype in procedural.DTYPES]
        for spec in make_checkpoints.SPECS:
            path = make_checkpoints.write(spec, directory, "selfcheck")
            commands += [f"--model {shlex.quote(path)} --layer {spec.model.num_hidden_layers - 1} {s}" for s in steps]
        for command in commands:
            argv = [*shlex.split(command), "--out", out]
            args = parse_arguments(argv)
            dump(args, shlex.join(argv))
            with read_sealed(out) as file:
                tokens = args.batch * args.q_len
                for variant in file["taps"].values():
                    if len(variant["output"]) != tokens:
                        raise Refusal(f"{command}: expected {tokens} tokens in the file")
                if ("weights" in file) != (args.weights == "stored"):
                    raise Refusal(f"{command}: the weights must be in the file when they are stored and only then")
            os.unlink(out)
    print(f"OK: {len(commands)} dumps, {json.dumps(versions())}")


def main(argv):
    try:
        args = parse_arguments(argv)
        if args.selfcheck:
            selfcheck()
        else:
            dump(args, shlex.join(["python3", "golden/dump_hf.py", *argv]))
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; torch, transformers and safetensors are needed", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
