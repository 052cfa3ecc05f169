"""What a kernel must be within, against float64, before it is timed, and the products that kernels make."""

import gptq
import model_config

SUM_UNIT = 2.0**-24  # unit roundoff of float32, in which all sums are made


def check_within(what, got, reference, bound):
    """Refuses a result that is further from float64 than its bound anywhere."""
    worst = float(((got.double() - reference).abs() / bound).max())
    if not worst <= 1:
        raise RuntimeError(f"{what}: {worst:.2g} times the error bound away from float64, expected at most 1")


def stored(value, bits):
    """The bound of rounding a value to a stored type of so many significant bits: float16 has 11, bfloat16 has 8."""
    return 2.0**-bits * value.abs() + 2.0**-25  # half of float16's least number


def linear_and_magnitude(x, weight, bias):
    """W x + bias in float64, and the sum of the magnitudes of all that is summed."""
    x = x.double()
    return x @ weight.T + bias, x.abs() @ weight.T.abs() + abs(bias)


def product_shapes(model):
    """(outputs, inputs) of a layer's four products, in their order."""
    shapes = model_config.layer_shapes(model)
    return [shapes[f"{name}.weight"] for name in gptq.LINEARS]
