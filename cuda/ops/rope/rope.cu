#include "cuda/ops/rope/rope.cuh"

namespace cf::cuda {
namespace {

template <class T>
struct RowsOfTokens {
  const ops::Rope::Args& a;

  __device__ void begin(long) {}
  __device__ HeadRows<T> of(long token, int part, int head) const {
    return token_rows<T>(part == 0 ? a.q : part == 1 ? a.k : a.v, token, head);
  }
};

template <class T, int Heads, ops::QkvLayout Layout>
__global__ void __launch_bounds__(kTokenThreads, rope_blocks_per_sm(Heads))
    rope_kernel(const __grid_constant__ ops::Rope::Args a, const __grid_constant__ RopePlan plan) {
  rope_unit<T, Heads, Layout>(a, plan, RowsOfTokens<T>{a});
}

}  // namespace

Status prepare(const ops::Rope::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_rope(const ops::Rope::Args& a, const RopePlan& plan, LaunchList& launches) {
  return launch_rope_of(a, plan, [&](auto zero, auto layout, const LaunchShape& shape) {
    using T = decltype(zero);
    constexpr ops::QkvLayout kLayout = decltype(layout)::value;
    return launch(ops::Rope::name, launches, shape,
                  plan.heads == 1 ? rope_kernel<T, 1, kLayout> : rope_kernel<T, 4, kLayout>, a, plan);
  });
}

}  // namespace cf::cuda
