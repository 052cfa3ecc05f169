"""Two kernels in Triton, for bench_peers.py to time beside ours: what a good afternoon gives. triton_norm.py and
triton_gptq.py hold them against float64 before they are timed. Needs torch and triton; with TRITON_INTERPRET=1 they run
on the CPU."""

import itertools

import torch
import triton
import triton.language as tl


@triton.jit
def layernorm_residual_kernel(x, residual, gamma, beta, y, hidden, eps, BLOCK: tl.constexpr):
    """A program makes one row of y = LayerNorm(x) + residual, in float32, rounded once."""
    column = tl.arange(0, BLOCK)
    is_column = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    row = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
    side = tl.load(residual + at, mask=is_column, other=0.0).to(tl.float32)
    weight = tl.load(gamma + column, mask=is_column, other=0.0).to(tl.float32)
    bias = tl.load(beta + column, mask=is_column, other=0.0).to(tl.float32)
    centred = tl.where(is_column, row - tl.sum(row) / hidden, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred) / hidden + eps)
    tl.store(y + at, centred * inverse * weight + bias + side, mask=is_column)


def layernorm_residual(x, residual, gamma, beta, eps):
    """LayerNorm(x) + residual of (tokens, hidden) tensors."""
    tokens, hidden = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    warps = min(max(block // 256, 1), 8)
    layernorm_residual_kernel[(tokens,)](x, residual, gamma, beta, y, hidden, eps, BLOCK=block, num_warps=warps)
    return y


@triton.autotune(
    configs=[
        triton.Config({"WORDS": words, "COLUMNS": columns, "STAGES": stages}, num_warps=8 if words > 32 else 4)
        for words, columns, stages in itertools.product((32, 64, 128), (16, 32, 64), (2, 4))
        if words * columns <= 4096
    ],
    key=["INPUTS", "outputs"],
)
@triton.jit
def gptq_matvec_kernel(
    x, qweight, scales, qzeros, bias, y, outputs,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program makes COLUMNS of y = W x + bias in float32. It takes WORDS rows of qweight at a time, of eight codes
    each, and merges the rows' sums at the end. Stored zeros are one less than the zeros, as GPTQ's first format has
    them."""
    words: tl.constexpr = INPUTS // 8
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    sums = tl.zeros((WORDS, COLUMNS), tl.float32)
    for first in tl.range(0, words, WORDS, num_stages=STAGES):
        word = first + tl.arange(0, WORDS)[:, None]
        is_word = word < words
        is_live = is_word & is_column[None, :]
        codes = tl.load(qweight + word * outputs + column[None, :], mask=is_live, other=0)
        group = word // (GROUP // 8)
        scale = tl.load(scales + group * outputs + column[None, :], mask=is_live, other=0.0).to(tl.float32)
        zeros = tl.load(qzeros + group * (outputs // 8) + column[None, :] // 8, mask=is_live, other=0)
        # The bits of 2^23 + n are those of 2^23 with n in the last places, and the difference of two such is exact.
        zero = (((zeros >> (column[None, :] % 8 * 4)) & 15) + 0x4B000001).to(tl.float32, bitcast=True)
        products = tl.zeros((WORDS, COLUMNS), tl.float32)
        for i in tl.static_range(8):
            activation = tl.load(x + word * 8 + i, mask=is_word, other=0.0).to(tl.float32)
            code = (((codes >> (4 * i)) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
            products += activation * (code - zero)
        sums += products * scale
    total = tl.sum(sums, axis=0) + tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + column, total, mask=is_column)


def gptq_matvec(x, qweight, scales, qzeros, bias):
    """W x + bias of one token x (1, inputs), of weights packed as GPTQ stores them."""
    inputs, outputs = x.shape[1], qweight.shape[1]
    y = x.new_empty(1, outputs)
    grid = lambda meta: (triton.cdiv(outputs, meta["COLUMNS"]),)
    group = inputs // scales.shape[0]
    gptq_matvec_kernel[grid](x, qweight, scales, qzeros, bias, y, outputs, INPUTS=inputs, GROUP=group)
    return y


def gptq_matvec_roundings(inputs):
    """How many roundings of float32 a number passes on its way into y at most, whatever autotuning chooses: of a word's
    eight products, of the scale's, of a row's words, of the rows' merge and of the bias."""
    rows = [config.kwargs["WORDS"] for config in gptq_matvec_kernel.configs]
    return max(8 + 1 + triton.cdiv(inputs, 8 * words) + words + 1 for words in rows)
