#include "cuda/ops/rms_linear/rms_linear.hpp"

#include "cuda/device/math.cuh"
#include "cuda/device/norm.cuh"
#include "cuda/ops/appended_row.hpp"
#include "cuda/ops/linear/packed/call.cuh"
#include "cuda/ops/prepare.hpp"
#include "cuda/ops/run.hpp"

namespace cf::cuda {
namespace {

/// A launch's product, whose x is the token before its norm, and the norm.
struct RmsCall {
  GptqCall linear;
  const void* gamma;
  float eps, inverse_hidden;
};

/// A launch of RmsQkv.
struct QkvCall {
  RmsCall norm;
  ops::RopeAppend::Args rope;
};

/// The scale of a token's RMSNorm. A row is divided into the parts that rmsnorm's warps have at eight elements a
/// thread, so that both give the same bits. This block's warps share these parts. `states` has room for one float of
/// each. Calls last() before its barrier.
template <class T, class Last>
__device__ RmsNormOfRow::Scaled scale_of(const RmsCall& c, float* states, Last last) {
  constexpr int warps = gptq_threads(kLinearGptqTurns) / 32, part = 32 * kVec;
  constexpr int most = kRmsParts / warps;  // parts of a warp
  const T* const row = static_cast<const T*>(c.linear.x);
  const int hidden = c.linear.matrix.in, parts = (hidden + part - 1) / part;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto for_each_part = [&](auto f) {
#pragma unroll
    for (int n = 0; n < most; ++n)
      if (const int p = n * warps + warp; p < parts) f(n, p, p * part + lane * kVec);
  };
  uint4 loaded[most];
  for_each_part([&](int n, int, int i) {
    if (i < hidden) loaded[n] = load_raw(row + i);
  });
  for_each_part([&](int n, int p, int i) {
    float x[1][kVec];
    unpack(loaded[n], x[0], T{});
    const auto each = [&](auto f) {
      if (i < hidden) f(0);
    };
    const float squares = RmsNormOfRow::of_warp(each, x);
    if (lane == 0) states[p] = squares;
  });
  last();
  __syncthreads();
  return RmsNormOfRow::of_row<kRmsParts>(0, states, parts, lane, c.inverse_hidden, c.eps);
}

/// linear's epilogue, for a token that the block normalises.
template <class T, bool Gated>
struct RmsLinearEpilogue : LinearEpilogue<T, kRmsRows, Gated> {
  const RmsCall& call;
  float* states;

  __device__ const T* gain() const { return static_cast<const T*>(call.gamma); }
  __device__ RmsNormOfRow::Scaled scale() const {
    return scale_of<T>(call, states, [] {});
  }
};

/// The token's row in the RoPE table, and the first head's row of its entry among all rows of the cache. -1 stands for
/// none.
struct QkvToken {
  int position, cache_row;
};

/// RoPE of a pair of elements, and their stores to q or to the cache.
template <class T>
struct RmsQkvEpilogue : LinearInput<T> {
  const QkvCall& call;
  float* states;
  QkvToken* token;

  /// Elements `first` and `second` of a head. q's heads come first, then k's, then v's.
  struct Element {
    int head, first, second;
    bool turned;
    T bias[2];
    float cos, sin;
  };

  /// attention, the successor, may not start before this point: it would not find the older keys.
  /// LaunchMode::after_waiting.
  __device__ void ready() const {
    wait_for_predecessors();
    let_successor_start();
  }
  __device__ const T* gain() const { return static_cast<const T*>(call.norm.gamma); }
  /// A position outside of the table makes the rotated elements NaN. A kv_len that the cache has no room for appends
  /// nothing.
  __device__ RmsNormOfRow::Scaled scale() const {
    const ops::RopeAppend::Args& a = call.rope;
    const bool loads = threadIdx.x == blockDim.x - 1;
    int position = 0, kv_len = 0;
    if (loads) {
      position = a.positions.data[0];
      kv_len = a.kv_len.data[0];
    }
    return scale_of<T>(call.norm, states, [&] {  // here, so that the norm does not wait for the two loads
      if (loads)
        *token = {
            .position = position >= a.cos.shape[0] ? -1 : position,
            .cache_row = appended_row(AnyCacheView(a.k_cache, a.page_table, {}), a.k_cache.shape[0], 0, kv_len, 1, 0)};
    });
  }
  __device__ Element prepare(int, int row) const {
    const RopePairs& pairs = this->c.pairs;
    const int head_dim = int(pairs.head_dim), half = int(pairs.rotary_dim / 2);
    const int head = row / head_dim, c = row % head_dim;
    const bool is_qk = head < pairs.turned_heads;
    Element e{.head = head,
              .first = RopePairs::element(is_qk, c, half),
              .second = RopePairs::element(is_qk, c + 1, half),
              .turned = is_qk && c < 2 * half,
              .bias = {},
              .cos = 1,
              .sin = 0};
    if (const T* const bias = static_cast<const T*>(this->c.output.bias)) {
      e.bias[0] = bias[head * head_dim + e.first];
      e.bias[1] = bias[head * head_dim + e.second];
    }
    return e;
  }
  __device__ void begin(Element& e) const {
    const int position = token->position;
    if (!e.turned || position < 0) return;
    const long at = long(position) * call.rope.cos.shape[1] + e.first;
    e.cos = call.rope.cos.data[at];
    e.sin = call.rope.sin.data[at];
  }
  /// Both elements are rounded to T before they are rotated, as linear rounds them where rope is an op of its own.
  __device__ void finish(const Element& e, float (&v)[kRmsRows]) const {
#pragma unroll
    for (int i = 0; i < kRmsRows; ++i) {
      if (this->c.output.bias) v[i] += to_float(e.bias[i]);
      v[i] = to_float(from_float<T>(v[i]));
    }
    const auto [position, cache_row] = *token;
    if (e.turned) rotate(v[0], v[1], position < 0 ? NAN : e.cos, e.sin);
    const ops::RopeAppend::Args& a = call.rope;
    const int heads = int(a.q.shape[1]), kv_heads = int(a.k_cache.shape[1]), head_dim = int(a.q.shape[2]);
    T* to = static_cast<T*>(a.q.data) + e.head * head_dim;
    if (e.head >= heads) {
      if (cache_row < 0) return;
      const int of_k = e.head - heads, of_v = of_k - kv_heads;
      void* const cache = of_v < 0 ? a.k_cache.data : a.v_cache.data;
      const int row = cache_row + (of_v < 0 ? of_k : of_v) * int(a.k_cache.shape[2]);
      to = static_cast<T*>(cache) + long(row) * head_dim;
    }
    to[e.first] = from_float<T>(v[0]);
    to[e.second] = from_float<T>(v[1]);
  }
};

extern __shared__ __align__(128) char gptq_smem[];

constexpr GptqConfig rms_config(int chunks) { return linear_gptq_config(GptqTokens::one, false, kRmsRows, chunks); }

template <class T, bool Gated, int Chunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    rms_linear_kernel(const __grid_constant__ RmsCall c) {
  constexpr GptqConfig config = rms_config(Chunks);
  __shared__ float states[kRmsParts];
  let_successor_start();
  gptq_block<T, config>(c.linear.matrix, c.linear.plan, 1, RmsLinearEpilogue<T, Gated>{{{c.linear}}, c, states},
                        gptq_smem);
}

template <class T, int Chunks>
__global__ void __launch_bounds__(gptq_threads(kLinearGptqTurns), kLinearGptqBlocksPerSm)
    rms_qkv_kernel(const __grid_constant__ QkvCall c) {
  constexpr GptqConfig config = rms_config(Chunks);
  __shared__ float states[kRmsParts];
  __shared__ QkvToken token;
  const GptqCall& linear = c.norm.linear;
  gptq_block<T, config>(linear.matrix, linear.plan, 1, RmsQkvEpilogue<T>{{linear}, c, states, &token}, gptq_smem);
}

/// `y`: what the product would write.
template <class Args>
Result<RmsCall> rms_call(const Args& a, const AnyView<2>& y, ops::Epilogue epilogue, const GptqPlan& plan) {
  const auto& weight = std::get<PackedWeight>(a.linear.weight);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(Args::Op::name, weight));
  RmsCall c{.linear = gptq_call({.x = a.x, .linear = a.linear, .y = y, .epilogue = epilogue}, weight, layout),
            .gamma = a.gamma.data,
            .eps = float(a.eps),
            .inverse_hidden = 1 / float(a.x.shape[1])};
  c.linear.plan = plan;
  c.linear.tokens = 1;
  return c;
}

bool has_long_slices(const GptqPlan& plan) { return gptq_slice_chunks(plan) > kGptqMaxChunks; }

template <class T, bool Gated>
auto linear_kernel_for(const GptqPlan& plan) {
  return has_long_slices(plan) ? rms_linear_kernel<T, Gated, kGptqOneTokenChunks>
                               : rms_linear_kernel<T, Gated, kGptqMaxChunks>;
}

}  // namespace

Status prepare(const ops::RmsLinear::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }
Status prepare(const ops::RmsQkv::Args& a, LaunchList& launches) { return prepare_chosen(a, launches); }

Status launch_rms_linear(const ops::RmsLinear::Args& a, const GptqPlan& plan, LaunchList& launches) {
  CF_TRY_ASSIGN(const RmsCall c, rms_call(a, a.y, a.epilogue, plan));
  return with_gptq_activation(ops::RmsLinear::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool gated = a.epilogue == ops::Epilogue::swiglu;
    return launch(ops::RmsLinear::name, launches,
                  linear_gptq_shape(plan, linear_gptq_smem_bytes(launches.arch(), plan)),
                  gated ? linear_kernel_for<T, true>(plan) : linear_kernel_for<T, false>(plan), c);
  });
}

Status launch_rms_qkv(const ops::RmsQkv::Args& a, const GptqPlan& plan, LaunchList& launches) {
  const auto d = ops::RmsQkv::dims(a);
  const AnyView<2> w(nullptr, {d.tokens(), d.out()}, a.x.dtype);  // which the launch does not write
  CF_TRY_ASSIGN(const RmsCall norm, rms_call(a, w, ops::Epilogue::none, plan));
  const ops::RopeAppend::Args rope{.qkv = {},
                                   .cos = a.cos,
                                   .sin = a.sin,
                                   .positions = a.positions,
                                   .kv_len = a.kv_len,
                                   .q = a.q,
                                   .k_cache = a.k_cache,
                                   .v_cache = a.v_cache,
                                   .layout = ops::QkvLayout::separate,
                                   .page_table = a.page_table};
  return with_gptq_activation(ops::RmsQkv::name, a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch(ops::RmsQkv::name, launches, linear_gptq_shape(plan, plan.smem_bytes),
                  has_long_slices(plan) ? rms_qkv_kernel<T, kGptqOneTokenChunks> : rms_qkv_kernel<T, kGptqMaxChunks>,
                  QkvCall{norm, rope});
  });
}

}  // namespace cf::cuda
