"""Hugging Face's models of transformers 4.40 to 5.x, GPT-NeoX or another family's: built from stored bits and run with
their taps recorded, one layer for one step or a whole model over a sequence."""

import contextlib
import importlib
import inspect
import os
import platform
from dataclasses import replace

import numpy as np

import gptq
import procedural
from console import Refusal, read_json_file
from families import FAMILIES, join
from model_config import layer_shapes, model_shapes, parse_config
from numpy_model import Step, head_norm_taps

PACKAGES = ("torch", "transformers", "safetensors", "h5py")


def refuse_lfs_pointer(path):
    """Refuses a file that git-lfs has not fetched yet. A missing file passes."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(64).startswith(b"version https://git-lfs.github.com/spec/"):
            raise Refusal(f"{path}: is a git-lfs pointer, expected the file itself; fetch it with: git lfs pull")


class Checkpoint:
    """A directory with config.json and safetensors files. A tensor is read when it is needed."""

    def __init__(self, directory):
        self.directory = directory
        if not os.path.isdir(directory):
            raise Refusal(f"{directory}: no such directory")
        path = os.path.join(directory, "config.json")
        for name in ("config.json", "quantize_config.json", "quant_config.json", "model.safetensors.index.json"):
            refuse_lfs_pointer(os.path.join(directory, name))
        self.config_text, config = read_json_file(path)
        self.model = parse_config(self.config_text, path)
        quantised = gptq.read_config(directory, config)
        names = self.model.names
        self.gptq = quantised and gptq.Format(quantised, directory, names.linears, names.transposed)
        self.shards = self._index()  # tensor name -> file name; None where there is one file

    def _index(self):
        index = os.path.join(self.directory, "model.safetensors.index.json")
        if os.path.exists(index):
            try:
                shard_of = dict(read_json_file(index)[1]["weight_map"])
            except (ValueError, KeyError, TypeError):
                shard_of = {"": None}
            if not all(isinstance(file, str) for file in shard_of.values()):
                raise Refusal(f"{index}: expected a JSON object with weight_map, tensor names to file names")
            for tensor, file in shard_of.items():
                if file in ("", ".", "..") or set(file) & set("/\\\0"):
                    raise Refusal(f"{index}: tensor {tensor!r}: expected a plain file name for its shard, got {file!r}")
            return shard_of
        if os.path.exists(os.path.join(self.directory, "model.safetensors")):
            return None
        hint = ""
        if any(name.endswith(".bin") for name in os.listdir(self.directory)):
            hint = "; for .bin files see --help on how to convert them"
        raise Refusal(f"{self.directory}: no model.safetensors and no model.safetensors.index.json{hint}")

    def layer(self, index):
        """Returns a layer's tensors as stored, by name below the layer; the same with dense weights in the place of
        quantised ones; the dtype of the weights that are not quantised."""
        dense_shapes = layer_shapes(self.model)
        prefix = self.model.names.layer(index)
        wanted = self.gptq.part_shapes(dense_shapes) if self.gptq else dense_shapes
        arrays, dtype = self.tensors({prefix + name: shape for name, shape in wanted.items()})
        stored = {name.removeprefix(prefix): array for name, array in arrays.items()}
        return stored, self.gptq.dense(stored) if self.gptq else stored, dtype

    def whole(self):
        """The same of all tensors of the model, by their names in the checkpoint."""
        of_layer = layer_shapes(self.model)
        wanted = model_shapes(self.model, self.gptq.part_shapes(of_layer) if self.gptq else None)
        stored, dtype = self.tensors(wanted)
        return stored, self.gptq.dense(stored) if self.gptq else stored, dtype

    def tensors(self, names_and_shapes):
        """Returns the named tensors as stored arrays, and their dtype. All have the same dtype, except the parts of a
        quantised weight."""
        from safetensors import SafetensorError, safe_open

        arrays, dtype = {}, None
        with contextlib.ExitStack() as stack:
            files = {}
            for name, shape in names_and_shapes.items():
                file = "model.safetensors" if self.shards is None else self.shards.get(name)
                path = os.path.join(self.directory, file or "model.safetensors.index.json")
                try:
                    if file and path not in files:
                        refuse_lfs_pointer(path)
                        opened = stack.enter_context(safe_open(path, framework="pt"))
                        files[path] = opened, set(opened.keys())
                    if not file or name not in files[path][1]:
                        raise Refusal(f"{path}: tensor {name} is missing")
                    tensor = files[path][0].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise Refusal(f"{path}: {error}") from None
                got = str(tensor.dtype).removeprefix("torch.")
                part = gptq.PARTS.get(name.rpartition(".")[2])
                if got != part and (part or got not in procedural.DTYPES or dtype not in (None, got)):
                    expected = part or dtype or "float16, bfloat16 or float32"
                    raise Refusal(f"{path}: tensor {name} must be of dtype {expected}, got {got}")
                if tuple(tensor.shape) != shape:
                    raise Refusal(f"{path}: tensor {name} must have shape {shape}, got {tuple(tensor.shape)}")
                dtype = dtype if part else got
                arrays[name] = to_numpy(tensor)
        return arrays, dtype

    def checksum(self, stored):
        """The weights_checksum() of tensors as stored, of a layer or the whole model."""
        return procedural.weights_checksum(join(self.model.names, stored, self.gptq.bits if self.gptq else 0))


def to_torch(array, dtype):
    """A stored array as a tensor of the same bits. With dtype "bfloat16", uint16 arrays hold bfloat16."""
    import torch

    is_bfloat16 = dtype == "bfloat16" and array.dtype == np.uint16
    tensor = torch.from_numpy(np.ascontiguousarray(array).view(np.int16 if is_bfloat16 else array.dtype))
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def to_numpy(tensor):
    """A tensor as an array of the same bits."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def modeling(model_type=next(iter(FAMILIES))):
    """transformers' module for a type of models, the first family's where none is named."""
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def class_of(model, kind):
    """transformers' class of a model: its Config, Model or ForCausalLM."""
    whole = model.family["class_name"]  # GPT2LMHeadModel, LlamaForCausalLM
    name = whole if kind == "ForCausalLM" else whole.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + kind
    if kind != "Config":
        return getattr(modeling(model.model_type), name)
    return getattr(importlib.import_module("transformers"), name)


def attention_implementations():
    """Those of eager and sdpa that this version of transformers has. The last one computes float64
    in double throughout: sdpa where there is one, because eager then computes its softmax in float32."""
    name = next(iter(FAMILIES.values()))["class_name"].replace("ForCausalLM", "PreTrainedModel")
    return ["eager", "sdpa"] if getattr(getattr(modeling(), name), "_supports_sdpa", False) else ["eager"]


@contextlib.contextmanager
def default_dtype(name):
    import torch

    old = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def transformers_config(model, implementation):
    config = class_of(model, "Config")
    return config(**model.hf_fields(), bos_token_id=0, eos_token_id=0, attn_implementation=implementation)


def widen_norms(hf):
    """Lets the RMSNorms of a float64 model compute in float64: transformers' own compute in float32 in every dtype."""
    import torch

    for module in hf.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x, norm=module):
                return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

            module.forward = forward
    return hf


def load(module, state, stored):
    """Copies stored arrays of dtype `stored` into all parameters of a module."""
    module.load_state_dict({name: to_torch(array, stored) for name, array in state.items()}, strict=True)


def ready(hf, rotates, dtype, implementation, device):
    """The model on its device, after a check that it computes as asked."""
    import torch

    inv_freq = {name: buffer.dtype for name, buffer in hf.named_buffers() if name.endswith("inv_freq")}
    if bool(inv_freq) != rotates or any(d != torch.float32 for d in inv_freq.values()):
        raise Refusal(f"transformers: RoPE's inv_freq must be float32, got {inv_freq}")
    if any(p.dtype != getattr(torch, dtype) for p in hf.parameters()):
        raise Refusal(f"transformers: every parameter must be {dtype}")
    if hf.config._attn_implementation != implementation:
        raise Refusal(f"transformers: attention must be {implementation}, got {hf.config._attn_implementation}")
    return hf.to(device).eval().requires_grad_(False)


def layers_of(hf, model):
    """The layers of a model without a head."""
    return hf.get_submodule(model.names.layers.strip(".").partition(".")[2])


def below_base(model, name):
    """A name in a causal model as the model without a head has it."""
    return name.removeprefix(f"{model.names.base}.")


def build(model, state, stored, dtype, implementation, device, layers=1):
    """A model without a head of `layers` layers that computes in `dtype`, with weights from `state`: its parameters'
    names -> stored arrays of dtype `stored`.

    The model is built in its dtype: a conversion afterwards would round RoPE's inv_freq too."""
    # The given embedding sets the vocabulary's size.
    embedding = state[below_base(model, f"{model.names.embedding}.weight")]
    model = replace(model, num_hidden_layers=layers, vocab_size=len(embedding))
    with default_dtype(dtype):
        hf = class_of(model, "Model")(transformers_config(model, implementation))
    load(hf, state, stored)
    return ready(hf, model.rotary_dim > 0, dtype, implementation, device)


def random_causal(model, dtype, implementation, device="cpu"):
    """A model with a head that computes in `dtype`, made on the device with transformers' own random weights."""
    import torch

    with default_dtype(dtype), torch.device(device):
        hf = class_of(model, "ForCausalLM")(transformers_config(model, implementation))
    if model.tie_word_embeddings and hf.get_output_embeddings().weight is not hf.get_input_embeddings().weight:
        raise Refusal("transformers: the head of tied embeddings must be the embedding")
    return ready(hf, model.rotary_dim > 0, dtype, implementation, device)


def build_causal(model, weights, stored, dtype, implementation, device, made_on="cpu"):
    """A model with a head that computes in `dtype`, with weights by their names in checkpoints. `made_on` is the device
    on which transformers makes the model, before it has these weights."""
    hf, names = random_causal(model, dtype, implementation, made_on), model.names
    base = {below_base(model, n): w for n, w in weights.items() if n.startswith(f"{names.base}.")}
    load(getattr(hf, names.base), base, stored)
    if not model.tie_word_embeddings:
        # The module's name differs between versions.
        load(hf.get_output_embeddings(), {"weight": weights[f"{names.head}.weight"]}, stored)
    return hf.to(device)


def one_layer(model, weights, stored, dtype, implementation, device):
    """A model with one layer of these weights. Its embedding and final norm are zeros, and are not used."""
    h, names = model.hidden_size, model.names
    state = {below_base(model, names.layer(0) + name): array for name, array in weights.items()}
    outside = {f"{names.embedding}.weight": (8, h)}
    if names.positions:
        outside[f"{names.positions}.weight"] = (model.max_position_embeddings, h)
    outside |= {f"{names.final_norm}.{part}": (h,) for part in names.norm_parts}
    for name, shape in outside.items():
        state[below_base(model, name)] = np.zeros(shape, procedural.DTYPES[stored])
    return build(model, state, stored, dtype, implementation, device)


def empty_cache():
    """An empty cache, or None in versions of transformers whose caches are tuples of keys and values."""
    module = modeling()
    return module.DynamicCache() if hasattr(module, "DynamicCache") else None


def filled_cache(entries):
    """A cache of one pair of keys and values for each layer, (1, heads, entries, head_dim) each."""
    cache = empty_cache()
    if entries[0][0].shape[2] == 0:
        return cache
    if cache is None:
        return tuple(entries)
    for layer, (k, v) in enumerate(entries):
        cache.update(k, v, layer)
    return cache


def cache_entries(cache, layer):
    """Keys and values of one layer, (1, heads, entries, head_dim) each, in every version of transformers."""
    if isinstance(cache, tuple):
        return cache[layer][:2]
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def cache_name(hf):
    """What the model's forward calls its cache, and its result the field of it: past_key_values, or cache from
    transformers 5.24 on. A forward takes an argument of another name without reading it."""
    parameters = inspect.signature(type(hf).forward).parameters.items()
    return next((name for name, p in parameters if "Cache" in str(p.annotation)), "past_key_values")


def call(hf, cache, **inputs):
    """Runs the model and returns its result, and the cache with the new entries."""
    import torch

    name = cache_name(hf)
    with torch.no_grad():
        result = hf(**{name: cache}, use_cache=True, **inputs)
    return result, getattr(result, name)


class Recorder:
    """Records tensors of one run by name, each once: outputs and inputs of modules through hooks, and what the first
    layer gives to RoPE and gets from it through a wrapper of transformers' function."""

    def __init__(self, model, outputs, inputs):
        self.outputs, self.inputs, self.tensors, self.rope_calls = outputs, inputs, {}, 0
        self.model, self.modeling = model, modeling(model.model_type)
        self.rope = getattr(self.modeling, "apply_rotary_pos_emb", None)

    def __enter__(self):
        self.handles = [m.register_forward_hook(self._output(name)) for name, m in self.outputs.items()]
        self.handles += [m.register_forward_pre_hook(self._input(name)) for name, m in self.inputs.items()]
        if self.rope:
            self.modeling.apply_rotary_pos_emb = self._rope
        return self

    def __exit__(self, *_):
        if self.rope:
            self.modeling.apply_rotary_pos_emb = self.rope
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
        self.rope_calls += 1
        if self.rope_calls > 1:
            return q_out, k_out
        # Versions before 4.46 pass whole tables and the positions to gather.
        positions = kwargs.get("position_ids", args[0] if args and hasattr(args[0], "dtype") else None)
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        for name, tensor in (("q", q_out), ("k", k_out), ("cos", cos), ("sin", sin)):
            self._keep(name, tensor)
        return q_out, k_out

    def tables(self, model, tokens):
        """cos and sin, (tokens, rotary_dim / 2) each; nothing without RoPE."""
        if not model.rotary_dim:
            return {}
        half = model.rotary_dim // 2
        for name in ("cos", "sin"):
            table = self.tensors[name]
            if not bool((table[..., :half] == table[..., half:]).all()):
                raise Refusal(f"transformers: the two halves of {name} must be the same")
        return {name: to_numpy(self.tensors[name].reshape(tokens, -1)[:, :half]) for name in ("cos", "sin")}


class LayerRecorder(Recorder):
    """Records the intermediate results of a model of one layer without a head."""

    def __init__(self, hf, model):
        names = model.names
        layer = layers_of(hf, model)[0]
        modules = (*names.norms, *names.head_norms, *names.linears)
        outputs = {"layer": layer, **{name: layer.get_submodule(name) for name in modules}}
        inputs = {
            "context": layer.get_submodule(names.dense),
            "norm_in": layer.get_submodule(names.norms[1]),
            "act": layer.get_submodule(names.down),
        }
        super().__init__(model, outputs, inputs)

    def taps(self, hidden, cache):
        """The taps of the run as arrays, and cos and sin (tokens, rotary_dim / 2)."""
        t = {name: to_numpy(tensor.to(hidden.dtype)) for name, tensor in self.tensors.items()}
        model, names, tokens = self.model, self.model.names, hidden.shape[1]
        q, k, v, qkv = model.heads_of([t[name][0] for name in names.qkv_parts])
        normed = {}
        if names.head_norms:
            q, k = (t[name][0] for name in names.head_norms)
            normed = head_norm_taps(names, q, k, v)

        def rotated(name, product):
            """q or k after RoPE, (tokens, heads, head_dim). Versions before 4.49 rotate only the first rotary_dim
            elements of a head; the others come from the product."""
            if not model.rotary_dim:
                return product
            x = t[name][0].transpose(1, 0, 2)
            return np.concatenate([x, product[:, :, x.shape[-1] :]], -1)

        residual = self.tensors["norm_in"]
        if model.use_parallel_residual:  # no module computes x + attention alone
            residual = self.tensors[names.dense] + hidden
        k_cache, v_cache = (to_numpy(e[:, :, -tokens:].to(hidden.dtype)) for e in cache_entries(cache, 0))
        taps = {
            names.tap("input_layernorm"): t[names.norms[0]][0],
            names.tap("query_key_value"): qkv,
            **normed,
            f"{names.tap('rotary_emb')}.q": rotated("q", q),
            f"{names.tap('rotary_emb')}.k": rotated("k", k),
            f"{names.tap('rotary_emb')}.v": v,
            f"{names.tap('kv_append')}.k_cache": k_cache,
            f"{names.tap('kv_append')}.v_cache": v_cache,
            names.tap("context"): t["context"].reshape(tokens, model.num_attention_heads, model.head_dim),
            names.tap("dense"): to_numpy(residual.to(hidden.dtype))[0],
            names.tap("post_attention_layernorm"): t[names.norms[1]][0],
            names.tap("dense_h_to_4h"): t["act"][0],
            names.tap("dense_4h_to_h"): t["layer"][0],
            **{f"hf.{name}": t[name][0] for name in (names.dense, *names.mlp_parts, names.down)},
        }
        expected = 1 if model.rotary_dim else 0
        if self.rope_calls != expected:
            raise Refusal(
                f"transformers: expected RoPE {expected} times in a layer's step, got {self.rope_calls} times"
            )
        return taps, self.tables(model, tokens)


class ModelRecorder(Recorder):
    """Records the taps and the logits of a model with a head."""

    def __init__(self, hf, model):
        base, names = getattr(hf, model.names.base), model.names
        # Where positions are learned, the module behind both embeddings makes the tap.
        made_by = f"{names.base}.{names.embedding_tap}" if names.positions else names.embedding
        outputs = {names.embedding_tap: hf.get_submodule(made_by)}
        outputs[names.final_norm_tap] = hf.get_submodule(names.final_norm)
        outputs |= {f"layers.{n}.output": layer for n, layer in enumerate(layers_of(base, model))}
        super().__init__(model, outputs | {"logits": hf.get_output_embeddings()}, {})

    def taps(self):
        """The taps by name, (tokens, hidden) each, and the logits (tokens, vocab) under "logits"."""
        return {name: to_numpy(self.tensors[name][0]) for name in self.outputs}


def run_variant(model, weights, step, dtype, implementation, device, wide_norms=False):
    """All taps of the step computed in `dtype`, and cos and sin. Each sequence runs alone, without padding. With
    `wide_norms` RMSNorm computes in `dtype` too."""
    import torch

    hf = one_layer(model, weights, step.dtype, dtype, implementation, device)
    if wide_norms:
        widen_norms(hf)
    compute = getattr(torch, dtype)

    def tensor(array):
        return to_torch(array, step.dtype).to(device, compute)

    runs = []
    for b in range(len(step.kv_len)):
        rows = slice(b * step.q_len, (b + 1) * step.q_len)
        hidden = tensor(step.hidden[rows])[None]
        positions = torch.from_numpy(step.positions(b))[None].to(device)
        with LayerRecorder(hf, model) as recorder:
            cache = filled_cache([tuple(tensor(side)[None] for side in step.past(b))])
            _, cache = call(hf, cache, inputs_embeds=hidden, position_ids=positions)
            runs.append(recorder.taps(hidden, cache))
    return tuple(
        {name: np.concatenate([run[part][name] for run in runs]) for name in runs[0][part]} for part in range(2)
    )


def prefill_step(checkpoint, layer, q_len, kv_len, seed, device):
    """A step from a run of the model over random token ids: layer `layer`'s cache after a prefill of kv_len - q_len
    tokens, and its input for the next q_len tokens. The model runs in the stored dtype with sdpa."""
    import torch

    model = checkpoint.model
    names = model.names
    outside = {f"{names.embedding}.weight": (model.vocab_size, model.hidden_size)}
    if names.positions:
        outside[f"{names.positions}.weight"] = (model.max_position_embeddings, model.hidden_size)
    outside |= {f"{names.final_norm}.{part}": (model.hidden_size,) for part in names.norm_parts}
    arrays, dtype = checkpoint.tensors(outside)
    for n in range(layer + 1):
        arrays |= {names.layer(n) + name: array for name, array in checkpoint.layer(n)[1].items()}
    state = {below_base(model, name): array for name, array in arrays.items()}
    hf = build(model, state, dtype, dtype, attention_implementations()[-1], device, layer + 1)

    inputs = []
    layers_of(hf, model)[layer].register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    shape = (len(kv_len), model.kv_heads, max(kv_len) - q_len, model.head_dim)
    caches = np.zeros((2, *shape), procedural.DTYPES[dtype])
    hidden = []
    for b, n in enumerate(kv_len):
        ids = torch.from_numpy(np.random.default_rng([seed, b]).integers(0, model.vocab_size, (1, n))).to(device)
        positions = torch.arange(n, device=device)[None]
        cache, past = empty_cache(), n - q_len
        if past:
            _, cache = call(hf, cache, input_ids=ids[:, :past], position_ids=positions[:, :past])
            for side, entries in zip(caches, cache_entries(cache, layer)):
                # Versions before 4.46 keep keys in float32, RoPE's dtype, for models of every dtype.
                side[b, :, :past] = to_numpy(entries[0].to(hf.dtype))
        call(hf, cache, input_ids=ids[:, past:], position_ids=positions[:, past:])
        hidden.append(to_numpy(inputs[-1][0]))
    return Step(dtype, q_len, kv_len, np.concatenate(hidden), "prefill", *caches)


def run_model(hf, model, ids):
    """The taps and logits of one pass over the token ids (tokens), and cos and sin."""
    import torch

    positions = torch.arange(len(ids), device=hf.device)[None]
    with ModelRecorder(hf, model) as recorder:
        call(hf, empty_cache(), input_ids=torch.from_numpy(ids).long().to(hf.device)[None], position_ids=positions)
        return recorder.taps(), recorder.tables(model, len(ids))


def generate(hf, prompt, new_tokens):
    """The prompt's token ids with the greedy ids behind them, and the logits (new_tokens, vocab) that chose these. Of
    equal logits the lowest id is chosen. The prompt is one step, and so is each token after it."""
    import torch

    ids, cache, logits = list(prompt), empty_cache(), []
    fed = 0
    for _ in range(new_tokens):
        step = torch.tensor(ids[fed:], device=hf.device)[None]
        positions = torch.arange(fed, len(ids), device=hf.device)[None]
        result, cache = call(hf, cache, input_ids=step, position_ids=positions)
        fed = len(ids)
        logits.append(to_numpy(result.logits[0, -1]))
        ids.append(int(logits[-1].argmax()))
    return np.array(ids, np.int32), np.stack(logits)


def versions(*packages):
    """The versions of Python and of packages, those that dumps need where none are named."""
    named = packages or ("torch", "transformers", "safetensors", "numpy", "h5py")
    return {"python": platform.python_version(), **{name: importlib.import_module(name).__version__ for name in named}}


def device_name(device):
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU {platform.machine()}"


def has_rms_norms(model):
    return model.names.norm_parts == ("weight",)


def about(dtype, implementation, device, wide_norms=False):
    """The attributes of a variant."""
    described = {"dtype": dtype, "attn_implementation": implementation, "device": device_name(device)}
    return described | ({"norms": "RMSNorm modules replaced by float64 forms"} if wide_norms else {})


def torch_device(name):
    """A device of torch by the name that programs take: auto, cpu or cuda."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch finds no GPU")
    return name
