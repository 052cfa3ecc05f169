#include "cuda/ln_qkv.hpp"

#include <cuda_pipeline_primitives.h>

#include "cuda/device/norm.cuh"
#include "cuda/launch.hpp"
#include "cuda/linear.cuh"
#include "cuda/linear_gptq.cuh"

namespace cf::cuda {
namespace {

/// The call and the tokens of this launch: [first, first + tokens).
struct Call {
  ops::LnQkv::Args args;
  const void* weight;
  DType weight_dtype;
  int first, tokens, row_bytes;
};

/// Where an element of the product goes, for the product's rows in their own order: a head's elements that RoPE turns
/// lie in pairs, first and second half side by side, so that one tile holds both.
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

/// What becomes of an element of the product: its own bias and that of the other of its pair, as they lie in memory,
/// and the pair's angle.
struct Begun {
  std::uint32_t bias, other_bias;
  float cos, sin;
};

/// A block's normalised tokens, and what its epilogues need of each. The norm is layernorm's at eight elements a
/// thread: its warps' parts of a row are shared out among this block's warps.
template <class T, int Warps = std::is_same_v<T, float> ? kTileRows / 2 : kLinearWarps>
struct Prologue {
  static constexpr int lane_elements = kLane<T>, pieces = kVec / lane_elements;
  static constexpr int warps = Warps;                                       // of the block
  static constexpr int parts = int(kMaxLnQkvHidden) / (32 * kVec) / warps;  // of a row, for a warp, at most

  /// Of a token: its row in the table, or -1; its entry of the cache, or -1.
  struct Token {
    int position, entry;
  };

  const Call& c;
  int hidden, head_dim, half, row_warps;
  char *x, *gamma, *beta;  // x: [tokens], row_bytes apart; gamma, beta: [hidden], as stored
  Token* token_of;         // [tokens]
  Welford* states;         // [tokens][row_warps]

  __device__ Prologue(const Call& call, char* smem)
      : c(call),
        hidden(int(c.args.x.shape[1])),
        head_dim(int(c.args.q.shape[2])),
        half(int(c.args.cos.shape[1])),
        row_warps((hidden + 32 * kVec - 1) / (32 * kVec)) {
    const int weight_bytes = hidden * int(size_bytes(c.weight_dtype));
    x = smem;
    gamma = x + c.tokens * c.row_bytes;
    beta = gamma + weight_bytes;
    token_of = reinterpret_cast<Token*>(beta + weight_bytes);
    states = reinterpret_cast<Welford*>(token_of + c.tokens);
  }

  __device__ T* token(int t) const { return reinterpret_cast<T*>(x + t * c.row_bytes); }
  __device__ Place place(int r) const { return {r, head_dim, half}; }
  __device__ long row(int r) const { return place(r).row(head_dim); }

  /// What no kernel before this one writes. Nothing waits for it before normalise() does.
  __device__ void load_weights() const {
    const int weight_bytes = hidden * int(size_bytes(c.weight_dtype));
    for (int i = 16 * int(threadIdx.x); i < weight_bytes; i += 16 * int(blockDim.x)) {
      __pipeline_memcpy_async(gamma + i, static_cast<const char*>(c.args.norm.gamma.data) + i, 16);
      __pipeline_memcpy_async(beta + i, static_cast<const char*>(c.args.norm.beta.data) + i, 16);
    }
    __pipeline_commit();
  }

  /// LayerNorm of the tokens, rounded to T. A position outside the table makes a token's turned elements NaN, a kv_len
  /// that the cache has no room for appends nothing.
  __device__ void normalise() const {
    const auto& a = c.args;
    const int q_len = int(a.x.shape[0] / a.kv_len.shape[0]), lane = threadIdx.x % 32;
    const T* from = static_cast<const T*>(a.x.data) + long(c.first) * hidden;
    const auto for_each_part = [&](auto f) {
#pragma unroll
      for (int n = 0; n < parts; ++n)
        if (const int w = n * warps + threadIdx.x / 32; w < row_warps)
          f(n, w, [&](auto g) {
#pragma unroll
            for (int p = 0; p < pieces; ++p)
              if (const int i = ((p * row_warps + w) * 32 + lane) * lane_elements; i < hidden) g(p, i);
          });
    };
    if (const int t = int(blockDim.x - 1 - threadIdx.x); t < c.tokens) {  // the last warp has the fewest parts
      const int of = c.first + t, kv_len = a.kv_len.data[of / q_len], position = a.positions.data[of];
      token_of[t] = {.position = position >= a.cos.shape[0] ? -1 : position,
                     .entry = kv_len < q_len || kv_len > a.k_cache.shape[2] ? -1 : kv_len - q_len + of % q_len};
    }
    float v[pieces][lane_elements];
    for (int t = 0; t < c.tokens; ++t) {
      uint4 loaded[parts][pieces];
      for_each_part([&](int n, int, auto for_each_piece) {
        for_each_piece([&](int p, int i) { loaded[n][p] = load_raw(from + long(t) * hidden + i); });
      });
      for_each_part([&](int n, int w, auto for_each_piece) {
        for_each_piece([&](int p, int i) {
          *reinterpret_cast<uint4*>(token(t) + i) = loaded[n][p];
          unpack(loaded[n][p], v[p], T{});
        });
        const Welford of_warp = centre_warp([&](auto f) { for_each_piece([&](int p, int) { f(p); }); }, v);
        if (lane == 0) states[t * row_warps + w] = of_warp;
      });
    }
    __pipeline_wait_prior(0);
    __syncthreads();
    with_weight(c.weight_dtype, [&](auto type) {
      for (int t = 0; t < c.tokens; ++t) {
        const Welford* of_token = states + t * row_warps;
        const RowMoments moments = merge_warps<32>(of_token, row_warps, 1 / float(hidden), float(a.eps));
        for_each_part([&](int, int w, auto for_each_piece) {
          const float warp_mean = of_token[w].mean;
          const NormalisedWarp normalised(warp_mean, moments);
          for_each_piece([&](int p, int i) {
            using Weight = StoredWeight<lane_elements>;
            Weight of_gamma, of_beta;
            of_gamma.load(reinterpret_cast<const decltype(type)*>(gamma) + i);
            of_beta.load(reinterpret_cast<const decltype(type)*>(beta) + i);
            float g[lane_elements], b[lane_elements];
            of_gamma.unpack(g, type);
            of_beta.unpack(b, type);
            unpack(load_raw(token(t) + i), v[p], T{});
#pragma unroll
            for (int e = 0; e < lane_elements; ++e) v[p][e] = normalised(v[p][e] - warp_mean, g[e], b[e]);
            store_vec(token(t) + i, v[p]);
          });
        });
      }
    });
    __syncthreads();
  }

  __device__ Begun begin(int t, int r) const {
    const Place p = place(r);
    const auto& bias = c.args.linear.bias;
    const int row = p.row(head_dim);
    Begun b{.bias = bias ? load_bits(bias.data, bias.dtype, row) : 0, .other_bias = 0, .cos = 1, .sin = 0};
    if (p.pair < 0) return b;
    if (bias) b.other_bias = load_bits(bias.data, bias.dtype, p.second ? row - half : row + half);
    const int position = token_of[t].position;
    b.cos = position < 0 ? NAN : c.args.cos.data[long(position) * half + p.pair];
    b.sin = position < 0 ? NAN : c.args.sin.data[long(position) * half + p.pair];
    return b;
  }

  /// Stores one element of q, k or v, and of the cache; `other` is the sum of the other of its pair. Each is rounded to
  /// T before it is turned, as where linear stores it for rope.
  __device__ void finish(int t, int r, float own, float other, const Begun& begun) const {
    const auto& a = c.args;
    const int heads = int(a.q.shape[1]);
    const Place p = place(r);
    const auto rounded = [&](float sum, std::uint32_t bits) {
      if (a.linear.bias) sum += from_bits(bits, a.linear.bias.dtype);
      return to_float(from_float<T>(sum));
    };
    float v = rounded(own, begun.bias);
    if (p.pair >= 0) {
      const float of_pair = rounded(other, begun.other_bias);
      float first = p.second ? of_pair : v, second = p.second ? v : of_pair;
      rotate(first, second, begun.cos, begun.sin);
      v = p.second ? second : first;
    }
    const T stored = from_float<T>(v);
    const long of = c.first + t;
    void* const out = p.part == 0 ? a.q.data : p.part == 1 ? a.k.data : a.v.data;
    static_cast<T*>(out)[(of * heads + p.head) * head_dim + p.column] = stored;
    const int entry = token_of[t].entry;
    if (p.part == 0 || entry < 0) return;
    const long sequence = of / (a.x.shape[0] / a.kv_len.shape[0]);
    void* const cache = p.part == 1 ? a.k_cache.data : a.v_cache.data;
    static_cast<T*>(cache)[((sequence * heads + p.head) * a.k_cache.shape[2] + entry) * head_dim + p.column] = stored;
  }
};

extern __shared__ __align__(128) char ln_qkv_smem[];

template <class T, int Depth, bool TwoTokens>
__global__ void __launch_bounds__(kLinearThreads, linear_blocks_per_sm(kCompiledFor, TwoTokens))
    ln_qkv_kernel(const __grid_constant__ Call c) {
  __shared__ LinearSmem smem;
  let_successor_start();
  const Prologue<T> prologue(c, ln_qkv_smem);
  linear_block<T, Depth, TwoTokens, true>(
      static_cast<const T*>(c.weight), int(c.args.q.shape[1]) * 3 * prologue.head_dim, prologue.hidden, c.tokens,
      [&](int r) { return prologue.row(r); },
      [&] {
        prologue.load_weights();
        wait_for_predecessors();
        prologue.normalise();
      },
      [&](int token, int column) { return *reinterpret_cast<const uint4*>(prologue.token(token) + column); },
      [&](int token, int r) { return prologue.begin(token, r); },
      [&](int token, int r, auto sum, const Begun& begun) { prologue.finish(token, r, sum(r), sum(r ^ 1), begun); },
      smem);
}

/// The same with four-bit tiles, whose rows are in the order of RoPE's pairs as they lie.
template <class T, int Chunks, bool TwoTokens, bool HalfChunks>
__global__ void __launch_bounds__(gptq_threads(kLnQkvGptqTurns), 1)
    ln_qkv_gptq_kernel(const __grid_constant__ Call c, const __grid_constant__ GptqMatrix m,
                       const __grid_constant__ GptqPlan plan) {
  let_successor_start();
  const Prologue<T, kGptqParts * kLnQkvGptqTurns> prologue(c, ln_qkv_smem + plan.smem_bytes);
  gptq_block<T, kLnQkvGptqTurns, Chunks, TwoTokens, HalfChunks>(
      m, plan, c.tokens,
      [&] {
        prologue.load_weights();
        wait_for_predecessors();
        prologue.normalise();
      },
      [&](int token, int column) { return load_columns(m, prologue.token(token), column); },
      [&](int token, int r) { return prologue.begin(token, r); },
      [&](int token, int r, auto sum, const Begun& begun) { prologue.finish(token, r, sum(r), sum(r ^ 1), begun); },
      ln_qkv_smem);
}

template <class T>
struct LnQkvGptqKernels {
  template <int Chunks, bool TwoTokens, bool HalfChunks>
  static constexpr auto kernel = ln_qkv_gptq_kernel<T, Chunks, TwoTokens, HalfChunks>;
};

template <class T>
auto kernel_for(int depth, bool two_tokens) {
  if (two_tokens) return ln_qkv_kernel<T, 4, true>;
  return depth == 5 ? ln_qkv_kernel<T, 5, false> : ln_qkv_kernel<T, 4, false>;
}

/// Float32 activations: the same tiles, a warp two rows of one; plain multiply-adds, exact products of any stored
/// weight.
__global__ void __launch_bounds__(32 * Prologue<float>::warps, 4) ln_qkv_f32_kernel(const __grid_constant__ Call c) {
  let_successor_start();
  const Prologue<float> prologue(c, ln_qkv_smem);
  prologue.load_weights();
  wait_for_predecessors();
  prologue.normalise();
  const int hidden = prologue.hidden, rows = int(c.args.q.shape[1]) * 3 * prologue.head_dim;
  const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 * 2;
  for (int r = int(blockIdx.x) * kTileRows + pair; r < rows; r += int(gridDim.x) * kTileRows)
    for (int t = 0; t < c.tokens; ++t) {
      const auto sum_of = [&](int of) {
        const long row = prologue.row(of);
        float sum = 0;
        for (int column = lane * kVec; column < hidden; column += 32 * kVec) {
          float w[kVec], x[kVec];
          load_vec(c.weight, c.weight_dtype, row * hidden + column, w);
          load_vec(prologue.token(t) + column, x);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += w[e] * x[e];
        }
        return warp_sum(sum);
      };
      const float first = sum_of(r), second = sum_of(r + 1);
      if (lane == 0) prologue.finish(t, r, first, second, prologue.begin(t, r));
      if (lane == 1) prologue.finish(t, r + 1, second, first, prologue.begin(t, r + 1));
    }
}

Status run_gptq(const ops::LnQkv::Args& a, const GptqTiles& tiles, Context& context) {
  constexpr std::string_view name = ops::LnQkv::name;
  const auto d = ops::LnQkv::dims(a);
  if (tiles.pairs != RopePairs{d.head_dim, d.rotary_dim})
    return Status::error(Code::unimplemented, "ln_qkv: cuda takes GPTQ tiles of rows in the order of its heads' pairs");
  return with_gptq_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const DType weight_dtype = a.norm.gamma.dtype;
    Call c{.args = a, .weight = nullptr, .weight_dtype = weight_dtype, .first = 0, .tokens = 0, .row_bytes = 0};
    const GptqMatrix matrix = gptq_matrix(tiles, d.hidden, d.out());
    for (; c.first < d.tokens(); c.first += c.tokens) {
      const LnQkvGptqPlan plan = ln_qkv_gptq_plan(context.arch(), gptq_sizes(tiles), d.hidden, d.tokens() - c.first,
                                                  std::int64_t(size_bytes(weight_dtype)));
      if (plan.product.grid == 0)
        return Status::error(Code::unimplemented, "ln_qkv: cuda takes hidden up to " + std::to_string(kMaxLnQkvHidden) +
                                                      " that fits a block's shared memory, got " +
                                                      std::to_string(d.hidden));
      c.tokens = plan.product.tokens;
      c.row_bytes = plan.row_bytes;
      CF_TRY(launch(name, context,
                    {.grid = unsigned(plan.product.grid),
                     .block = gptq_threads(kLnQkvGptqTurns),
                     .smem_bytes = std::size_t(plan.smem_bytes),
                     .cluster_blocks = plan.product.split},
                    gptq_kernel_for<LnQkvGptqKernels<T>>(plan.product, gptq_sizes(tiles)), c, matrix, plan.product));
    }
    return {};
  });
}

}  // namespace

Status run(const ops::LnQkv::Args& a, Context& context) {
  constexpr std::string_view name = ops::LnQkv::name;
  CF_TRY(check_call(a, context));
  const auto d = ops::LnQkv::dims(a);
  CF_TRY(check_multiple_of_8(name, "hidden", d.hidden));
  CF_TRY(check_multiple_of_8(name, "head_dim", d.head_dim));
  if (const auto* tiles = std::get_if<GptqTiles>(&a.linear.weight)) return run_gptq(a, *tiles, context);
  const auto* dense = std::get_if<DenseWeight>(&a.linear.weight);
  if (!dense) return Status::error(Code::unimplemented, "ln_qkv: cuda takes GPTQ weights as GptqTiles, got GptqWeight");
  return with_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    if (a.x.dtype != DType::f32) CF_TRY(check_weight_dtype(name, a.x.dtype, dense->weight.dtype));
    const LnQkvPlan plan = ln_qkv_plan(context.arch(), d.hidden, d.out(), d.tokens(), sizeof(T),
                                       std::int64_t(size_bytes(dense->weight.dtype)));
    if (plan.tokens == 0)
      return Status::error(Code::unimplemented, "ln_qkv: cuda takes hidden up to " + std::to_string(kMaxLnQkvHidden) +
                                                    " that fits a block's shared memory, got " +
                                                    std::to_string(d.hidden));
    Call c{.args = a,
           .weight = dense->weight.data,
           .weight_dtype = dense->weight.dtype,
           .first = 0,
           .tokens = 0,
           .row_bytes = plan.row_bytes};
    LaunchShape shape{
        .grid = unsigned(plan.product.grid), .block = kLinearThreads, .smem_bytes = std::size_t(plan.smem_bytes)};
    for (; c.first < d.tokens(); c.first += plan.tokens) {
      c.tokens = int(std::min<std::int64_t>(plan.tokens, d.tokens() - c.first));
      if constexpr (std::is_same_v<T, float>) {
        shape.block = 32 * Prologue<float>::warps;
        CF_TRY(launch(name, context, shape, ln_qkv_f32_kernel, c));
      } else {
        CF_TRY(launch(name, context, shape, kernel_for<T>(plan.product.depth, plan.tokens > 8), c));
      }
    }
    return {};
  });
}

}  // namespace cf::cuda
