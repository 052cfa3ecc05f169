#include "cuda/ops/rope/rope.cuh"

namespace cf::cuda {
namespace {

/// q, k and v.
struct RopeOutput {
  void *q, *k, *v;
};

template <class T>
struct RowsOfTokens {
  const RopeInput& in;
  const RopeOutput& out;

  __device__ void begin(long) {}
  __device__ void locate(long) {}
  __device__ HeadRows<T> of(long token, int part, int head) const {
    void* const to = part == 0 ? out.q : part == 1 ? out.k : out.v;
    return token_rows<T>(to, token, head, part == 0 ? in.heads : in.kv_heads, in.head_dim);
  }
};

template <class T, int Heads, ops::QkvLayout Layout>
__global__ void __launch_bounds__(kTokenThreads, rope_blocks_per_sm(Heads))
    rope_kernel(const __grid_constant__ RopeInput in, const __grid_constant__ RopeOutput out,
                const __grid_constant__ RopePlan plan) {
  rope_unit<T, Heads, Layout>(in, plan, blockIdx.x, RowsOfTokens<T>{in, out});
}

/// Adds the launch that makes q, k and v.
Status add_launch(const ops::Rope::Args& a, const RopePlan& plan, LaunchList& launches) {
  return launch_rope_of(a, plan, a.qkv.shape[0], [&](auto zero, auto layout, const LaunchShape& shape) {
    using T = decltype(zero);
    constexpr ops::QkvLayout kLayout = decltype(layout)::value;
    return launch(ops::Rope::name, launches, shape,
                  plan.heads == 1 ? rope_kernel<T, 1, kLayout> : rope_kernel<T, 4, kLayout>, rope_input(a),
                  RopeOutput{.q = a.q.data, .k = a.k.data, .v = a.v.data}, plan);
  });
}

}  // namespace

Status prepare(const ops::Rope::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_rope(const ops::Rope::Args& a, const RopePlan& plan, LaunchList& launches) {
  if (a.q_sinks) {
    // A first launch makes the queries for the sinks, and keys that are rotated like them. The second one waits for it
    // and writes all keys again, rotated by their own positions.
    ops::Rope::Args sinks = a;
    sinks.q = a.q_sinks;
    sinks.positions = a.sink_positions;
    CF_TRY(add_launch(sinks, plan, launches));
  }
  return add_launch(a, plan, launches);
}

}  // namespace cf::cuda
