#include "cuda/ln_qkv.hpp"

#include "cuda/launch.hpp"
#include "cuda/linear.cuh"

namespace cf::cuda {
namespace {

/// The call and the tokens of this launch: [first, first + tokens).
struct Call {
  ops::LnQkv::Args args;
  const void* weight;
  DType weight_dtype;
  int first, tokens, row_bytes, block_rows;
};

/// Where an element of the product goes, for the product's rows in their own order: a head's elements that RoPE turns lie
/// in pairs, first and second half side by side, so that one tile holds both.
struct Place {
  int head, part, column;  // part 0, 1, 2: q, k, v
  int pair;                // of the cosines; -1: not turned
  bool second;             // of the pair

  __device__ Place(int r, int head_dim, int half) {
    const int c = r % head_dim, block = r / head_dim;
    head = block / 3;
    part = block % 3;
    const bool turned = part < 2 && c < 2 * half;
    pair = turned ? c / 2 : -1;
    second = turned && c % 2;
    column = turned ? pair + (second ? half : 0) : c;
  }
  __device__ int row(int head_dim) const { return (head * 3 + part) * head_dim + column; }
};

/// A block's normalised tokens and what its epilogues need of each.
template <class T>
struct Prologue {
  float *gamma, *beta;  // [hidden]
  float* biases;        // [block_rows]
  float* turns;         // [tokens][rotary_dim]: cosines, then sines
  float2* moments;      // [tokens]: mean, rstd
  int* entries;         // [tokens]: where in the cache, or -1
  char* x;              // [tokens], row_bytes apart

  __device__ Prologue(const Call& c, char* smem) {
    const int hidden = int(c.args.x.shape[1]), rotary_dim = 2 * int(c.args.cos.shape[1]);
    x = smem;
    gamma = reinterpret_cast<float*>(x + c.tokens * c.row_bytes);
    beta = gamma + hidden;
    biases = beta + hidden;
    moments = reinterpret_cast<float2*>(biases + c.block_rows);
    turns = reinterpret_cast<float*>(moments + c.tokens);
    entries = reinterpret_cast<int*>(turns + c.tokens * rotary_dim);
  }

  __device__ T* token(const Call& c, int t) const { return reinterpret_cast<T*>(x + t * c.row_bytes); }

  /// What no kernel before this one writes.
  __device__ void load_weights(const Call& c) const {
    const int hidden = int(c.args.x.shape[1]);
    const auto widen = [&](const ConstAnyView<1>& from, float* to) {
      for (int i = threadIdx.x * kVec; i < hidden; i += blockDim.x * kVec) {
        float v[kVec];
        load_vec(from.data, from.dtype, i, v);
        store_vec(to + i, v);
      }
    };
    widen(c.args.norm.gamma, gamma);
    widen(c.args.norm.beta, beta);
    const auto& bias = c.args.linear.bias;
    const int head_dim = int(c.args.q.shape[2]), half = int(c.args.cos.shape[1]);
    for (int i = threadIdx.x; i < c.block_rows; i += blockDim.x) {
      const long r = (i / kTileRows * long(gridDim.x) + blockIdx.x) * kTileRows + i % kTileRows;
      biases[i] = bias && r < bias.shape[0]
                      ? load_scalar(bias.data, bias.dtype, Place(int(r), head_dim, half).row(head_dim))
                      : 0;
    }
  }
  __device__ float bias(int r) const { return biases[r / kTileRows / int(gridDim.x) * kTileRows + r % kTileRows]; }

  /// LayerNorm of the tokens, rounded to T: a warp's mean and variance, then everybody's elements. A position outside the
  /// table makes a token's turned elements NaN, a kv_len that the cache has no room for appends nothing.
  __device__ void normalise(const Call& c) const {
    const auto& a = c.args;
    const int hidden = int(a.x.shape[1]), vectors = hidden / kVec, half = int(a.cos.shape[1]);
    const T* from = static_cast<const T*>(a.x.data) + long(c.first) * hidden;
    for (int i = threadIdx.x; i < c.tokens * vectors; i += blockDim.x) {
      float v[kVec];
      load_vec(from + i * kVec, v);
      store_vec(token(c, i / vectors) + i % vectors * kVec, v);
    }
    const int q_len = int(a.x.shape[0] / a.kv_len.shape[0]);
    for (int t = threadIdx.x; t < c.tokens; t += blockDim.x) {
      const int of = c.first + t, kv_len = a.kv_len.data[of / q_len];
      entries[t] = kv_len < q_len || kv_len > a.k_cache.shape[2] ? -1 : kv_len - q_len + of % q_len;
    }
    for (int i = threadIdx.x; i < c.tokens * 2 * half; i += blockDim.x) {
      const int t = i / (2 * half), at = i % (2 * half);
      const long position = a.positions.data[c.first + t];
      const bool known = position >= 0 && position < a.cos.shape[0];
      const float* table = at < half ? a.cos.data : a.sin.data;
      turns[i] = known ? table[position * half + at % half] : NAN;
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < c.tokens; t += blockDim.x / 32) {
      // Two passes over shared memory: Welford's mean and sum of squared deviations, which do not cancel.
      const auto sum_over = [&](auto term) {
        float sum = 0;
        for (int i = lane; i < vectors; i += 32) {
          float v[kVec];
          load_vec(token(c, t) + i * kVec, v);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += term(v[e]);
        }
        return warp_sum(sum);
      };
      const float mean = sum_over([](float v) { return v; }) / float(hidden);
      const float m2 = sum_over([=](float v) { return (v - mean) * (v - mean); });
      if (lane == 0) moments[t] = {mean, rsqrtf(m2 / float(hidden) + float(a.eps))};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < c.tokens * vectors; i += blockDim.x) {
      const int t = i / vectors, column = i % vectors * kVec;
      const float2 m = moments[t];
      float v[kVec];
      load_vec(token(c, t) + column, v);
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] = (v[e] - m.x) * m.y * gamma[column + e] + beta[column + e];
      store_vec(token(c, t) + column, v);
    }
    __syncthreads();
  }

  /// Stores one element of q, k or v, and of the cache.
  __device__ void store(const Call& c, int t, const Place& p, float own, float other) const {
    const auto& a = c.args;
    const int heads = int(a.q.shape[1]), head_dim = int(a.q.shape[2]), half = int(a.cos.shape[1]);
    float v = own;
    if (p.pair >= 0) {
      const float cos = turns[t * 2 * half + p.pair], sin = turns[t * 2 * half + half + p.pair];
      float first = p.second ? other : own, second = p.second ? own : other;
      rotate(first, second, cos, sin);
      v = p.second ? second : first;
    }
    const T stored = from_float<T>(v);
    const long token = c.first + t;
    void* const out = p.part == 0 ? a.q.data : p.part == 1 ? a.k.data : a.v.data;
    static_cast<T*>(out)[(token * heads + p.head) * head_dim + p.column] = stored;
    if (p.part == 0 || entries[t] < 0) return;
    const long sequence = token / (a.x.shape[0] / a.kv_len.shape[0]);
    void* const cache = p.part == 1 ? a.k_cache.data : a.v_cache.data;
    static_cast<T*>(cache)[((sequence * heads + p.head) * a.k_cache.shape[2] + entries[t]) * head_dim + p.column] =
        stored;
  }
};

extern __shared__ __align__(128) char ln_qkv_smem[];

template <class T, int Depth, bool TwoTokens>
__global__ void __launch_bounds__(kLinearThreads, linear_blocks_per_sm(kCompiledFor, TwoTokens))
    ln_qkv_kernel(const __grid_constant__ Call c) {
  __shared__ LinearSmem smem;
  let_successor_start();
  const Prologue<T> prologue(c, ln_qkv_smem);
  const int head_dim = int(c.args.q.shape[2]), half = int(c.args.cos.shape[1]);
  linear_block<T, Depth, TwoTokens, true>(
      static_cast<const T*>(c.weight), int(c.args.q.shape[1]) * 3 * head_dim, int(c.args.x.shape[1]), c.tokens,
      [=](int r) { return long(Place(r, head_dim, half).row(head_dim)); },
      [&] {
        prologue.load_weights(c);
        wait_for_predecessors();
        prologue.normalise(c);
      },
      [&](int token, int column) { return *reinterpret_cast<const uint4*>(prologue.token(c, token) + column); },
      [](int, int) { return 0; },
      [&](int token, int r, auto sum, int) {
        const Place place(r, head_dim, half);
        const float other = place.pair >= 0 ? sum(r ^ 1) + prologue.bias(r ^ 1) : 0;
        prologue.store(c, token, place, sum(r) + prologue.bias(r), other);
      },
      smem);
}

template <class T>
auto kernel_for(int depth, bool two_tokens) {
  if (two_tokens) return ln_qkv_kernel<T, 4, true>;
  return depth == 5 ? ln_qkv_kernel<T, 5, false> : ln_qkv_kernel<T, 4, false>;
}

/// Float32 activations: the same tiles, a warp two rows of one; plain multiply-adds, exact products of any stored weight.
__global__ void __launch_bounds__(kTileRows / 2 * 32) ln_qkv_f32_kernel(const __grid_constant__ Call c) {
  let_successor_start();
  const Prologue<float> prologue(c, ln_qkv_smem);
  prologue.load_weights(c);
  wait_for_predecessors();
  prologue.normalise(c);
  const int hidden = int(c.args.x.shape[1]), head_dim = int(c.args.q.shape[2]), half = int(c.args.cos.shape[1]);
  const int rows = int(c.args.q.shape[1]) * 3 * head_dim, lane = threadIdx.x % 32, pair = threadIdx.x / 32 * 2;
  for (int r = int(blockIdx.x) * kTileRows + pair; r < rows; r += int(gridDim.x) * kTileRows)
    for (int t = 0; t < c.tokens; ++t) {
      float value[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const long row = Place(r + i, head_dim, half).row(head_dim);
        float sum = 0;
        for (int column = lane * kVec; column < hidden; column += 32 * kVec) {
          float w[kVec], x[kVec];
          load_vec(c.weight, c.weight_dtype, row * hidden + column, w);
          load_vec(prologue.token(c, t) + column, x);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += w[e] * x[e];
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        value[i] = sum + prologue.bias(r + i);
      }
      if (lane == 0) prologue.store(c, t, Place(r, head_dim, half), value[0], value[1]);
      if (lane == 1) prologue.store(c, t, Place(r + 1, head_dim, half), value[1], value[0]);
    }
}

}  // namespace

Status run(const ops::LnQkv::Args& a, Context& context) {
  constexpr std::string_view name = ops::LnQkv::name;
  CF_TRY(check_call(a, context));
  const auto d = ops::LnQkv::dims(a);
  const auto* dense = std::get_if<DenseWeight>(&a.linear.weight);
  if (!dense) return Status::error(Code::unimplemented, "ln_qkv: cuda has no GPTQ product, expected a dense weight");
  CF_TRY(check_multiple_of_8(name, "hidden", d.hidden));
  CF_TRY(check_multiple_of_8(name, "head_dim", d.head_dim));
  return with_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    if (a.x.dtype != DType::f32) CF_TRY(check_weight_dtype(name, a.x.dtype, dense->weight.dtype));
    const LnQkvPlan plan = ln_qkv_plan(context.arch(), d.hidden, d.out(), d.rotary_dim, d.tokens(), sizeof(T));
    if (plan.tokens == 0)
      return Status::error(Code::unimplemented, "ln_qkv: cuda takes a hidden that fits a block's shared memory, got " +
                                                    std::to_string(d.hidden));
    Call c{.args = a,
           .weight = dense->weight.data,
           .weight_dtype = dense->weight.dtype,
           .first = 0,
           .tokens = 0,
           .row_bytes = plan.row_bytes,
           .block_rows = int(linear_block_rows(plan.product, d.out()))};
    LaunchShape shape{
        .grid = unsigned(plan.product.grid), .block = kLinearThreads, .smem_bytes = std::size_t(plan.smem_bytes)};
    for (; c.first < d.tokens(); c.first += plan.tokens) {
      c.tokens = int(std::min<std::int64_t>(plan.tokens, d.tokens() - c.first));
      if constexpr (std::is_same_v<T, float>) {
        shape.block = kTileRows / 2 * 32;
        CF_TRY(launch(name, context, shape, ln_qkv_f32_kernel, c));
      } else {
        CF_TRY(launch(name, context, shape, kernel_for<T>(plan.product.depth, plan.tokens > 8), c));
      }
    }
    return {};
  });
}

}  // namespace cf::cuda
