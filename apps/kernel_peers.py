"""Kernels beside those of single ops: Triton's, and torch's product with int4 weights. Each is held against float64
before it is timed. Says how many lines of code a kernel has. bench_peers.py runs them. To import this needs neither
torch nor triton."""

import ast
import io
import os
import re
import tokenize

import gptq
import model_config

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir)
GROUP = 128  # inputs that share a scale and a zero, in all rows of int4 weights
INNER_K_TILES = (8, 4, 2)  # torch's layouts of an int4 weight
SUM_UNIT = 2.0**-24  # unit roundoff of float32, in which all sums are made

# The file of our kernel, and the functions of triton_kernels.py that make up theirs.
OURS = {
    "layernorm_residual": "cuda/ops/norm/layernorm_residual.cu",
    "gptq_linear": "cuda/ops/linear/packed/packed.cu",
}
TRITON = {
    "layernorm_residual": ("layernorm_residual_kernel", "layernorm_residual"),
    "gptq_linear": ("gptq_matvec_kernel", "gptq_matvec"),
}


# --- lines of code ---


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def cuda_files(path):
    """A kernel's file, and what it includes, directly or not, of its family and of cuda/device. With a header comes the
    .cpp of its name."""
    family = path.split("/")[:3]
    found, left = [], [path]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.append(file)
        includes = re.findall(r'^#include "([^"]+)"', read(file), re.MULTILINE)
        left += [f for f in includes if f.split("/")[:3] == family or f.startswith("cuda/device/")]
        source = os.path.splitext(file)[0] + ".cpp"
        if os.path.exists(os.path.join(ROOT, source)):
            left.append(source)
    return sorted(found)


def lines_of_cuda(text):
    """How many lines of a C++ text are neither blank nor comments alone."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.split("\n"))


def lines_of_python(text, names):
    """How many lines of a module's functions of these names, with their decorators, are code: neither blank, nor
    comments alone, nor docstrings."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            code |= set(range(token.start[0], token.end[0] + 1))
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    counted = set()
    for name in names:
        function = functions[name]
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        lines = set(range(first, function.end_lineno + 1))
        if ast.get_docstring(function) is not None:
            lines -= set(range(function.body[0].lineno, function.body[0].end_lineno + 1))
        counted |= lines & code
    return len(counted)


def our_lines(op):
    """The lines of code of our kernel for an op, as a field of its rows; no field for an op without a Triton row."""
    return {"code_lines": sum(lines_of_cuda(read(file)) for file in cuda_files(OURS[op]))} if op in OURS else {}


def triton_lines(op):
    """The same of Triton's, with the function that launches it."""
    return {"code_lines": lines_of_python(read("apps/triton_kernels.py"), TRITON[op])}


# --- what a kernel must be within before it is timed ---


def check_within(what, got, reference, bound):
    """Refuses a result that is further from float64 than its bound anywhere."""
    worst = float(((got.double() - reference).abs() / bound).max())
    if not worst <= 1:
        raise RuntimeError(f"{what}: {worst:.2g} times the error bound away from float64, expected at most 1")


def stored(value, bits):
    """The bound of rounding a value to a stored type of so many significant bits: float16 has 11, bfloat16 has 8."""
    return 2.0**-bits * value.abs() + 2.0**-25  # half of float16's least number


def check_layernorm_residual(x, residual, gamma, beta, eps, y):
    """y = LayerNorm(x) + residual in float16. To first order: the mean is off by at most n units of mean |x|, which
    moves every centred x; the variance by n + 3 units relatively, of which the root halves what it is off; quotients,
    root and product add a few units, and each of the last sums one of what has been summed."""
    n = x.shape[1]
    x, residual, gamma, beta = (t.double() for t in (x, residual, gamma, beta))
    mean = x.mean(1, keepdim=True)
    inverse = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    scaled = (x - mean) * inverse * gamma
    reference = scaled + beta + residual
    of_mean = n * x.abs().mean(1, keepdim=True) * inverse * gamma.abs()
    of_rest = (n / 2 + 8) * scaled.abs() + 2 * (scaled.abs() + beta.abs() + residual.abs())
    check_within("layernorm_residual", y, reference, stored(reference, 11) + SUM_UNIT * (of_mean + of_rest))


def check_gptq_linear(x, parts, bias, y, roundings):
    """y = W x + bias in float16, W of GPTQ's parts. A sum is off by at most as many units of the sum of its numbers'
    magnitudes as a number passes roundings."""
    import numpy as np
    import torch

    inputs = x.shape[1]
    stored_parts = {name: part.cpu().numpy() for name, part in parts.items()}
    stored_parts["g_idx"] = np.arange(inputs, dtype=np.int32) // GROUP
    weight = torch.from_numpy(gptq.dequantise(stored_parts, 4, False)).to(x.device).double()
    reference, magnitude = linear_and_magnitude(x, weight, bias.double())
    check_within("gptq_matvec", y, reference, stored(reference, 11) + roundings * SUM_UNIT * magnitude)


def check_int4_linear(x, codes, scales_and_zeros, y):
    """y = W x in bfloat16, W = (codes - 8) * scale + zero, rounded to bfloat16. A sum is off by at most a unit of the
    sum of its numbers' magnitudes for each number; tensor cores, which cut off where others round, by two."""
    scales, zeros = scales_and_zeros.double().repeat_interleave(GROUP, 0).unbind(-1)
    weight = ((codes.T.double() - 8) * scales + zeros).T.bfloat16().double()
    reference, magnitude = linear_and_magnitude(x, weight, 0)
    bound = stored(reference, 8) + 2 * x.shape[1] * SUM_UNIT * magnitude
    check_within("_weight_int4pack_mm", y, reference, bound)


def linear_and_magnitude(x, weight, bias):
    """W x + bias in float64, and the sum of the magnitudes of all that is summed."""
    x = x.double()
    return x @ weight.T + bias, x.abs() @ weight.T.abs() + abs(bias)


# --- the four products of a layer, with int4 weights ---


def product_shapes(model):
    """(outputs, inputs) of a layer's four products, in their order."""
    shapes = model_config.layer_shapes(model)
    return [shapes[f"{name}.weight"] for name in gptq.LINEARS]


def random_gptq(outputs, inputs, device):
    """The parts of a random weight, but for g_idx: groups follow each other."""
    import torch

    shapes = gptq.shapes(outputs, inputs, 4, GROUP)
    parts = {
        name: torch.randint(-(2**31), 2**31, shapes[name], dtype=torch.int32, device=device)
        for name in ("qweight", "qzeros")
    }
    return parts | {"scales": torch.rand(shapes["scales"], device=device).mul(2.0**-7).half()}


def triton_gptq_linears(model, device="cuda"):
    """A callable that runs the four products of every layer by Triton's kernel, the number of layers, and what
    autotuning chose for each product."""
    import torch
    import triton_kernels

    shapes = product_shapes(model)
    x = {inputs: torch.randn(1, inputs, device=device).half() for _, inputs in shapes}
    layers = [
        [(random_gptq(*shape, device), torch.randn(shape[0], device=device).half()) for shape in shapes]
        for _ in range(model.num_hidden_layers)
    ]

    def product(inputs, parts, bias):
        return triton_kernels.gptq_matvec(x[inputs], **parts, bias=bias)

    chosen = {}
    for (outputs, inputs), (parts, bias) in zip(shapes, layers[0]):
        roundings = triton_kernels.gptq_matvec_roundings(inputs)
        check_gptq_linear(x[inputs], parts, bias, product(inputs, parts, bias), roundings)
        chosen[f"{outputs} x {inputs}"] = str(triton_kernels.gptq_matvec_kernel.best_config)

    def run():
        for weights in layers:
            for (_, inputs), (parts, bias) in zip(shapes, weights):
                product(inputs, parts, bias)

    return run, len(layers), chosen


def random_int4(outputs, inputs, device):
    """Random codes of four bits (outputs, inputs), and for each group and output a scale and a zero in bfloat16."""
    import torch

    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    scales_and_zeros = torch.rand(inputs // GROUP, outputs, 2, device=device).mul(2.0**-7)
    return codes, scales_and_zeros.bfloat16()


def pack_int4(codes, inner_k_tiles):
    """Codes in torch's layout for a GPU, which takes two to a byte, the first in the high bits."""
    import torch

    return torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], inner_k_tiles)


def int4_product(*arguments):
    """torch's product for a GPU: of x, what pack_int4() made, the group's size, and scales with zeros."""
    import torch

    return torch.ops.aten._weight_int4pack_mm(*arguments)


def torch_int4_linears(model, inner_k_tiles, device="cuda"):
    """A callable that runs the four products of every layer by torch's kernel, and the number of layers. The products
    have no bias, and are in bfloat16, which is all that the kernel takes."""
    import torch

    shapes = product_shapes(model)
    x = {inputs: torch.randn(1, inputs, device=device).bfloat16() for _, inputs in shapes}
    layers = []

    def product(inputs, packed, scales_and_zeros):
        return int4_product(x[inputs], packed, GROUP, scales_and_zeros)

    for layer in range(model.num_hidden_layers):
        layers.append([])
        for outputs, inputs in shapes:
            codes, scales_and_zeros = random_int4(outputs, inputs, device)
            packed = pack_int4(codes, inner_k_tiles)
            if layer == 0:
                check_int4_linear(x[inputs], codes, scales_and_zeros, product(inputs, packed, scales_and_zeros))
            layers[-1].append((packed, scales_and_zeros))

    def run():
        for weights in layers:
            for (_, inputs), weight in zip(shapes, weights):
                product(inputs, *weight)

    return run, len(layers)
