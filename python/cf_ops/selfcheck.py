"""Whether this installation is right: every op on the CPU and on a GPU, whole models there, and generate() of
transformers where that is installed, against float64, in seconds. Needs numpy alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core, hf, ops
from cf_ops._device import cuda_available, name_cublaslt
from cf_ops._gptq import GPTQ_PARTS
from cf_ops._tensors import require_torch
from cf_ops.model import on_device

__all__ = ["Row", "arguments", "on_gpu", "rows", "written_on_gpu"]

_SEED = 1
_MODEL = "pythia-14m"


class Row(NamedTuple):
    """The check of an op on a device: the largest relative L2 error of what it writes, the bound that its contract
    derives for the example, and whether all that it writes is within the bound."""

    op: str
    device: str
    relative_l2: float
    budget: float
    ok: bool


def rows() -> list[Row]:
    """Checks every op on a small example; an op with weights is checked with quantised weights too. Where there is a
    GPU, every op is checked there as well, and a whole model with procedural weights: its logits, and its greedy ids.

    Where torch and transformers can be imported, a small model of transformers generates with `cf_ops.hf.speed_up`.

    What an op writes, in float32 on the CPU and in float16 on a GPU, is compared with what it writes in float64, the
    oracle, for the same numbers.
    """
    devices = ["cpu"]
    if cuda_available():
        name_cublaslt()
        devices.append("cuda")
    checked = []
    for op in _core.ops():
        quantised = any(role == "gptq" for _, role, *_ in _core.op_example(op, 4)[0])
        for bits in (0, 4, 8) if quantised else (0,):
            checked += [_check(op, bits, device) for device in devices]
    if "cuda" in devices:
        checked += [_check_model(dtype) for dtype in ("float16", "bfloat16")]
    return checked + _check_transformers()


def arguments(op: str, dtype: str, bits: int = 0) -> dict[str, Any]:
    """A small example of an op's arguments as numpy arrays, with activations of a dtype. The numbers are those of every
    other dtype: drawn at random, exact in float16. With ``bits`` = 4 or 8 every Linear is quantised."""
    tensors, scalars = _core.op_example(op, bits)
    shapes = {name: shape for name, _, _, shape, _ in tensors}
    capacity = shapes.get("k_cache", [0, 0, 0, 0])[2]
    rng = np.random.default_rng(_SEED)
    given: dict[str, Any] = dict(scalars)
    for name, role, _, shape, _ in tensors:
        if role != "output":
            given[name] = _values(rng, name, role, shape, dtype, capacity, bits)
    for name in [name for name in given if name.endswith("qweight")]:
        prefix = name.removesuffix("qweight")
        parts = {part: given.pop(prefix + part) for part in GPTQ_PARTS}
        fields = {field: given.pop(prefix + field) for field in ("bits", "group_size", "zero_offset")}
        parts["g_idx"] = np.arange(len(parts["g_idx"]), dtype=np.int32) // np.int32(fields["group_size"])
        given[prefix + "weight"] = ops.GptqWeight(**parts, **fields)
    if op == "decode_layer":
        given["weights"] = {name: given.pop(name) for name in list(given) if "." in name}
    if op == "ln_qkv_heads":
        given["heads"], given["kv_heads"] = shapes["q"][1], shapes["k"][1]
    if op == "embedding":
        given["dtype"] = dtype
    return given


def on_gpu(given: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What arguments() made for "float64", as torch tensors of a GPU: activations of a dtype, and weights of that dtype
    too if it has 16 bits. Needs torch."""
    torch = require_torch("selfcheck.on_gpu")

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if isinstance(value, ops.GptqWeight):
            # Scales are float16 whatever the activations are.
            parts = {n: torch.from_numpy(p.copy()).cuda() if np.ndim(p) else p for n, p in vars(value).items()}
            return ops.GptqWeight(**parts)
        if not isinstance(value, np.ndarray):
            return value
        tensor = torch.from_numpy(value.copy()).cuda()
        takes_dtype = value.dtype == np.float64 or (value.dtype == np.float16 and dtype != "float32")
        return tensor.to(getattr(torch, dtype)) if takes_dtype else tensor

    made: dict[str, Any] = moved(given)
    return made | ({"dtype": dtype} if "dtype" in made else {})


def _values(
    rng: np.random.Generator, name: str, role: str, shape: list[int], dtype: str, capacity: int, bits: int
) -> NDArray[Any]:
    """A tensor's values by its role."""
    if role in ("cosine", "sine"):
        return ops.rope_table(shape[0], 2 * shape[1])[role == "sine"]
    if role == "length":
        return np.arange(shape[0], dtype=np.int32) + np.int32(capacity // 2)
    if role in ("position", "token_id"):
        return np.arange(shape[0], dtype=np.int32)
    if role == "gptq" and not name.endswith("scales"):
        return rng.integers(-(2**31), 2**31, shape, np.int32)
    # Scales that make quantised weights of 4 and of 8 bits as large as dense ones.
    mean, deviation = {"gain": (1, 0.1), "weight": (0, 0.05), "gptq": (0.16 / 2**bits, 0.016 / 2**bits)}.get(
        role, (0, 1)
    )
    values = rng.normal(mean, deviation, shape).astype(np.float16)
    return values if role in ("gain", "weight", "gptq") else values.astype(dtype)


def _check(op: str, bits: int, device: str) -> Row:
    function = getattr(ops, op)
    exact = _written(op, arguments(op, "float64", bits))
    dtype = "float32" if device == "cpu" else "float16"
    made = _written(op, arguments(op, dtype, bits)) if device == "cpu" else written_on_gpu(op, bits, dtype)
    errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(made, exact, strict=True)]
    bound = ops.budget(function, output=dtype)(**arguments(op, "float64", bits)).rel_l2
    name = f"{op} ({bits} bits)" if bits else op
    # A NaN is no number that is at most the bound.
    return Row(name, device, float(np.max(errors)), bound, all(error <= bound for error in errors))


def _written(op: str, given: dict[str, Any]) -> list[NDArray[Any]]:
    """What an op of the CPU makes, and the arguments that it writes."""
    result = getattr(ops, op)(**given)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    states = (given[name] for name, role, *_ in _core.op_example(op)[0] if role == "state")
    return [*outputs, *states]


def written_on_gpu(op: str, bits: int, dtype: str) -> list[NDArray[Any]]:
    """The same on a GPU, for the numbers of arguments() with activations of a dtype. The memory is the compiled part's:
    torch is not needed."""
    example, scalars = _core.op_example(op, bits)
    arrays = _tensors(arguments(op, "float64", bits), dtype)
    for name, role, _, shape, _ in example:
        if role == "output":
            arrays[name] = np.full(shape, np.nan, dtype)

    def allocate(bytes: int) -> _core.DeviceBlock:
        return _core.DeviceBlock(0, bytes)

    blocks = {name: allocate(array.nbytes) for name, array in arrays.items()}
    for name, array in arrays.items():
        blocks[name].write(array.ctypes.data)
    shapes = {name: (0, array.dtype.name, array.shape) for name, array in arrays.items()}
    bound = _core.bind_op(op, shapes, scalars)
    addresses = [block.data_ptr() for block in blocks.values()]
    packed = [bound.pack(number, 0, 0, addresses, allocate) for number in range(len(bound.gptq))]
    bound.run(0, 0, addresses, {}, packed, allocate)
    written = [name for name, role, *_ in example if role == "output"]
    written += [name for name, role, *_ in example if role == "state"]
    for name in written:
        blocks[name].read(arrays[name].ctypes.data)
    return [arrays[name].astype(np.float64) for name in written]


def _tensors(given: dict[str, Any], dtype: str) -> dict[str, NDArray[Any]]:
    """An op's arguments for "float64" as arrays by the contract's names, with activations of a dtype."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            found |= _tensors(value, dtype)
        elif isinstance(value, ops.GptqWeight):
            prefix = name.removesuffix("weight")
            found |= {prefix + part: getattr(value, part) for part in GPTQ_PARTS}
        elif isinstance(value, np.ndarray):
            found[name] = value.astype(dtype) if value.dtype == np.float64 else value
    return found


def _check_model(dtype: str) -> Row:
    """A small model on a GPU beside the oracle: the logits of a prompt and its continuation, and the ids that it was
    continued with. An id is right where its logit is the oracle's largest, or closer to it than twice the bound."""
    weights = _core.Weights.preset(_MODEL, dtype)
    model = on_device(weights, _MODEL, [], 0, slots=1, capacity=32)
    prompt, new = list(range(1, 13)), 12
    ids = list(model.generate(prompt, max_new_tokens=new))
    logits = model.logits(prompt + ids[:-1]).astype(np.float64)
    model.close()
    oracle = _core.Runner(weights, capacity=32, activation="float64")
    fed = prompt + ids[:-1]
    exact = oracle.forward(0, 0, fed, len(fed))
    bound, largest_error = oracle.error_bound(fed, dtype)
    error = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
    chosen = exact[len(prompt) - 1 :]
    behind = chosen.max(axis=1) - chosen[np.arange(new), ids]
    are_right = bool((behind <= 2 * largest_error * np.abs(exact).max()).all())
    return Row(f"{_MODEL}, {dtype}", "cuda", error, bound, len(ids) == new and error <= bound and are_right)


def _check_transformers() -> list[Row]:
    """The check of transformers' generate() on `cf_ops.hf`; none where torch or a transformers for it is missing."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
        import transformers  # type: ignore[import-not-found, unused-ignore]

        kind: Any = transformers.GPTNeoXForCausalLM
        config_kind: Any = transformers.GPTNeoXConfig
    except Exception:  # an incomplete installation may raise anything
        return []
    if not hf.is_new_enough(transformers.__version__):
        return []
    config = config_kind(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = kind(config).float().eval()
    name = "generate() of transformers on cf_ops"
    try:
        share, error, bound, are_same = _generate(hf.speed_up(model), torch.arange(1, 13)[None])
    except Exception as failure:  # a newer transformers may break anything
        return [Row(f"{name}: {type(failure).__name__}: {failure}".partition("\n")[0], "cpu", np.nan, np.nan, False)]
    return [Row(f"{name}: {share:.0%}", "cpu", error, bound, share == 1 and error <= bound and are_same)]


def _generate(model: Any, prompt: Any) -> tuple[float, float, float, bool]:
    """The share of a model's calls that ran on cf_ops, the error of its logits beside the oracle and their bound, and
    whether the ids of the two loops, with logits for each step and without, are the same."""
    options = {"max_new_tokens": 12, "do_sample": False}
    ids = model.generate(prompt, **options)
    made = model.generate(prompt, **options, output_logits=True, return_dict_in_generate=True)
    fed, logits = ids[0, :-1].tolist(), np.concatenate([step.numpy() for step in made.logits])
    oracle = _core.Runner(model._cf_ops.loaded(model).backend.weights, capacity=len(fed), activation="float64")
    exact = oracle.forward(0, 0, fed, len(logits))
    bound, _ = oracle.error_bound(fed, "float32")
    error = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
    return hf.report(model).share, error, bound, ids.tolist() == made.sequences.tolist()
