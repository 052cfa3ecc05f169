#include "cuda/ops/linear/gemv/gemv.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/gemv/block.cuh"
#include "cuda/ops/linear/gemv/row.cuh"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

/// One launch of a call, for up to 16 tokens. The pointers are those of the launch's first token.
struct Product {
  const void* x;
  const void* weight;
  long in, rows;
  int tokens;
  DType activation, weight_dtype;
  LinearOutput output;
};

template <class T, int Depth, bool TwoTokens, bool Gated>
__global__ void __launch_bounds__(kGemvThreads, gemv_blocks_per_sm(kCompiledFor, TwoTokens))
    linear_kernel(const __grid_constant__ Product p) {
  __shared__ GemvSmem smem;
  let_successor_start();
  const T* x = static_cast<const T*>(p.x);
  gemv_block<T, Depth, TwoTokens, false>(
      static_cast<const T*>(p.weight), int(p.rows), int(p.in), p.tokens, [](int r) { return long(r); },
      [] { wait_for_predecessors(); },
      [=](int token, int column) { return *reinterpret_cast<const uint4*>(x + token * p.in + column); },
      [&](int token, int row) { return addends_of<Gated>(p.output, token, row); },
      [&](int token, int row, auto sum, AddendsOf<Gated> add) { finish_of<Gated>(p.output, token, row, sum, add); },
      smem);
}

template <class T, bool Gated>
auto kernel_for(int depth, bool two_tokens) {
  if (two_tokens) return linear_kernel<T, 4, true, Gated>;
  return depth == 5 ? linear_kernel<T, 5, false, Gated> : linear_kernel<T, 4, false, Gated>;
}

/// The kernel of float32 activations. It converts weights of any dtype to float32, which is exact.
template <bool Gated>
__global__ void __launch_bounds__(256, 2) linear_f32_kernel(const __grid_constant__ Product p) {
  let_successor_start();
  wait_for_predecessors();
  const float* x = static_cast<const float*>(p.x);
  multiply_row<Gated>(
      p.rows, p.in, p.tokens, p.output,
      [&](long row, long column, float(&w)[kVec]) { load_vec(p.weight, p.weight_dtype, row * p.in + column, w); },
      [&](int token, long column, float(&v)[kVec]) { load_vec(x + token * p.in + column, v); });
}

template <bool Gated>
Status launch_tokens(const Product& p, const GemvPlan& plan, LaunchList& launches) {
  if (p.activation == DType::f32)
    return launch("linear", launches, {.grid = unsigned(plan.grid), .block = 256}, linear_f32_kernel<Gated>, p);
  const auto kernel = p.activation == DType::f16 ? kernel_for<f16, Gated>(plan.depth, p.tokens > 8)
                                                 : kernel_for<bf16, Gated>(plan.depth, p.tokens > 8);
  return launch("linear", launches, {.grid = unsigned(plan.grid), .block = kGemvThreads}, kernel, p);
}

}  // namespace

Status launch_gemv(const ops::Linear::Args& a, const GemvLaunches& plan, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const auto& dense = std::get<DenseWeight>(a.linear.weight);
  return with_activation(ops::Linear::name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    Product p{.x = a.x.data,
              .weight = dense.weight.data,
              .in = d.in,
              .rows = d.rows(),
              .tokens = 0,
              .activation = a.x.dtype,
              .weight_dtype = dense.weight.dtype,
              .output = linear_output(a)};
    for (const auto& l : plan.launches) {
      p.tokens = int(l.tokens);
      p.x = static_cast<const T*>(a.x.data) + l.first * d.in;
      p.output = from_token(linear_output(a), l.first);
      CF_TRY(a.epilogue == ops::Epilogue::swiglu ? launch_tokens<true>(p, l.plan, launches)
                                                 : launch_tokens<false>(p, l.plan, launches));
    }
    return {};
  });
}

}  // namespace cf::cuda
