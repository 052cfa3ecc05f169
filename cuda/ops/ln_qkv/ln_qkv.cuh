#pragma once
// LayerNorm fused into a product: the normalised tokens in a block's shared memory, and the kernels and launches of
// every op that begins with such a product.
#include "core/weights.hpp"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/norm.cuh"
#include "cuda/device/sync.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/ops/linear/gemv/block.cuh"
#include "cuda/ops/linear/packed/block.cuh"
#include "cuda/ops/ln_qkv/ln_qkv.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {

/// The norm of a launch's tokens: [first, first + count).
struct TokenNorm {
  const void *x, *gamma, *beta;  // x: (tokens, hidden)
  DType weight_dtype;
  int hidden, first, count, row_bytes;
  float eps;

  TokenNorm(const void* tokens, DType activation, const NormParams& norm, double epsilon)
      : x(tokens),
        gamma(norm.gamma.data),
        beta(norm.beta.data),
        weight_dtype(norm.gamma.dtype),
        hidden(int(norm.gamma.shape[0])),
        first(0),
        count(0),
        row_bytes(ln_qkv_row_bytes(hidden, std::int64_t(size_bytes(activation)))),
        eps(float(epsilon)) {}
};

/// A block's normalised tokens. A row is divided into the parts that layernorm's warps have at eight elements a thread,
/// so that both give the same bits. This block's warps share these parts.
template <class T, int Warps>
struct NormalisedTokens {
  static constexpr int lane_elements = kLane<T>, pieces = kVec / lane_elements;
  static constexpr int warps = Warps;                                       // of the block
  static constexpr int parts = int(kMaxLnQkvHidden) / (32 * kVec) / warps;  // the most parts of a row that a warp has

  const TokenNorm& norm;
  int row_warps;
  char *x, *gamma, *beta;  // x: [count], row_bytes apart; gamma, beta: [hidden], as stored
  Welford* states;         // [count][row_warps]

  __device__ NormalisedTokens(const TokenNorm& n, char* smem)
      : norm(n), row_warps((n.hidden + 32 * kVec - 1) / (32 * kVec)) {
    const int weight_bytes = n.hidden * int(size_bytes(n.weight_dtype));
    x = smem;
    gamma = x + n.count * n.row_bytes;
    beta = gamma + weight_bytes;
    states = reinterpret_cast<Welford*>(beta + weight_bytes);
  }

  __device__ T* token(int t) const { return reinterpret_cast<T*>(x + t * norm.row_bytes); }
  /// The end of the shared memory that this takes.
  __device__ void* end() const { return states + norm.count * row_warps; }

  /// Begins the copies of gamma and beta, which no earlier kernel writes. normalise() waits for them.
  __device__ void load_weights() const {
    const int weight_bytes = norm.hidden * int(size_bytes(norm.weight_dtype));
    for (int i = 16 * int(threadIdx.x); i < weight_bytes; i += 16 * int(blockDim.x)) {
      copy_async(gamma + i, static_cast<const char*>(norm.gamma) + i);
      copy_async(beta + i, static_cast<const char*>(norm.beta) + i);
    }
  }

  /// Makes x the LayerNorm of the tokens, rounded to T. Calls last() before its last barrier.
  template <class Last>
  __device__ void normalise(Last last) const {
    const int hidden = norm.hidden, lane = threadIdx.x % 32;
    const T* from = static_cast<const T*>(norm.x) + long(norm.first) * hidden;
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
    float v[pieces][lane_elements];
    for (int t = 0; t < norm.count; ++t) {
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
    wait_copies();
    __syncthreads();
    with_weight(norm.weight_dtype, [&](auto type) {
      for (int t = 0; t < norm.count; ++t) {
        const Welford* of_token = states + t * row_warps;
        const RowMoments moments = merge_warps<32>(of_token, row_warps, lane, 1 / float(hidden), norm.eps);
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
    last();
    __syncthreads();
  }
};

/// One launch of a call.
template <class Args>
struct LnQkvCall {
  Args args;
  TokenNorm norm;      // of the launch's tokens
  const void* weight;  // null where the weight is packed
  int q_len;
};

// The kernels let their successor start once they have waited, as LaunchMode::after_waiting says, so that attention
// finds the older keys. They take any Op<T, Warps> that is a NormalisedTokens<T, Warps> and says what becomes of the
// product's elements:
//   Call                          its LnQkvCall
//   rows(), row(r)                how many rows the weight has, and which of them is row r of the tiles
//   normalise()                   that of NormalisedTokens, with what the elements need of each token
//   prepare(t, r)                 an element, with what it needs of tensors that no earlier kernel writes
//   begin(element)                called early, after normalise(): loads the rest of what the element needs
//   finish(element, own, other)   stores the element, from its own sum and that of row r ^ 1

/// An element with all of its loads begun.
template <class Op>
__device__ auto begun_element(const Op& op, int token, int r) {
  auto e = op.prepare(token, r);
  op.begin(e);
  return e;
}

template <class T>
inline constexpr int kLnQkvWarps = std::is_same_v<T, float> ? kTileRows / 2 : kGemvWarps;

extern __shared__ __align__(128) char ln_qkv_smem[];

template <template <class, int> class Op, class T, int Depth, bool TwoTokens>
__global__ void __launch_bounds__(kGemvThreads, gemv_blocks_per_sm(kCompiledFor, TwoTokens))
    ln_qkv_kernel(const __grid_constant__ typename Op<T, kGemvWarps>::Call c) {
  __shared__ GemvSmem smem;
  const Op<T, kGemvWarps> op(c, ln_qkv_smem);
  gemv_block<T, Depth, TwoTokens, true>(
      static_cast<const T*>(c.weight), op.rows(), c.norm.hidden, c.norm.count, [&](int r) { return op.row(r); },
      [&] {
        op.load_weights();
        wait_for_predecessors();
        let_successor_start();
        op.normalise();
      },
      [&](int token, int column) { return *reinterpret_cast<const uint4*>(op.token(token) + column); },
      [&](int token, int r) { return begun_element(op, token, r); },
      [&](int, int r, auto sum, const auto& element) { op.finish(element, sum(r), sum(r ^ 1)); }, smem);
}

/// An Op as the epilogue of gptq_block().
template <class Op>
struct LnQkvEpilogue {
  const Op& op;

  __device__ auto prepare(int token, int r) const { return op.prepare(token, r); }
  __device__ void ready() const {
    op.load_weights();
    wait_for_predecessors();
    let_successor_start();
    op.normalise();
  }
  __device__ auto x(int token) const { return op.token(token); }
  template <class Element>
  __device__ void begin(Element& element) const {
    op.begin(element);
  }
  template <class Element>
  __device__ void finish(const Element& element, const float (&sums)[2]) const {
    op.finish(element, sums[0], sums[1]);
  }
};

/// ln_qkv_kernel with a packed four-bit weight, whose rows are packed in the op's order, for slices of up to `Chunks`
/// chunks.
template <template <class, int> class Op, class T, GptqTokens Tokens, bool HalfChunks, int Chunks>
__global__ void __launch_bounds__(ln_qkv_register_threads(Tokens == GptqTokens::one, Chunks), 1)
    ln_qkv_gptq_kernel(const __grid_constant__ typename Op<T, kGemvWarps>::Call c, const __grid_constant__ GptqMatrix m,
                       const __grid_constant__ GptqPlan plan) {
  constexpr GptqConfig config{.tokens = Tokens,
                              .turns = kLnQkvGptqTurns,
                              .half_chunks = HalfChunks,
                              .near_x = true,
                              .rows = 1,
                              .chunks = Chunks};
  using BlockOp = Op<T, kGptqParts * kLnQkvGptqTurns>;
  const BlockOp op(c, ln_qkv_smem + plan.smem_bytes);
  gptq_block<T, config>(m, plan, c.norm.count, LnQkvEpilogue<BlockOp>{op}, ln_qkv_smem);
}

/// Float32 activations: a warp takes two rows of a tile, with plain multiply-adds. Weights of any dtype are exact in
/// float32.
template <template <class, int> class Op>
__global__ void __launch_bounds__(32 * kLnQkvWarps<float>, 4)
    ln_qkv_f32_kernel(const __grid_constant__ typename Op<float, kLnQkvWarps<float>>::Call c) {
  const Op<float, kLnQkvWarps<float>> op(c, ln_qkv_smem);
  op.load_weights();
  wait_for_predecessors();
  let_successor_start();
  op.normalise();
  const int hidden = c.norm.hidden, rows = op.rows();
  const int lane = threadIdx.x % 32, pair = threadIdx.x / 32 * 2;
  for (int r = int(blockIdx.x) * kTileRows + pair; r < rows; r += int(gridDim.x) * kTileRows)
    for (int t = 0; t < c.norm.count; ++t) {
      const auto sum_of = [&](int of) {
        const long row = op.row(of);
        float sum = 0;
        for (int column = lane * kVec; column < hidden; column += 32 * kVec) {
          float w[kVec], x[kVec];
          load_vec(c.weight, c.norm.weight_dtype, row * hidden + column, w);
          load_vec(op.token(t) + column, x);
#pragma unroll
          for (int e = 0; e < kVec; ++e) sum += w[e] * x[e];
        }
        return warp_sum(sum);
      };
      const float first = sum_of(r), second = sum_of(r + 1);
      if (lane == 0) op.finish(begun_element(op, t, r), first, second);
      if (lane == 1) op.finish(begun_element(op, t, r + 1), second, first);
    }
}

template <template <class, int> class Op, class T>
struct LnQkvKernels {
  template <GptqTokens Tokens, bool HalfChunks, int Chunks = kGptqMaxChunks>
  static constexpr auto kernel = ln_qkv_gptq_kernel<Op, T, Tokens, HalfChunks, Chunks>;

  static auto dense(const LnQkvPlan& p) {
    if constexpr (std::is_same_v<T, float>) {
      return ln_qkv_f32_kernel<Op>;
    } else {
      if (p.tokens > 8) return ln_qkv_kernel<Op, T, 4, true>;
      return p.product.depth == 5 ? ln_qkv_kernel<Op, T, 5, false> : ln_qkv_kernel<Op, T, 4, false>;
    }
  }
};

/// The launch of a plan with a packed weight.
inline LaunchShape launch_shape(const LnQkvGptqPlan& p) {
  return {.grid = unsigned(p.product.grid),
          .block = gptq_threads(kLnQkvGptqTurns),
          .smem_bytes = std::size_t(p.smem_bytes),
          .cluster_blocks = p.product.split};
}

template <class Args>
LnQkvCall<Args> ln_qkv_call(const Args& a) {
  return {.args = a,
          .norm = TokenNorm(a.x.data, a.x.dtype, a.norm, a.eps),
          .weight = nullptr,
          .q_len = int(Args::Op::dims(a).q_len)};
}

template <template <class, int> class Op, class Args>
Status launch_packed_of(const Args& a, const LnQkvPacked& plan, LaunchList& launches) {
  constexpr std::string_view name = Args::Op::name;
  const GptqMatrix matrix = gptq_matrix(std::get<PackedWeight>(a.linear.weight), plan.layout);
  LnQkvCall<Args> c = ln_qkv_call(a);
  return with_gptq_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using Kernels = LnQkvKernels<Op, decltype(zero)>;
    for (const LnQkvGptqPlan& p : plan.launches) {
      c.norm.count = p.product.tokens;
      CF_TRY(launch(name, launches, launch_shape(p), gptq_kernel_for<Kernels>(p.product, plan.sizes), c, matrix,
                    p.product));
      c.norm.first += c.norm.count;
    }
    return {};
  });
}

template <template <class, int> class Op, class Args>
Status launch_dense_of(const Args& a, const LnQkvPlan& plan, LaunchList& launches) {
  constexpr std::string_view name = Args::Op::name;
  const std::int64_t tokens = Args::Op::dims(a).tokens();
  LnQkvCall<Args> c = ln_qkv_call(a);
  c.weight = std::get<DenseWeight>(a.linear.weight).weight.data;
  return with_activation(name, a.x.dtype, [&](auto zero) -> Status {
    using T = decltype(zero);
    const LaunchShape shape{
        .grid = unsigned(plan.product.grid), .block = 32 * kLnQkvWarps<T>, .smem_bytes = std::size_t(plan.smem_bytes)};
    for (; c.norm.first < tokens; c.norm.first += plan.tokens) {
      c.norm.count = int(std::min<std::int64_t>(plan.tokens, tokens - c.norm.first));
      CF_TRY(launch(name, launches, shape, LnQkvKernels<Op, T>::dense(plan), c));
    }
    return {};
  });
}

}  // namespace cf::cuda
