"""The calls of ClusterFusion's Pythia port, on the layer of this library.

``import cf_ops.clusterfusion as clusterfusion`` runs programs that were written for it: single decode steps of a
Pythia-2.8B or Pythia-6.9B layer, and LayerNorm with a quantised QKV product. Values are those of
``cf_ops.ops.decode_layer`` and ``cf_ops.ops.ln_qkv_heads``, bit for bit.

Layouts: tensors are float16 but for cos and sin. Weights are (out, in); QKV rows are interleaved by head. A cache is
(max_seq, hidden): a row for each token, the heads side by side. A call writes row ``current_seq_len``, the number of
valid rows before it. cos and sin are float32 of head_dim elements: the position's cosines and sines of Hugging Face's
rotary part, then 1 and 0, which are not read.

Tensors lie on the CPU or on a GPU, all on one. On a GPU activations are float16 as well, and the work goes onto torch's
current stream. The CPU backend has no float16 activations: there inputs and cache rows are widened to float32, which is
exact, and the output, the key and the value are rounded to float16 once.

Unlike the port, a call checks its arguments, neither synchronises nor prints, and raises ValueError, TypeError or
NotImplementedError with one line. Nothing has been written then. On a GPU the first call with a quantised weight packs
it and waits for that. Needs torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cf_ops import _core, ops
from cf_ops._gptq import kept
from cf_ops._tensors import are_plain, check_tensor, integer, library_of, require_torch, torch_name

torch = require_torch("cf_ops.clusterfusion")

__all__ = [
    "fused_ln_qkv_gptq",
    "pythia_2b8_create_graph_context",
    "pythia_2b8_decoder_layer",
    "pythia_2b8_decoder_layer_split",
    "pythia_2b8_destroy_graph_context",
    "pythia_2b8_graph_decode_step",
    "pythia_6b9_create_graph_context",
    "pythia_6b9_decoder_layer",
    "pythia_6b9_decoder_layer_split",
    "pythia_6b9_destroy_graph_context",
    "pythia_6b9_graph_decode_step",
]

# The port's argument -> Hugging Face's name below gpt_neox.layers.N. A layer call and a graph's step name biases
# differently.
_WEIGHTS = {
    "ln_weight": "input_layernorm.weight",
    "ln_bias": "input_layernorm.bias",
    "weight_qkv": "attention.query_key_value.weight",
    "bias_qkv": "attention.query_key_value.bias",
    "qkv_bias": "attention.query_key_value.bias",
    "weight_o": "attention.dense.weight",
    "bias_o": "attention.dense.bias",
    "o_bias": "attention.dense.bias",
    "post_ln_weight": "post_attention_layernorm.weight",
    "post_ln_bias": "post_attention_layernorm.bias",
    "mlp_up_weight": "mlp.dense_h_to_4h.weight",
    "mlp_up_bias": "mlp.dense_h_to_4h.bias",
    "mlp_down_weight": "mlp.dense_4h_to_h.weight",
    "mlp_down_bias": "mlp.dense_4h_to_h.bias",
}

_QKV, _OUT, _UP, _DOWN = (_WEIGHTS[name] for name in ("weight_qkv", "weight_o", "mlp_up_weight", "mlp_down_weight"))


@dataclass
class _Cache:
    """Keys and values in this library's layout, (1, heads, capacity, head_dim), and how many entries are valid."""

    k: Any
    v: Any
    length: int = 0


@dataclass
class _Context:
    """What a graph context owns: its weights, its caches as the caller holds them, and the same in this library's
    layout."""

    model: str
    weights: dict[str, Any]
    k_cache: Any
    v_cache: Any
    max_seq_len: int
    cache: _Cache
    own: tuple[Any, Any]  # both tensors of `cache`
    steps: _core.PortSteps | None  # on a GPU, where steps are CUDA graphs
    lock: threading.Lock = field(default_factory=threading.Lock)


_IMPLS = ("graph", "unfused")  # of a context's steps
_LEAST_NUMBERS = 4096
_SPARE_ENTRIES = 64  # a cache that lasts one call has a multiple of so many entries: few shapes are bound to the op

# One table for all models, so that a context of another model is known as such.
_contexts: dict[int, _Context] = {}
_contexts_lock = threading.Lock()


class DecoderCalls:
    """The calls of the port for one size of GPT-NeoX layers with a parallel residual."""

    def __init__(self, model: str, hidden: int, heads: int) -> None:
        self._model = model
        self._hidden = hidden
        self._heads = heads
        self._head_dim = hidden // heads
        config = {
            "model_type": "gpt_neox",
            "hidden_size": hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
            "vocab_size": 1,
            "rotary_pct": 0.25,
        }
        self._config = json.dumps(config)
        self._layers: dict[int, ops.CheckedOp] = {}  # of a GPU, by the cache's capacity
        self._port_layer = _core.PortLayer(self._config)  # what looks right on a GPU, in one call
        self._half = self._head_dim // 8  # each cosine and sine is of two of the rotated elements
        matrices = {
            "weight_qkv": (3 * hidden, hidden),
            "weight_o": (hidden, hidden),
            "mlp_up_weight": (4 * hidden, hidden),
            "mlp_down_weight": (hidden, 4 * hidden),
        }
        rows = {_WEIGHTS[name].removesuffix("weight"): shape[0] for name, shape in matrices.items()}
        self._shapes: dict[str, tuple[int, ...]] = {"input": (1, hidden), **matrices}
        for name, target in _WEIGHTS.items():
            self._shapes.setdefault(name, (rows.get(target.removesuffix("bias"), hidden),))

    def decoder_layer(
        self,
        input: Any,
        weight_qkv: Any,
        bias_qkv: Any,
        weight_o: Any,
        bias_o: Any,
        k_cache: Any,
        v_cache: Any,
        ln_weight: Any,
        ln_bias: Any,
        cos: Any,
        sin: Any,
        post_ln_weight: Any,
        post_ln_bias: Any,
        mlp_up_weight: Any,
        mlp_up_bias: Any,
        mlp_down_weight: Any,
        mlp_down_bias: Any,
        current_seq_len: int,
    ) -> tuple[Any, Any, Any]:
        """One token through one layer: output = x + attention(norm1(x)) + mlp(norm2(x)).

        Returns (output (1, hidden), k_new (1, heads, head_dim) after RoPE, v_new likewise), and writes row
        current_seq_len of k_cache and v_cache. The call keeps nothing: it turns the valid rows of both caches into this
        library's layout first, which reads and writes 2 * current_seq_len * hidden elements; a graph context does that
        once.
        """
        given = (
            *(input, cos, sin, k_cache, v_cache, weight_qkv, bias_qkv, weight_o, bias_o, ln_weight, ln_bias),
            *(post_ln_weight, post_ln_bias, mlp_up_weight, mlp_up_bias, mlp_down_weight, mlp_down_bias),
        )
        made = self._port_layer.run(given, current_seq_len, None, 0, None)
        if made is not None:
            return made
        weights = {
            "weight_qkv": weight_qkv,
            "bias_qkv": bias_qkv,
            "weight_o": weight_o,
            "bias_o": bias_o,
            "ln_weight": ln_weight,
            "ln_bias": ln_bias,
            "post_ln_weight": post_ln_weight,
            "post_ln_bias": post_ln_bias,
            "mlp_up_weight": mlp_up_weight,
            "mlp_up_bias": mlp_up_bias,
            "mlp_down_weight": mlp_down_weight,
            "mlp_down_bias": mlp_down_bias,
        }
        call = f"{self._model} decoder_layer"
        index = _gpu_of(input)
        if not self._fits(index, weights, input, cos, sin, k_cache, v_cache):
            check = _Check(call, "input", input)
            self._check_weights(check, weights)
            self._check_step(check, input, cos, sin)
            self._check_caches(check, k_cache, v_cache)
        length = integer(call, "current_seq_len", current_seq_len, 0, k_cache.shape[0] - 1)
        cache = self._empty_cache(-(-(length + 1) // _SPARE_ENTRIES) * _SPARE_ENTRIES, input.device)
        return self._step(_named(weights), input, cos, sin, k_cache, v_cache, cache, length, index)

    def create_graph_context(
        self,
        id: int,
        k_cache: Any,
        v_cache: Any,
        weight_qkv: Any,
        weight_o: Any,
        mlp_up_weight: Any,
        mlp_down_weight: Any,
        max_seq_len: int,
        *,
        impl: str = "graph",
    ) -> None:
        """Makes the context ``id`` of one layer, for sequences of up to max_seq_len tokens.

        The context holds the tensors, and a copy of both caches in this library's layout. The first step turns the
        valid rows into that layout, and so does a step whose current_seq_len does not follow the last step's; other
        steps add their own row alone, so rows must not change between them. Refuses an id that is in use.

        impl says how a GPU runs the steps that add one row; the port has no such argument. With "graph" a step is one
        launch of a CUDA graph, whose kernels get the step's tensors; a graph is captured when a step first needs it.
        With "unfused" the host launches every kernel. It also does where a step turns rows, and where the caller
        captures a graph. Both give the same bits.
        """
        call = f"{self._model} create_graph_context"
        integer(call, "id", id)
        weights = {
            "weight_qkv": weight_qkv,
            "weight_o": weight_o,
            "mlp_up_weight": mlp_up_weight,
            "mlp_down_weight": mlp_down_weight,
        }
        check = _Check(call, "k_cache", k_cache)
        self._check_weights(check, weights)
        self._check_caches(check, k_cache, v_cache)
        integer(call, "max_seq_len", max_seq_len, 1, k_cache.shape[0])
        if impl not in _IMPLS:
            raise ValueError(f"{call}: impl must be {' or '.join(_IMPLS)}, got {impl!r}")
        cache = self._empty_cache(max_seq_len, k_cache.device)
        steps = None
        if impl == "graph" and k_cache.is_cuda:
            spare = torch.empty(self._port_layer.spare_elements, dtype=torch.float16, device=k_cache.device)
            steps = _core.PortSteps(spare)
        own = cache.k, cache.v
        context = _Context(self._model, _named(weights), k_cache, v_cache, max_seq_len, cache, own, steps)
        with _contexts_lock:
            if id in _contexts:
                raise ValueError(f"{call}: id {id} is a context of {_contexts[id].model}, expected an id not in use")
            _contexts[id] = context

    def graph_decode_step(
        self,
        id: int,
        input: Any,
        ln_weight: Any,
        ln_bias: Any,
        qkv_bias: Any,
        o_bias: Any,
        cos: Any,
        sin: Any,
        k_cache: Any,
        v_cache: Any,
        post_ln_weight: Any,
        post_ln_bias: Any,
        mlp_up_bias: Any,
        mlp_down_bias: Any,
        current_seq_len: int,
    ) -> tuple[Any, Any, Any]:
        """decoder_layer() with the weights and the caches of a context.

        k_cache and v_cache must be the context's own; row current_seq_len of both is written. Refuses an id that
        create_graph_context() did not make, that is destroyed, or that is another model's.
        """
        context = _contexts.get(id) if type(id) is int else None
        if context is not None and context.model == self._model:
            own = context.weights
            given = (
                *(input, cos, sin, k_cache, v_cache, own[_QKV], qkv_bias, own[_OUT], o_bias, ln_weight, ln_bias),
                *(post_ln_weight, post_ln_bias, own[_UP], mlp_up_bias, own[_DOWN], mlp_down_bias),
            )
            made = self._step_of(context, given, current_seq_len)
            if made is not None:
                return made
        call = f"{self._model} graph_decode_step"
        context = self._context(call, id)
        weights = {
            "ln_weight": ln_weight,
            "ln_bias": ln_bias,
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
            "post_ln_weight": post_ln_weight,
            "post_ln_bias": post_ln_bias,
            "mlp_up_bias": mlp_up_bias,
            "mlp_down_bias": mlp_down_bias,
        }
        index = _gpu_of(context.k_cache)
        if not self._fits(index, weights, input, cos, sin, k_cache, v_cache):
            check = _Check(call, "k_cache", context.k_cache)
            self._check_weights(check, weights)
            self._check_step(check, input, cos, sin)
            self._check_caches(check, k_cache, v_cache)
        named = {**context.weights, **_named(weights)}
        for name, given, own in (("k_cache", k_cache, context.k_cache), ("v_cache", v_cache, context.v_cache)):
            if given.data_ptr() != own.data_ptr() or given.shape != own.shape:
                raise ValueError(
                    f"{call}: '{name}' is another tensor, expected the one that context {id} was made with"
                )
        length = integer(call, "current_seq_len", current_seq_len, 0, context.max_seq_len - 1)
        with context.lock:
            return self._step(named, input, cos, sin, k_cache, v_cache, context.cache, length, index)

    def _step_of(self, context: _Context, given: tuple[Any, ...], current_seq_len: int) -> tuple[Any, Any, Any] | None:
        """A step whose tensors, in PortLayer's order, look right on a GPU. None for any other, which is checked."""
        if given[3] is not context.k_cache or given[4] is not context.v_cache:
            return None
        with context.lock:
            cache = context.cache
            made = self._port_layer.run(given, current_seq_len, context.own, cache.length, context.steps)
            if made is not None:
                cache.length = current_seq_len + 1
        return made

    def destroy_graph_context(self, id: int) -> None:
        """Frees what a context holds. Refuses the ids that graph_decode_step() refuses."""
        self._context(f"{self._model} destroy_graph_context", id, is_last=True)

    def _context(self, call: str, id: int, is_last: bool = False) -> _Context:
        """A context of this model by its id; the last one to ask for it takes it out of the table."""
        integer(call, "id", id)
        with _contexts_lock:
            context = _contexts.get(id)
            if context is None:
                in_use = ", ".join(map(str, sorted(_contexts))) or "none"
                raise ValueError(f"{call}: there is no context {id}, expected an id in use: {in_use}")
            if context.model != self._model:
                raise ValueError(f"{call}: context {id} is of {context.model}, expected one of {self._model}")
            if is_last:
                del _contexts[id]
            return context

    def _fits(
        self, index: int | None, weights: Mapping[str, Any], input: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any
    ) -> bool:
        """Whether all checks of a call on GPU `index` would pass. This is faster, and says no where it is not sure."""
        tensors = (*weights.values(), input, cos, sin, k_cache, v_cache)
        if index is None or not are_plain(tensors, index):
            return False
        if k_cache.requires_grad or v_cache.requires_grad or cos.dtype is not torch.float32:
            return False
        if sin.dtype is not torch.float32 or cos.numel() != self._head_dim or sin.numel() != self._head_dim:
            return False
        half, shapes, rows = torch.float16, self._shapes, k_cache.shape
        for name, tensor in weights.items():
            if tensor.dtype is not half or tensor.shape != shapes[name]:
                return False
        if input.dtype is not half or input.shape != shapes["input"]:
            return False
        if k_cache.dtype is not half or v_cache.dtype is not half or v_cache.shape != rows:
            return False
        return len(rows) == 2 and rows[0] > 0 and rows[1] == self._hidden

    def _check_weights(self, check: _Check, weights: Mapping[str, Any]) -> None:
        for name, tensor in weights.items():
            check(name, tensor, "float16", self._shapes[name])

    def _check_step(self, check: _Check, input: Any, cos: Any, sin: Any) -> None:
        check("input", input, "float16", self._shapes["input"])
        for name, tensor in (("cos", cos), ("sin", sin)):
            shape = check(name, tensor, "float32")
            if tensor.numel() != self._head_dim:
                raise ValueError(f"{check.call}: '{name}' has shape {shape}, expected {self._head_dim} elements")

    def _check_caches(self, check: _Check, k_cache: Any, v_cache: Any) -> None:
        shape = check("k_cache", k_cache, "float16", is_written=True)
        if len(shape) != 2 or shape[0] < 1 or shape[1] != self._hidden:
            raise ValueError(f"{check.call}: 'k_cache' has shape {shape}, expected (max_seq, {self._hidden})")
        check("v_cache", v_cache, "float16", shape, is_written=True)

    def _empty_cache(self, capacity: int, device: Any) -> _Cache:
        shape = 1, self._heads, capacity, self._head_dim
        return _Cache(*(torch.empty(shape, dtype=_activation(device), device=device) for _ in range(2)))

    def _step(
        self,
        weights: Mapping[str, Any],
        input: Any,
        cos: Any,
        sin: Any,
        k_cache: Any,
        v_cache: Any,
        cache: _Cache,
        length: int,
        index: int | None,
    ) -> tuple[Any, Any, Any]:
        """Runs the layer behind the first ``length`` rows of the caches, and appends to them and to ``cache``. `index`
        is the GPU's, None on the CPU."""
        if cache.length != length:
            for ours, rows in ((cache.k, k_cache), (cache.v, v_cache)):
                ours[0, :, :length] = rows[:length].view(length, self._heads, self._head_dim).transpose(0, 1)
            cache.length = length
        if index is not None:
            return self._step_on_gpu(index, weights, input, cos, sin, k_cache, v_cache, cache, length)
        activation = _activation(input.device)
        made = ops.decode_layer(
            weights,
            self._config,
            input.to(activation),
            torch.zeros(1, dtype=torch.int32, device=input.device),
            torch.full((1,), length + 1, dtype=torch.int32, device=input.device),
            cos.view(-1)[: self._half].view(1, -1),
            sin.view(-1)[: self._half].view(1, -1),
            cache.k,
            cache.v,
            max_kv_len=length + 1,  # the plan of a GPU's attention follows from it, and not from the cache's room
        )
        k_new, v_new = made.k.half(), made.v.half()
        for ours, rows, new in ((cache.k, k_cache, k_new), (cache.v, v_cache, v_new)):
            rows[length] = new.view(-1)
            if activation != torch.float16:
                ours[0, :, length] = new[0]  # later steps read what the caller's cache holds
        cache.length = length + 1
        return made.output.half(), k_new, v_new

    def _step_on_gpu(
        self,
        index: int,
        weights: Mapping[str, Any],
        input: Any,
        cos: Any,
        sin: Any,
        k_cache: Any,
        v_cache: Any,
        cache: _Cache,
        length: int,
    ) -> tuple[Any, Any, Any]:
        """The same on a GPU, with few launches: its lengths lie there already, and both rows are written at once."""
        numbers = _numbers_on(index, length + 1)
        if _numbers.get(index) is numbers and ops.use_torch():
            self._port_layer.use_numbers(index, numbers.zero.data_ptr(), numbers.most)
        table = 1, self._half
        tensors = {
            "hidden": input,
            "positions": numbers.zero,  # the row of cos and sin
            "kv_len": numbers.all[length + 1 : length + 2],
            "cos": cos.as_strided(table, table[::-1]),
            "sin": sin.as_strided(table, table[::-1]),
            "k_cache": cache.k,
            "v_cache": cache.v,
            **weights,
        }
        capacity = cache.k.shape[2]
        layer = self._layers.get(capacity)
        if layer is None:
            scalars = (("config", self._config),)
            layer = self._layers[capacity] = ops.CheckedOp("decode_layer", tensors, scalars, ("k", "v", "output"))
        # The plan of a GPU's attention follows from max_kv_len, and not from the cache's room.
        k, v, output = layer(index, tensors, {"max_kv_len": length + 1})
        torch._foreach_copy_([k_cache[length], v_cache[length]], [k.view(-1), v.view(-1)])
        cache.length = length + 1
        return output, k, v


def _named(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The port's weights by Hugging Face's names."""
    return {_WEIGHTS[name]: tensor for name, tensor in weights.items()}


def _gpu_of(tensor: Any) -> int | None:
    """The GPU that a tensor lies on, by its number."""
    return int(tensor.get_device()) if getattr(tensor, "is_cuda", False) else None


class _Numbers(NamedTuple):
    """The numbers 0 to `most` in a GPU's memory, and those that were there before."""

    most: int
    zero: Any
    all: Any
    before: Any  # kept, since work on a stream may still read it


_numbers: dict[int, _Numbers] = {}


def _numbers_on(index: int, most: int) -> _Numbers:
    """The numbers 0 to `most` or beyond, in the memory of GPU `index`: a length lies there before a call wants it."""
    found = _numbers.get(index)
    if found is not None and found.most >= most:
        return found
    with _contexts_lock:
        room = max(_LEAST_NUMBERS, 2 * most)
        numbers = torch.arange(room, dtype=torch.int32, device=torch.device("cuda", index))
        made = _Numbers(room - 1, numbers[:1], numbers, found)
        if not torch.cuda.is_current_stream_capturing():  # memory that a graph captures belongs to the graph
            torch.cuda.current_stream(index).synchronize()  # other streams read the numbers, too
            _numbers[index] = made
        return made


class _Check:
    """Checks a call's torch tensors. All lie on the device of the first."""

    def __init__(self, call: str, first: str, tensor: Any) -> None:
        self.call = call
        self._first = first
        self._device = tensor.device if isinstance(tensor, torch.Tensor) else None
        self._index = tensor.get_device() if getattr(tensor, "is_cuda", False) else None

    def __call__(
        self, name: str, tensor: Any, dtype: str, shape: tuple[int, ...] | None = None, is_written: bool = False
    ) -> tuple[int, ...]:
        """A tensor's shape. Refuses what check_tensor() refuses, another dtype, and another shape than a given one."""
        if self._index is None or is_written or not are_plain((tensor,), self._index):
            if library_of(self.call, name, tensor) != "torch":
                raise TypeError(f"{self.call}: '{name}' must be a torch tensor, got a numpy array")
            check_tensor(self.call, name, tensor, "torch", self._first, is_written, self._device)
        got, got_shape = torch_name(tensor.dtype), tuple(tensor.shape)
        if got != dtype:
            raise ValueError(f"{self.call}: '{name}' has dtype {got}, expected {dtype}")
        if shape is not None and got_shape != shape:
            raise ValueError(f"{self.call}: '{name}' has shape {got_shape}, expected {shape}")
        return got_shape


def _activation(device: Any) -> Any:
    """The dtype in which a device's backend computes what is float16 for the caller."""
    return torch.float16 if device.type == "cuda" else torch.float32


def fused_ln_qkv_gptq(
    input: Any,
    qweight: Any,
    qzeros: Any,
    scales: Any,
    ln_weight: Any,
    ln_bias: Any,
    num_heads: int,
    kv_num_heads: int,
    head_size: int,
    groupsize: int,
    eps: float,
    *,
    zero_offset: int = 1,
) -> tuple[Any, Any, Any]:
    """LayerNorm, then the product with query, key and value projections quantised to 4 bits.

    input: float16 (batch, seq, hidden). qweight: int32 (hidden / 8, N), qzeros: int32 (groups, N / 8), scales: float16
    (groups, N), with N = (num_heads + 2 * kv_num_heads) * head_size: the columns of the query heads, then of the key
    heads, then of the value heads. ln_weight, ln_bias: float16 (hidden). groupsize: inputs that share a scale, -1 for
    all. zero_offset: 1 where qzeros hold the zeros minus one (checkpoint_format "gptq"), 0 for "gptq_v2".

    Returns float16 q (batch, num_heads, seq, head_size), k and v (batch, kv_num_heads, seq, head_size): neither RoPE
    nor a cache. The formula is that of ``cf_ops.ops.ln_qkv_heads``.
    """
    call = "fused_ln_qkv_gptq"
    for name, size in (("num_heads", num_heads), ("kv_num_heads", kv_num_heads), ("head_size", head_size)):
        integer(call, name, size, 1)
    check = _Check(call, "input", input)
    shape = check("input", input, "float16")
    if len(shape) != 3:
        raise ValueError(f"{call}: 'input' has shape {shape}, expected (batch, seq, hidden)")
    hidden, columns = shape[2], (num_heads + 2 * kv_num_heads) * head_size
    group = hidden if groupsize == -1 else integer(call, "groupsize", groupsize, 1)
    groups = -(-hidden // group)
    check("qweight", qweight, "int32", (hidden // 8, columns))
    check("qzeros", qzeros, "int32", (groups, columns // 8))
    check("scales", scales, "float16", (groups, columns))
    for name, tensor in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        check(name, tensor, "float16", (hidden,))
    scalars = {"group_size": group, "zero_offset": zero_offset}
    weight = kept(
        ops.GptqWeight,
        qweight,
        qzeros,
        scales,
        lambda: torch.arange(hidden, dtype=torch.int32, device=input.device) // group,
        **scalars,
    )
    activation = input.to(_activation(input.device))
    made = ops.ln_qkv_heads(activation, ln_weight, ln_bias, weight, heads=num_heads, kv_heads=kv_num_heads, eps=eps)
    q, k, v = (tensor.half() for tensor in made)
    return q, k, v


_PYTHIA_2B8 = DecoderCalls("pythia-2.8b", 2560, 32)
pythia_2b8_decoder_layer = _PYTHIA_2B8.decoder_layer
pythia_2b8_decoder_layer_split = _PYTHIA_2B8.decoder_layer
pythia_2b8_create_graph_context = _PYTHIA_2B8.create_graph_context
pythia_2b8_graph_decode_step = _PYTHIA_2B8.graph_decode_step
pythia_2b8_destroy_graph_context = _PYTHIA_2B8.destroy_graph_context

_PYTHIA_6B9 = DecoderCalls("pythia-6.9b", 4096, 32)
pythia_6b9_decoder_layer = _PYTHIA_6B9.decoder_layer
pythia_6b9_decoder_layer_split = _PYTHIA_6B9.decoder_layer
pythia_6b9_create_graph_context = _PYTHIA_6B9.create_graph_context
pythia_6b9_graph_decode_step = _PYTHIA_6B9.graph_decode_step
pythia_6b9_destroy_graph_context = _PYTHIA_6B9.destroy_graph_context
