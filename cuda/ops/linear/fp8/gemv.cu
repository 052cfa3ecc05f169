#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/fp8/block.cuh"
#include "cuda/ops/linear/fp8/fp8.hpp"
#include "cuda/ops/linear/gemv/row.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// One launch of a call, for up to 16 tokens. The pointers are those of the launch's first token.
struct Product {
  Fp8Matrix weight;
  const void* x;
  int tokens;
  DType activation;
  LinearOutput output;
};

template <class T, bool TwoTokens, bool Gated>
__global__ void __launch_bounds__(kGemvThreads, kFp8BlocksPerSm) fp8_kernel(const __grid_constant__ Product p) {
  __shared__ Fp8Smem smem;
  let_successor_start();
  const T* x = static_cast<const T*>(p.x);
  const int in = p.weight.in;
  fp8_block<T, TwoTokens>(
      p.weight, p.tokens, [] { wait_for_predecessors(); },
      [=](int token, int column) { return load_raw(x + token * in + column); },
      [&](int token, int row) { return addends_of<Gated>(p.output, token, row); },
      [&](int token, int row, auto sum, AddendsOf<Gated> add) { finish_of<Gated>(p.output, token, row, sum, add); },
      smem);
}

template <class T, bool Gated>
auto mma_kernel_for(int tokens) {
  return tokens > 8 ? fp8_kernel<T, true, Gated> : fp8_kernel<T, false, Gated>;
}

/// What tensor cores do not take. A code times its scale is rounded to float32 once.
template <bool Gated>
__global__ void __launch_bounds__(kGemvThreads, 1) fp8_row_kernel(const __grid_constant__ Product p) {
  let_successor_start();
  wait_for_predecessors();
  const Fp8Matrix& m = p.weight;
  multiply_row<Gated>(
      m.rows, m.in, p.tokens, p.output,
      [&](long row, long column, float(&w)[kVec]) {
        const float scale = m.scales[row * m.groups + column / m.group_size];
        const uint2 codes = *reinterpret_cast<const uint2*>(m.codes + row * m.in + column);
        const Fp8Pairs low = fp8_pairs(codes.x, f16{}), high = fp8_pairs(codes.y, f16{});
        unpack(uint4{low.first, low.second, high.first, high.second}, w, f16{});
#pragma unroll
        for (float& v : w) v *= scale;
      },
      [&](int token, long column, float(&v)[kVec]) { load_vec(p.x, p.activation, token * long(m.in) + column, v); });
}

template <bool Gated>
auto kernel_for(const Product& p, const GemvPlan& plan) {
  if (plan.depth == 0) return fp8_row_kernel<Gated>;
  return p.activation == DType::f16 ? mma_kernel_for<f16, Gated>(p.tokens) : mma_kernel_for<bf16, Gated>(p.tokens);
}

}  // namespace

Status launch_gemv_fp8(const ops::Linear::Args& a, const GemvLaunches& plan, LaunchList& launches) {
  Product p{.weight = fp8_matrix(fp8_of(std::get<PackedWeight>(a.linear.weight))),
            .x = nullptr,
            .tokens = 0,
            .activation = a.x.dtype,
            .output = {}};
  const long token_bytes = a.x.shape[1] * long(size_bytes(a.x.dtype));
  for (const auto& l : plan.launches) {
    p.tokens = int(l.tokens);
    p.x = static_cast<const std::byte*>(a.x.data) + l.first * token_bytes;
    p.output = from_token(linear_output(a), l.first);
    const auto kernel =
        a.epilogue == ops::Epilogue::swiglu ? kernel_for<true>(p, l.plan) : kernel_for<false>(p, l.plan);
    CF_TRY(launch(ops::Linear::name, launches, {.grid = unsigned(l.plan.grid), .block = kGemvThreads}, kernel, p));
  }
  return {};
}

}  // namespace cf::cuda
