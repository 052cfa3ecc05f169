"""Every op of the library as a function on numpy arrays or torch tensors.

A function has the name of its op's contract and the names of the contract's arguments. A call's tensors come from one
library and lie on one device. They are used where they lie: nothing is copied, and a tensor that is not contiguous is
refused. Outputs are allocated by the tensors' library and returned in the order of the contract; they have no gradient.

torch tensors of a GPU are used on torch's current stream of that GPU. A call launches kernels and returns: it does not
wait for them, and may be captured into a CUDA graph.
"""

from __future__ import annotations

import importlib.resources
import inspect
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core, _device
from cf_ops._gptq import GPTQ_PARTS, PackedForms
from cf_ops._tensors import (
    Described,
    T,
    Tensor,
    are_plain,
    check_tensor,
    describe,
    empty,
    integer,
    library_of,
    torch_name,
)

__all__ = [
    "Budget",
    "Epilogue",
    "GptqWeight",
    "HeadNormLayerOutputs",
    "LayerOutputs",
    "QkvLayout",
    "Runs",
    "Window",
    "attention",
    "budget",
    "decode_layer",
    "embedding",
    "kv_append",
    "layernorm",
    "layernorm_residual",
    "linear",
    "ln_qkv",
    "ln_qkv_heads",
    "qk_norm",
    "residual_layernorm",
    "rmsnorm",
    "rope",
    "rope_append",
    "rope_table",
]

Epilogue = Literal["none", "gelu_erf", "gelu_tanh", "residual", "swiglu"]
"""What happens to a product before it is stored."""

QkvLayout = Literal["interleaved_by_head", "separate"]
"""How the heads of q, k and v lie in their product: GPT-NeoX's order (tokens, heads, 3, head_dim), or all heads of q,
then of k, then of v, (tokens, heads + 2 * kv_heads, 1, head_dim)."""

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., object])

Runs = Sequence[tuple[int, int, int]]
"""The runs of a step: (sequence, first_row, count) each."""

_RUNS = """\
``runs`` is a list of (sequence, first_row, count): ``count`` rows from row ``first_row`` on are consecutive tokens of
that sequence of the cache. Runs have different counts. Their rows follow each other from row 0 on; sequences come in
any order, each at most once. What a run is given does not depend on the others. Without runs each sequence has as many
rows, in order."""

Window = tuple[int, int]
"""Which keys are seen: (keys, sinks), how many of the newest and how many of the first."""

_PAGES = """\
With ``page_table``, int32, the caches are pages that lie in any order, and several sequences may share one that none of
them writes to. On a GPU a page has a multiple of 64 entries, up to 1024, where attention reads it."""

_WINDOW = "``window`` is (keys, sinks): how many of the newest keys are seen, and how many of the first."

_DTYPES_AND_ERRORS = """\
Dtypes: activations share one dtype, float32 or float64 on the CPU, float16, bfloat16 or float32 on a GPU. Weights share
another: float16, bfloat16, float32 or, on the CPU, float64. On a GPU products of 16-bit activations take weights of
their own dtype. Cosines and sines are float32; lengths, positions and ids are int32.

Raises ValueError for a shape, dtype, stride, device or value that the op refuses, TypeError for what is no tensor,
NotImplementedError for what no backend of this installation computes. Nothing has been written then. Lengths, positions
and ids in a GPU's memory cannot be checked before the launch: nothing is read or written out of bounds for them, and
what depends on them is NaN."""


@dataclass(frozen=True, kw_only=True)
class GptqWeight(PackedForms, Generic[T]):
    """A matrix (out, in) quantised by GPTQ, as AutoGPTQ and GPTQModel store it.

    W[n, k] = scales[g, n] * (q(k, n) - zero(g, n)), g = g_idx[k], zero(g, n) = stored(g, n) + zero_offset.
    Source: Frantar et al. 2022 (arXiv:2210.17323).

    On a GPU the first call packs the weight into the layout of the kernels and waits for that; it cannot be captured
    into a CUDA graph. The packed form is kept with this object, and made again where the tensors have changed.

    Attributes
    ----------
    qweight: int32 (in * bits / 32, out), packed along in, low bits first.
    qzeros: int32 (groups, out * bits / 32), packed along out.
    scales: float16 (groups, out).
    g_idx: int32 (in), the group of each input.
    bits: 4 or 8.
    group_size: inputs that share a scale; the last group may be shorter.
    zero_offset: 1 for checkpoint_format "gptq" (v1), 0 for "gptq_v2".
    """

    qweight: T
    qzeros: T
    scales: T
    g_idx: T
    bits: int = 4
    group_size: int = 128
    zero_offset: int


_GPTQ_SCALARS = ("bits", "group_size", "zero_offset")
_Weight = Tensor | GptqWeight[Any]
_Tensors = dict[str, _Weight | None]


class Budget(NamedTuple):
    """The error bound of an op's outputs against the float64 oracle, as the op's contract derives it.

    ||error||_2 <= rel_l2 * ||reference||_2 and max |error| <= rel_max * max |reference|.
    """

    rel_l2: float
    rel_max: float


class LayerOutputs(NamedTuple):
    """What the sites of a layer make, in the order of the walk; ``output`` is the layer's result."""

    attn_in: Any
    qkv: Any
    q: Any
    k: Any
    v: Any
    context: Any
    attn_residual: Any
    mlp_in: Any
    mlp_act: Any
    output: Any


class HeadNormLayerOutputs(NamedTuple):
    """The same of a layer whose q and k have a norm of each head: ``qkv_normed`` is what it makes of ``qkv``."""

    attn_in: Any
    qkv: Any
    qkv_normed: Any
    q: Any
    k: Any
    v: Any
    context: Any
    attn_residual: Any
    mlp_in: Any
    mlp_act: Any
    output: Any


def _layer_outputs(made: Sequence[Any]) -> LayerOutputs | HeadNormLayerOutputs:
    """Those of a call, in the order of the contract."""
    return LayerOutputs(*made) if len(made) == len(LayerOutputs._fields) else HeadNormLayerOutputs(*made)


class _Contract(NamedTuple):
    """What the contract's source says: its comment, and the shapes of its arguments as (names, shape)."""

    comment: str
    arguments: list[tuple[str, str]]


@cache
def _contracts() -> dict[str, _Contract]:
    text = importlib.resources.files("cf_ops").joinpath("_contracts.json").read_text(encoding="utf-8")
    return {op: _Contract(entry["comment"], entry["arguments"]) for op, entry in json.loads(text).items()}


def _op(function: F) -> F:
    """Gives a function the docstring of the contract of its name, below what the function itself says."""
    contract = _contracts()[function.__name__]
    width = max(len(names) for names, _ in contract.arguments)
    shapes = "\n".join(f"    {names:{width}}  {shape}".rstrip() for names, shape in contract.arguments)
    options = {"runs": _RUNS, "page_table": _PAGES, "window": _WINDOW}
    texts = [text for name, text in options.items() if name in inspect.signature(function).parameters]
    parts = [function.__doc__ or "", contract.comment, *texts, f"Shapes:\n{shapes}", _DTYPES_AND_ERRORS]
    function.__doc__ = "\n\n".join(part.strip("\n") for part in parts if part)
    return function


@cache
def _written(op: str) -> frozenset[str]:
    """The names of the tensors that an op writes."""
    tensors, _ = _core.op_example(op)
    return frozenset(name for name, role, *_ in tensors if role in ("output", "state"))


@cache
def _states(op: str) -> list[str]:
    """The names of the arguments that an op writes."""
    tensors, _ = _core.op_example(op)
    return [name for name, role, *_ in tensors if role == "state"]


@cache
def _outputs(op: str) -> list[str]:
    """The names of the tensors that an op makes, in the contract's order."""
    tensors, _ = _core.op_example(op)
    return [name for name, role, *_ in tensors if role == "output"]


class _Measure:
    """The precision that a caller asks the budget of, and the budget of the last call."""

    def __init__(self, compute: str, output: str) -> None:
        self.precision = compute, output
        self.budget: Budget | None = None


_measure: ContextVar[_Measure | None] = ContextVar("_measure", default=None)


class _Like(NamedTuple):
    """A call as KnownCalls knows it: its tensors, what its BoundOp depends on beside them, its numbers."""

    known: _core.KnownCalls
    given: tuple[object, ...]
    fixed: object
    numbers: tuple[object, ...]


def _are_usual(*options: object) -> bool:
    """Whether a call has none of runs, page_table, window and q_sinks. A call that has one of them is not known to the
    compiled part: the next step has other runs."""
    return all(option is None for option in options)


def _like(
    known: _core.KnownCalls, given: tuple[object, ...], fixed: object, numbers: tuple[object, ...], *options: object
) -> _Like | None:
    """How a call with these options is known to the compiled part."""
    return _Like(known, given, fixed, numbers) if _are_usual(*options) else None


def _known_calls(op: str, given: str, **numbers: type) -> _core.KnownCalls:
    """The known calls of an op. ``given`` are the names of its tensors in the order of its calls."""
    names, states = given.split(), _states(op)
    kinds = [(name, kind is int) for name, kind in numbers.items()]
    return _core.KnownCalls(kinds, [names.index(name) for name in states])


@cache
def use_torch() -> bool:
    """Whether the compiled part reads torch's tensors itself."""
    return _core.use_torch(sys.modules["torch"], GptqWeight)


class _Call(Generic[T]):
    """A call of an op. Its tensors are checked as far as shapes and dtypes can be without the outputs."""

    def __init__(self, op: str, like: T, tensors: Mapping[str, _Weight | None], **scalars: object) -> None:
        self.op = op
        self.like = like
        self.scalars = scalars
        self.described: dict[str, Described] = {}
        self._first = next(name for name, tensor in tensors.items() if tensor is like)
        self._library = library_of(op, self._first, like)
        self._device = getattr(like, "device", None) if self._library == "torch" else None
        self._written = _written(op)
        for name, tensor in tensors.items():
            if isinstance(tensor, GptqWeight):
                prefix = name.removesuffix("weight")
                for part in GPTQ_PARTS:
                    self._add(prefix + part, getattr(tensor, part))
                for scalar in _GPTQ_SCALARS:
                    self.scalars[prefix + scalar] = getattr(tensor, scalar)
            elif tensor is not None:
                self._add(name, tensor)
        self._outputs = dict(_core.op_outputs(op, self.described, scalars))

    def _add(self, name: str, tensor: Tensor) -> None:
        is_written = name in self._written
        self.described[name] = describe(self.op, name, tensor, self._library, self._first, is_written, self._device)

    def run(
        self, shapes: Mapping[str, Sequence[int]] | None = None, dtype: str | None = None, like: _Like | None = None
    ) -> tuple[T, ...]:
        """Runs the op and returns its outputs. Their shapes are those that the other tensors say, or ``shapes``. A
        later call on a GPU that is like this one, as ``like`` says, is known then."""
        made = {name: empty(shape, self.like, dtype) for name, shape in {**self._outputs, **(shapes or {})}.items()}
        for name, tensor in made.items():
            self._add(name, tensor)
        _core.run_op(self.op, self.described, self.scalars)
        measure = _measure.get()
        if measure is not None:
            measure.budget = Budget(*_core.op_budget(self.op, self.described, self.scalars, *measure.precision))
        return tuple(made.values())


_ALIGNMENT = 256  # bytes: where each output begins that shares a tensor with others


class _Signature:
    """An op with the dtypes and shapes of its inputs on a GPU, and with those scalars that shapes depend on."""

    def __init__(
        self,
        op: str,
        names: tuple[str, ...],
        dtypes: tuple[Any, ...],
        shapes: tuple[tuple[int, ...], ...],
        scalars: tuple[tuple[str, object], ...],
    ) -> None:
        self._op = op
        self._inputs = {n: (0, torch_name(d), tuple(s)) for n, d, s in zip(names, dtypes, shapes)}
        self._scalars = dict(scalars)
        self._outputs = dict(_core.op_outputs(op, self._inputs, self._scalars))
        self._bound: dict[object, tuple[_core.BoundOp, list[Sequence[int]]]] = {}

    def bound(
        self, shapes: Mapping[str, Sequence[int]] | None, dtype: str
    ) -> tuple[_core.BoundOp, list[Sequence[int]]]:
        """The op with outputs of a dtype and the shapes that run() is given, and the shapes of all outputs."""
        key = dtype, None if shapes is None else tuple(shapes.items())
        found = self._bound.get(key)
        if found is None:
            outputs = {**self._outputs, **(shapes or {})}
            described = {name: (0, dtype, tuple(shape)) for name, shape in outputs.items()}
            found = _core.bind_op(self._op, {**self._inputs, **described}, self._scalars), [*outputs.values()]
            self._bound[key] = found
        return found


_signature = lru_cache(maxsize=4096)(_Signature)


class CheckedOp:
    """An op on tensors of a GPU whose devices, dtypes, shapes and strides the caller vouches for. Dense weights alone.

    Outputs that are not wanted lie side by side in one tensor, which is gone when the op is launched.
    """

    def __init__(
        self, op: str, tensors: Mapping[str, Any], scalars: tuple[tuple[str, object], ...], wanted: Sequence[str]
    ) -> None:
        """Takes the dtypes and the shapes of a call's tensors, the first of which its outputs are like."""
        names, given = tuple(tensors), list(tensors.values())
        dtypes, shapes = tuple([t.dtype for t in given]), tuple([t.shape for t in given])
        signature = _signature(op, names, dtypes, shapes, scalars)
        self._bound, outputs = signature.bound(None, torch_name(given[0].dtype))
        self._names = names
        self._wanted: list[tuple[int, Sequence[int]]] = []
        self._offsets: list[tuple[int, int]] = []
        self._spare = 0  # the size of the tensor for unwanted outputs, in elements
        step = _ALIGNMENT // given[0].element_size()
        for place, (name, shape) in enumerate(zip(_outputs(op), outputs)):
            if name in wanted:
                self._wanted.append((place, shape))
            else:
                self._offsets.append((place, self._spare * given[0].element_size()))
                self._spare += -(-math.prod(shape) // step) * step
        self._count = len(outputs)

    def __call__(self, index: int, tensors: Mapping[str, Any], scalars: dict[str, object]) -> list[Any]:
        """Launches the op on torch's current stream of GPU `index`; the outputs that are wanted, in their order."""
        allocate = _device.prepare_ops(index)
        given = [tensors[name] for name in self._names]
        like = given[0]
        made = [like.new_empty(shape) for _, shape in self._wanted]
        others = like.new_empty(self._spare)
        begin = others.data_ptr()
        outputs = [0] * self._count
        for (place, _), tensor in zip(self._wanted, made):
            outputs[place] = tensor.data_ptr()
        for place, offset in self._offsets:
            outputs[place] = begin + offset
        addresses = [tensor.data_ptr() for tensor in given] + outputs
        self._bound.run(index, _device.current_stream(index), addresses, scalars, (), allocate)
        return made


# The scalars that a BoundOp depends on.
_SHAPING = ("config", "epilogue", "layout", "kv_heads", "runs", "window")


class _CudaCall(Generic[T]):
    """A call of an op on torch tensors of a GPU: a _Call that looks up what depends on dtypes and shapes alone."""

    def __init__(self, op: str, like: Any, tensors: Mapping[str, _Weight | None], scalars: dict[str, object]) -> None:
        self.op = op
        self.like = like
        self.scalars = scalars
        self._index: int = like.get_device()
        self._gptq: dict[str, GptqWeight[Any]] = {}
        names: list[str] = []
        given: list[Any] = []
        fixed: list[tuple[str, object]] = []
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if isinstance(tensor, GptqWeight):
                prefix = name.removesuffix("weight")
                self._gptq[prefix] = tensor
                names += [prefix + part for part in GPTQ_PARTS]
                given += [getattr(tensor, part) for part in GPTQ_PARTS]
                fixed += [(prefix + scalar, getattr(tensor, scalar)) for scalar in _GPTQ_SCALARS]
            else:
                names.append(name)
                given.append(tensor)
        is_plain = are_plain(given, self._index)
        for state in _states(op):
            is_plain = is_plain and not getattr(tensors[state], "requires_grad", False)
        if not is_plain:
            first = next(name for name, tensor in zip(names, given) if tensor is like)
            for name, tensor in zip(names, given):
                check_tensor(op, name, tensor, "torch", first, name in _written(op), like.device)
        fixed += [(name, scalars.pop(name)) for name in _SHAPING if name in scalars]
        key = op, tuple(names), tuple([t.dtype for t in given]), tuple([t.shape for t in given]), tuple(fixed)
        try:
            self._signature = _signature(*key)
        except TypeError:  # a scalar that has no hash, which is refused
            self._signature = _Signature(*key)
        self._tensors = given

    def run(
        self, shapes: Mapping[str, Sequence[int]] | None = None, dtype: str | None = None, like: _Like | None = None
    ) -> tuple[T, ...]:
        """What _Call.run() says, but for a budget."""
        tensor, index = self.like, self._index
        if _measure.get() is not None:
            raise NotImplementedError(f"{self.op}: a budget is measured on the CPU, got tensors on {tensor.device}")
        allocate = _device.prepare_ops(index)
        bound, outputs = self._signature.bound(shapes, torch_name(tensor.dtype) if dtype is None else dtype)
        if dtype is None:
            made = [tensor.new_empty(shape) for shape in outputs]
        else:
            made = [empty(shape, tensor, dtype) for shape in outputs]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        addresses += [tensor.data_ptr() for tensor in made]
        stream = _device.current_stream(index)
        packed: Sequence[_core.DeviceWeight] = ()
        if self._gptq:
            packed = [
                self._gptq[prefix].packed(bound, number, index, stream, addresses, allocate)
                for number, prefix in enumerate(bound.gptq)
            ]
        bound.run(index, stream, addresses, self.scalars, packed, allocate)
        if like is not None and use_torch():
            self._remember(like, bound, [(tuple(t.shape), t.stride()) for t in made], [t.dtype for t in made])
        return tuple(made)

    def remember(self, like: _Like, output: Any) -> None:
        """Lets later calls that are like this one be known. They make one tensor like ``output``, whose elements are
        those of the op's own."""
        if use_torch():
            bound, _ = self._signature.bound(None, torch_name(output.dtype))
            self._remember(like, bound, [(tuple(output.shape), output.stride())], [output.dtype])

    def _remember(
        self, like: _Like, bound: _core.BoundOp, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]], dtypes: list[Any]
    ) -> None:
        weights = [list(self._gptq).index(prefix) for prefix in bound.gptq]
        values = tuple(self.scalars[name] for name in like.known.numbers)
        dtype, allocate = dtypes[0] if dtypes else None, _device.prepare_ops(self._index)
        like.known.remember(like.given, like.fixed, like.numbers, values, bound, weights, sizes, dtype, allocate)


def _call(op: str, like: T, tensors: Mapping[str, _Weight | None], **scalars: object) -> _Call[T] | _CudaCall[T]:
    """A call on the device of ``like``."""
    if getattr(like, "is_cuda", False):
        return _CudaCall(op, like, tensors, scalars)
    return _Call(op, like, tensors, **scalars)


def _runs(op: str, runs: Runs | None) -> dict[str, object]:
    """The runs of a call among its scalars."""
    if runs is None:
        return {}
    try:
        table = tuple([tuple([operator.index(number) for number in run]) for run in runs])
    except TypeError:
        raise TypeError(f"{op}: runs must be a list of (sequence, first_row, count), got {runs!r}") from None
    for i, run in enumerate(table):
        if len(run) != 3:
            raise ValueError(f"{op}: runs[{i}] must be (sequence, first_row, count), got {run!r}")
    if not table:
        raise ValueError(f"{op}: runs: expected at least one, got none")
    return {"runs": table}


def _window(op: str, window: Window | None) -> dict[str, object]:
    """The window of a call among its scalars."""
    if window is None:
        return {}
    try:
        keys, sinks = [operator.index(number) for number in window]
    except (TypeError, ValueError):
        raise TypeError(f"{op}: window must be (keys, sinks), got {window!r}") from None
    return {"window": (keys, sinks)}


def _capacity(k_cache: Tensor, page_table: Tensor | None) -> int:
    """The entries that a sequence may have."""
    return int(k_cache.shape[2]) * (1 if page_table is None else int(page_table.shape[1]))


def budget(op: Callable[P, Any], *, compute: str = "float32", output: str = "float32") -> Callable[P, Budget]:
    """A function of an op's arguments that runs the op and returns its error bound for them.

    The bound is the contract's own: it follows from the length of the sums, the dtypes that a backend computes in and
    stores, and how much the sums cancel for these arguments, which is measured. Give float64 arguments, so that
    what is measured is exact. For an op on a GPU give its arguments on the CPU, and the dtype of its activations as
    ``output``.

    >>> ops.budget(ops.layernorm)(x, gamma, beta).rel_l2  # doctest: +SKIP
    """

    def bound(*args: P.args, **kwargs: P.kwargs) -> Budget:
        measure = _Measure(compute, output)
        token = _measure.set(measure)
        _core.measure(True)
        try:
            op(*args, **kwargs)
        finally:
            _core.measure(False)
            _measure.reset(token)
        if measure.budget is None:
            raise ValueError(f"budget: expected a function that runs an op, got {op!r}")
        return measure.budget

    return bound


def rope_table(rows: int, rotary_dim: int, theta: float = 10000.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """RoPE's cosines and sines of positions 0 .. rows - 1, as numpy arrays: float32 (rows, rotary_dim / 2) each.

    inv_freq[i] = 1 / theta^(2i / rotary_dim), angle = position * inv_freq[i], all in float32.
    Source: transformers' GPTNeoXRotaryEmbedding. Raises ValueError for rows < 1, a rotary_dim that is odd or below 2,
    theta <= 0.
    """
    rows = integer("rope_table", "rows", rows, 1)
    rotary_dim = integer("rope_table", "rotary_dim", rotary_dim, 2)
    if rotary_dim % 2:
        raise ValueError(f"rope_table: rotary_dim must be even, got {rotary_dim}")
    if not theta > 0:
        raise ValueError(f"rope_table: theta must be positive, got {theta}")
    cos, sin = (np.empty((rows, rotary_dim // 2), np.float32) for _ in range(2))
    _core.rope_table(cos.ctypes.data, sin.ctypes.data, rows, rotary_dim // 2, theta)
    return cos, sin


_EMBEDDING = _known_calls("embedding", "ids table position_table positions")
_LAYERNORM = _known_calls("layernorm", "x gamma beta", eps=float)
_RMSNORM = _known_calls("rmsnorm", "x gamma", eps=float)
_LAYERNORM_RESIDUAL = _known_calls("layernorm_residual", "x residual gamma beta", eps=float)
_LAYERNORM_RESIDUAL_ROWS = _known_calls("layernorm_residual", "x residual gamma beta", eps=float)
_RESIDUAL_LAYERNORM = _known_calls("residual_layernorm", "x a b gamma beta", eps=float)
_LINEAR = _known_calls("linear", "x weight bias residual")
_QK_NORM = _known_calls("qk_norm", "qkv q_gamma k_gamma", eps=float)
_ROPE = _known_calls("rope", "qkv cos sin positions")
_KV_APPEND = _known_calls("kv_append", "k v kv_len k_cache v_cache")
_ROPE_APPEND = _known_calls("rope_append", "qkv cos sin positions kv_len k_cache v_cache")
_LN_QKV = _known_calls("ln_qkv", "x gamma beta weight bias cos sin positions kv_len k_cache v_cache", eps=float)
_LN_QKV_HEADS = _known_calls("ln_qkv_heads", "x gamma beta weight bias", eps=float)
_ATTENTION = _known_calls("attention", "q k_cache v_cache kv_len", scale=float, max_kv_len=int)
_DECODE_LAYER = _known_calls("decode_layer", "hidden positions kv_len cos sin k_cache v_cache weights", max_kv_len=int)


@_op
def embedding(
    ids: T,
    table: Tensor,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    dtype: str = "float32",
) -> T:
    """Returns y, of the dtype that ``dtype`` names. A ``position_table`` needs ``positions``."""
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"embedding: dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
    given = ids, table, position_table, positions
    made: T | None = _EMBEDDING.run(given, dtype, ())
    if made is None:
        if (position_table is None) != (positions is None):
            raise ValueError("embedding: position_table and positions must be given together, got one of them")
        tensors: _Tensors = {"ids": ids, "table": table, "position_table": position_table, "positions": positions}
        call = _call("embedding", ids, tensors)
        made = call.run(dtype=dtype, like=_Like(_EMBEDDING, given, dtype, ()))[0]
    return made


@_op
def layernorm(x: T, gamma: Tensor, beta: Tensor, *, eps: float = 1e-5) -> T:
    """Returns y."""
    given = x, gamma, beta
    made: T | None = _LAYERNORM.run(given, None, (eps,))
    if made is None:
        call = _call("layernorm", x, {"x": x, "gamma": gamma, "beta": beta}, eps=eps)
        made = call.run(like=_Like(_LAYERNORM, given, None, (eps,)))[0]
    return made


@_op
def rmsnorm(x: T, gamma: Tensor, *, eps: float = 1e-5) -> T:
    """Returns y."""
    given = x, gamma
    made: T | None = _RMSNORM.run(given, None, (eps,))
    if made is None:
        call = _call("rmsnorm", x, {"x": x, "gamma": gamma}, eps=eps)
        made = call.run(like=_Like(_RMSNORM, given, None, (eps,)))[0]
    return made


@_op
def layernorm_residual(x: T, residual: Tensor, gamma: Tensor, beta: Tensor, *, eps: float = 1e-5) -> T:
    """Returns y."""
    given = x, residual, gamma, beta
    made: T | None = _LAYERNORM_RESIDUAL.run(given, None, (eps,))
    if made is None:
        tensors: _Tensors = {"x": x, "residual": residual, "gamma": gamma, "beta": beta}
        call = _call("layernorm_residual", x, tensors, eps=eps)
        made = call.run(like=_Like(_LAYERNORM_RESIDUAL, given, None, (eps,)))[0]
    return made


@_op
def residual_layernorm(x: T, a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, *, eps: float = 1e-5) -> tuple[T, T]:
    """Returns (h, y)."""
    given = x, a, b, gamma, beta
    made: tuple[T, T] | None = _RESIDUAL_LAYERNORM.run(given, None, (eps,))
    if made is None:
        tensors: _Tensors = {"x": x, "a": a, "b": b, "gamma": gamma, "beta": beta}
        call = _call("residual_layernorm", x, tensors, eps=eps)
        h, y = call.run(like=_Like(_RESIDUAL_LAYERNORM, given, None, (eps,)))
        made = h, y
    return made


@_op
def linear(
    x: T,
    weight: _Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    epilogue: Epilogue = "none",
) -> T:
    """Returns y. ``weight`` is a tensor (out, in) or a GptqWeight; f is chosen by ``epilogue``."""
    given = x, weight, bias, residual
    made: T | None = _LINEAR.run(given, epilogue, ())
    if made is None:
        tensors: _Tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        call = _call("linear", x, tensors, epilogue=epilogue)
        rows = _rows(weight)
        if epilogue == "swiglu" and rows % 2:
            raise ValueError(f"linear: 'weight' has {rows} rows, expected an even number with epilogue 'swiglu'")
        y = x.shape[0], rows // 2 if epilogue == "swiglu" else rows
        made = call.run({"y": y}, like=_Like(_LINEAR, given, epilogue, ()))[0]
    return made


@_op
def qk_norm(
    qkv: T,
    q_gamma: Tensor,
    k_gamma: Tensor,
    *,
    kv_heads: int,
    layout: QkvLayout = "separate",
    eps: float = 1e-6,
) -> T:
    """Returns y, of qkv's shape. ``kv_heads`` is the number of heads of k."""
    given, fixed = (qkv, q_gamma, k_gamma), (layout, kv_heads)
    made: T | None = _QK_NORM.run(given, fixed, (eps,))
    if made is None:
        kv_heads = integer("qk_norm", "kv_heads", kv_heads, 1)
        tensors: _Tensors = {"qkv": qkv, "q_gamma": q_gamma, "k_gamma": k_gamma}
        call = _call("qk_norm", qkv, tensors, layout=layout, kv_heads=kv_heads, eps=eps)
        made = call.run(like=_Like(_QK_NORM, given, fixed, (eps,)))[0]
    return made


@_op
def rope(
    qkv: T,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    *,
    layout: QkvLayout = "interleaved_by_head",
    kv_heads: int | None = None,
) -> tuple[T, T, T]:
    """Returns (q, k, v). ``rope_table()`` makes cos and sin. The layout "separate" needs ``kv_heads``.
    Without cos and sin, None, nothing turns."""
    given, fixed = (qkv, cos, sin, positions), (layout, kv_heads)
    made: tuple[T, T, T] | None = _ROPE.run(given, fixed, ())
    if made is not None:
        return made
    call = _call("rope", qkv, {"qkv": qkv, "cos": cos, "sin": sin, "positions": positions}, layout=layout)
    if (layout == "separate") != (kv_heads is not None):
        raise ValueError(f"rope: kv_heads must be given with layout 'separate' alone, got {kv_heads} with {layout!r}")
    shapes = None
    if kv_heads is not None:
        kv_heads = integer("rope", "kv_heads", kv_heads, 1)
        tokens, all_heads, _, head_dim = qkv.shape
        if all_heads <= 2 * kv_heads:
            raise ValueError(f"rope: 'qkv' has {all_heads} heads, expected more than 2 * kv_heads = {2 * kv_heads}")
        kv_shape = tokens, kv_heads, head_dim
        shapes = {"q": (tokens, all_heads - 2 * kv_heads, head_dim), "k": kv_shape, "v": kv_shape}
    q, k, v = call.run(shapes, like=_Like(_ROPE, given, fixed, ()))
    return q, k, v


@_op
def kv_append(
    k: Tensor,
    v: Tensor,
    kv_len: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    runs: Runs | None = None,
    page_table: Tensor | None = None,
    window: Window | None = None,
) -> None:
    """Returns nothing, and writes k_cache and v_cache in place."""
    given = k, v, kv_len, k_cache, v_cache
    options = runs, page_table, window
    if not _are_usual(*options) or _KV_APPEND.run(given, None, ()) is None:
        tensors: _Tensors = {"k": k, "v": v, "kv_len": kv_len, "k_cache": k_cache, "v_cache": v_cache}
        tensors["page_table"] = page_table
        call = _call("kv_append", k, tensors, **_runs("kv_append", runs), **_window("kv_append", window))
        call.run(like=_like(_KV_APPEND, given, None, (), *options))


@_op
def rope_append(
    qkv: T,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    kv_len: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    layout: QkvLayout = "interleaved_by_head",
    runs: Runs | None = None,
    page_table: Tensor | None = None,
) -> T:
    """Returns q, and writes k_cache and v_cache in place. Without cos and sin, None, nothing turns."""
    given = qkv, cos, sin, positions, kv_len, k_cache, v_cache
    made: T | None = _ROPE_APPEND.run(given, layout, ()) if _are_usual(runs, page_table) else None
    if made is not None:
        return made
    tensors: _Tensors = {
        "qkv": qkv,
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "kv_len": kv_len,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
    }
    call = _call("rope_append", qkv, tensors, layout=layout, **_runs("rope_append", runs))
    shapes = None
    if layout == "separate":
        tokens, all_heads, _, head_dim = qkv.shape
        heads = all_heads - 2 * k_cache.shape[1]
        if heads < 1:
            raise ValueError(
                f"rope_append: 'qkv' has {all_heads} heads, "
                f"expected more than twice the {k_cache.shape[1]} of 'k_cache'"
            )
        shapes = {"q": (tokens, heads, head_dim)}
    return call.run(shapes, like=_like(_ROPE_APPEND, given, layout, (), runs, page_table))[0]


@_op
def ln_qkv(
    x: T,
    gamma: Tensor,
    beta: Tensor,
    weight: _Weight,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_len: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    eps: float = 1e-5,
    runs: Runs | None = None,
    page_table: Tensor | None = None,
) -> tuple[T, T, T]:
    """Returns (q, k, v), and writes k_cache and v_cache in place. ``bias`` may be None; ``weight`` may be a
    GptqWeight."""
    given = x, gamma, beta, weight, bias, cos, sin, positions, kv_len, k_cache, v_cache
    made: tuple[T, T, T] | None = _LN_QKV.run(given, None, (eps,)) if _are_usual(runs, page_table) else None
    if made is not None:
        return made
    tensors: _Tensors = {
        "x": x,
        "gamma": gamma,
        "beta": beta,
        "weight": weight,
        "bias": bias,
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "kv_len": kv_len,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
    }
    call = _call("ln_qkv", x, tensors, eps=eps, **_runs("ln_qkv", runs))
    _, heads, _, head_dim = k_cache.shape
    shapes = dict.fromkeys(("q", "k", "v"), (x.shape[0], heads, head_dim))
    q, k, v = call.run(shapes, like=_like(_LN_QKV, given, None, (eps,), runs, page_table))
    return q, k, v


@_op
def ln_qkv_heads(
    x: T,
    gamma: Tensor,
    beta: Tensor,
    weight: _Weight,
    bias: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 1e-5,
    runs: Runs | None = None,
) -> tuple[T, T, T]:
    """Returns (q, k, v). head_dim follows from the rows of ``weight``, which may be a GptqWeight."""
    heads = integer("ln_qkv_heads", "heads", heads, 1)
    kv_heads = integer("ln_qkv_heads", "kv_heads", kv_heads, 1)
    given, fixed = (x, gamma, beta, weight, bias), (heads, kv_heads)
    made: tuple[T, T, T] | None = _LN_QKV_HEADS.run(given, fixed, (eps,)) if runs is None else None
    if made is not None:
        return made
    tensors: _Tensors = {"x": x, "gamma": gamma, "beta": beta, "weight": weight, "bias": bias}
    call = _call("ln_qkv_heads", x, tensors, eps=eps, **_runs("ln_qkv_heads", runs))
    head_dim, rest = divmod(_rows(weight), heads + 2 * kv_heads)
    if rest:
        raise ValueError(
            f"ln_qkv_heads: 'weight' has {_rows(weight)} rows, expected a multiple of heads + 2 * kv_heads = "
            f"{heads + 2 * kv_heads}"
        )
    batch, q_len, _ = x.shape
    kv_shape = batch, kv_heads, q_len, head_dim
    shapes = {"q": (batch, heads, q_len, head_dim), "k": kv_shape, "v": kv_shape}
    q, k, v = call.run(shapes, like=_like(_LN_QKV_HEADS, given, fixed, (eps,), runs))
    return q, k, v


@_op
def attention(
    q: T,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: Tensor,
    *,
    scale: float,
    max_kv_len: int | None = None,
    runs: Runs | None = None,
    page_table: Tensor | None = None,
    window: Window | None = None,
    q_sinks: Tensor | None = None,
) -> T:
    """Returns y. The usual scale is head_dim^-0.5. Without max_kv_len it is the capacity of the cache."""
    given, numbers = (q, k_cache, v_cache, kv_len), (scale, max_kv_len)
    options = runs, page_table, window, q_sinks
    made: T | None = _ATTENTION.run(given, None, numbers) if _are_usual(*options) else None
    if made is None:
        tensors: _Tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_len": kv_len}
        tensors |= {"page_table": page_table, "q_sinks": q_sinks}
        scalars = {**_runs("attention", runs), **_window("attention", window)}
        call = _call("attention", q, tensors, scale=scale, **scalars)
        call.scalars["max_kv_len"] = _capacity(k_cache, page_table) if max_kv_len is None else max_kv_len
        made = call.run(like=_like(_ATTENTION, given, None, numbers, *options))[0]
    return made


@_op
def decode_layer(
    weights: Mapping[str, _Weight],
    config: Mapping[str, object] | str,
    hidden: Tensor,
    positions: Tensor,
    kv_len: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    max_kv_len: int | None = None,
    runs: Runs | None = None,
    page_table: Tensor | None = None,
) -> LayerOutputs | HeadNormLayerOutputs:
    """Returns the output of every site, and writes k_cache and v_cache in place.

    ``weights`` has Hugging Face's names below gpt_neox.layers.N or model.layers.N: "input_layernorm.weight",
    "attention.query_key_value.bias", ... Llama's q_proj, k_proj and v_proj are one "self_attn.qkv_proj.weight", all
    rows of q first; gate_proj and up_proj are one "mlp.gate_up_proj.weight", a row of each in turn. A Linear's weight
    may be a GptqWeight. ``config`` is the content of a config.json, as a mapping or as text. Without max_kv_len it is
    the capacity of the cache.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"decode_layer: weights must be a mapping, got {type(weights).__name__}")
    if not isinstance(config, (str, Mapping)):
        raise TypeError(f"decode_layer: config must be a mapping or a text, got {type(config).__name__}")
    text = config if isinstance(config, str) else json.dumps(dict(config))
    given, numbers = (hidden, positions, kv_len, cos, sin, k_cache, v_cache, weights), (max_kv_len,)
    made = _DECODE_LAYER.run(given, text, numbers) if _are_usual(runs, page_table) else None
    if made is not None:
        return _layer_outputs(made)
    activations: _Tensors = {
        "hidden": hidden,
        "positions": positions,
        "kv_len": kv_len,
        "cos": cos,
        "sin": sin,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table,
    }
    for name in weights.keys() & activations.keys():
        raise ValueError(f"decode_layer: weights has '{name}', expected Hugging Face's names of weights alone")
    call = _call("decode_layer", hidden, {**activations, **weights}, config=text, **_runs("decode_layer", runs))
    call.scalars["max_kv_len"] = _capacity(k_cache, page_table) if max_kv_len is None else max_kv_len
    return _layer_outputs(call.run(like=_like(_DECODE_LAYER, given, text, numbers, runs, page_table)))


def run_known_rows(given: tuple[Any, ...], eps: float) -> Any:
    """layernorm_residual of x and residual of any number of dimensions, gamma and beta: a tensor like x, where the call
    is like one that remember_rows() was given; else None."""
    return _LAYERNORM_RESIDUAL_ROWS.run(given, None, (eps,))


def remember_rows(given: tuple[Any, ...], eps: float, output: Any) -> None:
    """Remembers a call that has made ``output`` on a GPU: run_known_rows() then runs calls like it."""
    x, residual, gamma, beta = given
    rows = [tensor.view(-1, tensor.shape[-1]) for tensor in (x, residual)]
    tensors = {"x": rows[0], "residual": rows[1], "gamma": gamma, "beta": beta}
    call: _CudaCall[Any] = _CudaCall("layernorm_residual", rows[0], tensors, {"eps": eps})
    call.remember(_Like(_LAYERNORM_RESIDUAL_ROWS, given, None, (eps,)), output)


def _rows(weight: _Weight) -> int:
    """The rows of a matrix (out, in)."""
    if isinstance(weight, GptqWeight):
        return int(weight.qweight.shape[1])
    return weight.shape[0]
