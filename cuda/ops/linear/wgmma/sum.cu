#include "cuda/ops/linear/wgmma/sum.hpp"

#include "cuda/device/copy_once.cuh"
#include "cuda/ops/linear/wgmma/block.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// The first product and the second.
struct WgmmaSumCall {
  WgmmaCall first, second;
};

// Other devices' code has no use for what follows.
#ifdef CF_HAVE_WGMMA
/// Finishes both sums of a thread's rows.
template <class T, int Tokens>
struct FinishSum : QuadRows<Tokens> {
  using QuadRows<Tokens>::row, QuadRows<Tokens>::step, QuadRows<Tokens>::rounds;
  const WgmmaSumCall& c;
  long at;  // the thread's first element of both outputs
  float bias[2][kQuad];
  Residuals<T, QuadRows<Tokens>::most_rounds> residuals;

  __device__ FinishSum(const WgmmaSumCall& c, int warps, int first_row)
      : QuadRows<Tokens>(warps, first_row, c.second.tokens, c.second.output.out), c(c) {
    const LinearOutput& to = c.first.output;
    at = this->token * to.out + row;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const LinearOutput& of = p ? c.second.output : to;
#pragma unroll
      for (int e = 0; e < kQuad; ++e)
        bias[p][e] = of.bias && rounds > 0 ? from_bits(bias_bits(of, row + e), of.bias_dtype) : 0;
    }
    if (to.residual) residuals.load(static_cast<const T*>(to.residual) + at, rounds, step * to.out);
  }

  /// sums(product, quad, token) are the sums of a quad of rows.
  template <class SumsOf>
  __device__ void store(SumsOf sums) {
    long i_at = at;
#pragma unroll 2
    for (int i = 0; i < rounds; ++i, i_at += step * c.first.output.out) {
      float v[2][kQuad];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float4 sum = sums(p, this->quad, this->token + i * step);
        v[p][0] = sum.x + bias[p][0];
        v[p][1] = sum.y + bias[p][1];
        v[p][2] = sum.z + bias[p][2];
        v[p][3] = sum.w + bias[p][3];
      }
      if (c.first.output.residual) residuals.add_next(v[0]);
      store_few(static_cast<T*>(c.first.output.y) + i_at, v[0]);
#pragma unroll
      for (int e = 0; e < kQuad; ++e) v[1][e] += to_float(from_float<T>(v[0][e]));
      store_few(static_cast<T*>(c.second.output.y) + i_at, v[1]);
    }
  }
};
#endif

/// A block makes the sums of its part of both products' columns, one product after the other.
template <class T, int Tokens>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    linear_sum_wgmma_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap weight,
                            [[maybe_unused]] const __grid_constant__ CUtensorMap x,
                            [[maybe_unused]] const __grid_constant__ CUtensorMap weight2,
                            [[maybe_unused]] const __grid_constant__ CUtensorMap x2,
                            [[maybe_unused]] const __grid_constant__ WgmmaSumCall c) {
#ifdef CF_HAVE_WGMMA
  if (threadIdx.x == kWgmmaConsumers)
    for (const CUtensorMap* map : {&weight, &x, &weight2, &x2}) prefetch_map(map);
  using Ring = WgmmaRing<Tokens>;
  multiply_products<Tokens, 2, Ring>(
      c.second,
      [&](const Ring& ring, int rank, int first_row) {
        const Steps first(c.first, rank), second(c.second, rank);
        const auto column = [&](int i) {
          return (i < first.count ? first.first + i : second.first + i - first.count) * kLinearWgmmaColumns;
        };
        fill_ring(
            ring, first.count + second.count,
            [&, policy = evict_first()](int i, unsigned char* to, std::uint64_t* full) {
              copy_tensor_tile(to, i < first.count ? &weight : &weight2, column(i), first_row, 0, full, policy);
            },
            [&](int i, unsigned char* to, std::uint64_t* full) {
              copy_tensor_tile(to, i < first.count ? &x : &x2, column(i), 0, 0, full);
            });
      },
      [&](const Ring& ring, int rank, int, float(&sum)[2][Tokens / 2]) {
        RingSlot slot;
        multiply_steps<T>(ring, Steps(c.first, rank).count, slot, sum[0]);
        multiply_steps<T>(ring, Steps(c.second, rank).count, slot, sum[1]);
      },
      [&](int warps, int first_row) { return FinishSum<T, Tokens>(c, warps, first_row); });
#endif
}

template <class T>
auto kernel_for(int token_tile) {
  switch (token_tile) {
    case 16: return linear_sum_wgmma_kernel<T, 16>;
    case 32: return linear_sum_wgmma_kernel<T, 32>;
    case 64: return linear_sum_wgmma_kernel<T, 64>;
    default: return linear_sum_wgmma_kernel<T, 128>;
  }
}

}  // namespace

Status launch_linear_sum_wgmma(const ops::LinearSum::Args& a, const LinearSumWgmmaPlan& plan, LaunchList& launches) {
  const DType dtype = a.x.dtype;
  CUtensorMap weights[2], xs[2];
  WgmmaSumCall c{};
  int i = 0;
  CF_TRY(ops::LinearSum::for_each_part(a, [&](const ops::Linear::Args& part) -> Status {
    const LinearWgmmaPlan& of = i ? plan.second : plan.first;
    const auto d = ops::Linear::dims(part);
    const auto& dense = std::get<DenseWeight>(part.linear.weight);
    CF_TRY(make_tensor_map({.data = dense.weight.data, .dtype = dtype, .columns = d.in, .rows = d.out},
                           kLinearWgmmaTileRows, weights[i]));
    CF_TRY(make_tensor_map({.data = part.x.data, .dtype = dtype, .columns = d.in, .rows = d.tokens}, of.token_tile,
                           xs[i]));
    (i ? c.second : c.first) = wgmma_call(part, of);
    ++i;
    return {};
  }));
  return launch(
      ops::LinearSum::name, launches,
      {.grid = unsigned(plan.second.row_tiles * plan.second.splits),
       .block = kWgmmaThreads,
       .smem_bytes = std::size_t(plan.smem_bytes),
       .cluster_blocks = plan.second.splits},
      dtype == DType::f16 ? kernel_for<f16>(plan.second.token_tile) : kernel_for<bf16>(plan.second.token_tile),
      weights[0], xs[0], weights[1], xs[1], c);
}

}  // namespace cf::cuda
