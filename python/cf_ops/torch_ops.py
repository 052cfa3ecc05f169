"""Ops that torch knows: registered with torch.library, so that torch.compile keeps them in one graph.

Importing this module registers ``torch.ops.cf_ops.<op>`` for the names in ``__all__``; the module's functions are these
ops. An op takes the arguments of the function of its name in ``cf_ops.ops``, whose documentation holds for both, and
writes its caches in place. ``linear_gptq`` is ``cf_ops.ops.linear`` with the parts of a GptqWeight as arguments of
their own. As with those functions, outputs carry no gradient. Tensors may lie on the CPU or on a GPU. ``runs`` are
constants of a compiled graph: other runs compile another.

Needs torch 2.4 or newer; the import raises ImportError where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cf_ops import ops
from cf_ops._gptq import kept
from cf_ops._tensors import require_torch

torch = require_torch("cf_ops.torch_ops")
if not hasattr(torch.library, "register_fake"):
    raise ImportError(f"cf_ops.torch_ops needs torch 2.4 or newer, got {torch.__version__}")

__all__ = [
    "attention",
    "fused_layernorm_residual",
    "kv_append",
    "layernorm",
    "layernorm_residual",
    "linear",
    "linear_gptq",
    "ln_qkv",
    "rmsnorm",
    "rope",
    "rope_append",
]

# The options of ops with a cache.
_RUNS = "int[][]? runs=None, Tensor? page_table=None"
_WINDOW = "int[]? window=None"

# Registrations last as long as their library.
_LIBRARY = torch.library.Library("cf_ops", "DEF")


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers an op: what runs it on every device, and what says the shapes and dtypes of its outputs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, device)
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"cf_ops::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.cf_ops, name)


def _run_linear_gptq(
    x: Any,
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any,
    bias: Any = None,
    residual: Any = None,
    *,
    zero_offset: int,
    bits: int = 4,
    group_size: int = 128,
    epilogue: ops.Epilogue = "none",
) -> Any:
    scalars = {"bits": bits, "group_size": group_size, "zero_offset": zero_offset}
    weight = kept(ops.GptqWeight, qweight, qzeros, scales, g_idx, **scalars)
    return ops.linear(x, weight, bias, residual, epilogue=epilogue)


def _like_x(x: Any, *_: Any, **__: Any) -> Any:
    return x.new_empty(x.shape)


def _heads_like_cache(x: Any, *others: Any, **_: Any) -> Any:
    k_cache = others[-2]
    shape = x.shape[0], k_cache.shape[1], k_cache.shape[3]
    return tuple(x.new_empty(shape) for _ in range(3))


def _heads_of_qkv(qkv: Any, *_: Any, layout: str = "interleaved_by_head", kv_heads: int | None = None) -> Any:
    tokens, heads, _, head_dim = qkv.shape
    own = heads if kv_heads is None else kv_heads
    heads -= 2 * own if layout == "separate" else 0
    return tuple(qkv.new_empty((tokens, n, head_dim)) for n in (heads, own, own))


def _outputs(rows: int, epilogue: str) -> int:
    """The outputs that a weight's rows make."""
    return rows // 2 if epilogue == "swiglu" else rows


layernorm = _register(
    "layernorm(Tensor x, Tensor gamma, Tensor beta, *, float eps=1e-05) -> Tensor", ops.layernorm, _like_x
)
rmsnorm = _register("rmsnorm(Tensor x, Tensor gamma, *, float eps=1e-05) -> Tensor", ops.rmsnorm, _like_x)
layernorm_residual = _register(
    "layernorm_residual(Tensor x, Tensor residual, Tensor gamma, Tensor beta, *, float eps=1e-05) -> Tensor",
    ops.layernorm_residual,
    _like_x,
)
linear = _register(
    'linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, str epilogue="none") -> Tensor',
    ops.linear,
    lambda x, weight, *_, epilogue="none", **__: x.new_empty((x.shape[0], _outputs(weight.shape[0], epilogue))),
)
linear_gptq = _register(
    "linear_gptq(Tensor x, Tensor qweight, Tensor qzeros, Tensor scales, Tensor g_idx, Tensor? bias=None, "
    'Tensor? residual=None, *, int zero_offset, int bits=4, int group_size=128, str epilogue="none") -> Tensor',
    _run_linear_gptq,
    lambda x, qweight, *_, epilogue="none", **__: x.new_empty((x.shape[0], _outputs(qweight.shape[1], epilogue))),
)
rope = _register(
    'rope(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, *, str layout="interleaved_by_head", '
    "int? kv_heads=None) -> (Tensor, Tensor, Tensor)",
    ops.rope,
    _heads_of_qkv,
)
kv_append = _register(
    "kv_append(Tensor k, Tensor v, Tensor kv_len, Tensor(a!) k_cache, Tensor(b!) v_cache, *, "
    f"{_RUNS}, {_WINDOW}) -> ()",
    ops.kv_append,
    lambda *_, **__: None,
)
rope_append = _register(
    "rope_append(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor kv_len, Tensor(a!) k_cache, "
    f'Tensor(b!) v_cache, *, str layout="interleaved_by_head", {_RUNS}) -> Tensor',
    ops.rope_append,
    lambda qkv, *others, layout="interleaved_by_head", **_: _heads_of_qkv(
        qkv, layout=layout, kv_heads=others[-1].shape[1] if layout == "separate" else None
    )[0],
)
ln_qkv = _register(
    "ln_qkv(Tensor x, Tensor gamma, Tensor beta, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, "
    "Tensor positions, Tensor kv_len, Tensor(a!) k_cache, Tensor(b!) v_cache, *, float eps=1e-05, "
    f"{_RUNS}) -> (Tensor, Tensor, Tensor)",
    ops.ln_qkv,
    _heads_like_cache,
)
attention = _register(
    "attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_len, *, float scale, int? max_kv_len=None, "
    f"{_RUNS}, {_WINDOW}, Tensor? q_sinks=None) -> Tensor",
    ops.attention,
    _like_x,
)


_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def fused_layernorm_residual(x: Any, residual: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    """LayerNorm(x) * weight + bias + residual over the last dimension, rounded once.

    x, residual: (batch, seq, hidden), float32 or float16; weight, bias: (hidden). Returns a tensor like x. The CPU
    backend has no float16 activations: there float16 is widened to float32, which is exact, and the result is rounded
    to float16 once, as on a GPU. The formula is that of ``cf_ops.ops.layernorm_residual``.

    Raises ValueError for another dtype, number of dimensions or stride, and for what that op refuses.
    """
    given = x, residual, weight, bias
    is_eager = not (torch.compiler.is_compiling() or _dispatch_modes())  # no compiler or mode of torch traces the op
    if is_eager:
        made = ops.run_known_rows(given, eps)
        if made is not None:
            return made
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor.dim() != 3 or tensor.shape != x.shape:
            expected = "(batch, seq, hidden)" if tensor is x else f"{tuple(x.shape)} as x has"
            raise ValueError(f"fused_layernorm_residual: {name} has shape {tuple(tensor.shape)}, expected {expected}")
        if tensor.dtype not in (torch.float32, torch.float16) or tensor.dtype != x.dtype:
            expected = "float32 or float16" if tensor is x else f"{x.dtype} as x has"
            raise ValueError(f"fused_layernorm_residual: {name} has dtype {tensor.dtype}, expected {expected}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"fused_layernorm_residual: {name} has strides {tuple(tensor.stride())}, expected a contiguous tensor"
            )
    rows = [tensor.view(-1, x.shape[-1]) for tensor in (x, residual)]
    if x.dtype == torch.float16 and x.device.type == "cpu":
        rows = [tensor.float() for tensor in rows]
    made = layernorm_residual(*rows, weight, bias, eps=eps).to(x.dtype).view(x.shape)
    if is_eager and x.is_cuda:
        ops.remember_rows(given, eps, made)
    return made
