"""GPTQ's products in Triton."""

import gptq
from peers.exactness import SUM_UNIT, check_within, linear_and_magnitude, product_shapes, stored
from peers.lines_of_code import triton_lines
from peers.timing import spread

GROUP = 128  # inputs that share a scale and a zero, in all rows of int4 weights


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
    import peers.triton_kernels as triton_kernels

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


def time_triton_int4(model, timer):
    """The same of Triton's kernel, and what autotuning chose."""
    run, layers, chosen = triton_gptq_linears(model)
    fields = spread(timer.graph(run), layers) | {"layers": layers, "chosen": chosen}
    return fields | triton_lines("gptq_linear")
