#include "cuda/ops/linear/cublaslt/cublaslt.hpp"

#include "cuda/device/sync.cuh"
#include "cuda/ops/linear/cublaslt/library.hpp"
#include "cuda/ops/linear/cublaslt/plan.hpp"
#include "cuda/ops/linear/output.cuh"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// A packed matrix, and where its weights go: (out, parts * in), in the order of the matrix before it was packed.
struct DequantiseCall {
  GptqMatrix matrix;
  RopePairs pairs;
  int columns_per_group;
  int plane_columns;  // columns of a plane of codes; beyond them, with 8 bits, comes the plane of low codes
  void* weight;
};

/// The codes of rows g and g + 8 of a tile, columns `column` to `column` + 7. `column` is a multiple of 8.
__device__ uint2 load_codes(const GptqMatrix& m, int tile, int lane, int column) {
  const long at = (long(tile) * m.chunks + column / kGptqColumns) * kGptqTileBytes;
  return *reinterpret_cast<const uint2*>(m.codes + at + 16 * lane + column / 32 % 2 * 8);
}

/// The scales and zeros of rows g and g + 8 of a tile in the group of a column.
__device__ uint2 load_scales(const DequantiseCall& c, int tile, int g, int column) {
  const long group = long(tile) * c.matrix.groups + column / c.columns_per_group;
  return *reinterpret_cast<const uint2*>(c.matrix.scales + group * kGptqGroupBytes + 8 * g);
}
__device__ float scale_of(std::uint32_t word) { return to_float(f16{std::uint16_t(word)}); }
__device__ float zero_of(std::uint32_t word) { return to_float(f16{std::uint16_t(word >> 16)}); }

/// Writes every weight as Parts numbers of T that add up to it: a weight has up to 19 bits, and float32 holds
/// what each part leaves of it. A row of the matrix has the smallest parts first. A tensor core cuts off the bits of a
/// sum that float32 has no room for, and a sum that is still small loses little by that. A warp takes a tile, 16 rows
/// and 64 columns of the first plane, with the second plane's codes of the same inputs.
template <class T, int Bits, int Parts>
__global__ void __launch_bounds__(kThreads) dequantise_kernel(const __grid_constant__ DequantiseCall c) {
  let_successor_start();
  wait_for_predecessors();
  const GptqMatrix& m = c.matrix;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tile = blockIdx.x;
  const int chunk = blockIdx.y * kWarps + threadIdx.x / 32, all_columns = m.chunks * kGptqColumns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = chunk * kGptqColumns + half * 32 + t * kVec;
    if (column >= min(c.plane_columns, all_columns) || (!m.order && column >= m.in)) continue;
    const uint2 codes = load_codes(m, tile, lane, column);
    // Columns that the last chunk has no room for have no input.
    const int low_column = column + c.plane_columns;
    const uint2 low_codes = Bits == 8 && low_column < all_columns ? load_codes(m, tile, lane, low_column) : uint2{};
    const uint2 scales = load_scales(c, tile, g, column);
    const uint2 low_scales = Bits == 8 ? load_scales(c, tile, g, low_column) : uint2{};
    int inputs[kVec];
    if (m.order) {
      *reinterpret_cast<int4*>(inputs) = *reinterpret_cast<const int4*>(m.order + column);
      *reinterpret_cast<int4*>(inputs + 4) = *reinterpret_cast<const int4*>(m.order + column + 4);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int r = tile * kGptqRows + g + 8 * side;
      if (r >= m.out) continue;
      const std::uint32_t word = side ? codes.y : codes.x, low_word = side ? low_codes.y : low_codes.x;
      const std::uint32_t scale_word = side ? scales.y : scales.x, low_scale_word = side ? low_scales.y : low_scales.x;
      float rest[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float difference = float(word >> gptq_shift(e) & 15) - zero_of(scale_word);
        if constexpr (Bits == 8) {
          const float low = float(low_word >> gptq_shift(e) & 15) - zero_of(low_scale_word);
          rest[e] = scale_of(low_scale_word) * (16 * difference + low);
        } else {
          rest[e] = scale_of(scale_word) * difference;
        }
      }
      T* const to = static_cast<T*>(c.weight) + long(c.pairs.row(r)) * Parts * m.in;
#pragma unroll
      for (int p = Parts - 1; p >= 0; --p) {
        if (m.order) {
#pragma unroll
          for (int e = 0; e < kVec; ++e)
            if (inputs[e] >= 0) to[long(p) * m.in + inputs[e]] = from_float<T>(rest[e]);
        } else {
          store_vec(to + long(p) * m.in + column, rest);
        }
#pragma unroll
        for (float& v : rest) v -= to_float(from_float<T>(v));
      }
    }
  }
}

template <class T>
auto dequantise_kernel_for(int bits) {
  return bits == 8 ? dequantise_kernel<T, 8, gptq_parts(dtype_of<T>, 8)>
                   : dequantise_kernel<T, 4, gptq_parts(dtype_of<T>, 4)>;
}

/// A block copies a token's activations, `parts` times side by side. They have `vectors` times 16 bytes.
__global__ void __launch_bounds__(kThreads) repeat_kernel(const uint4* x, uint4* to, int vectors, int parts) {
  let_successor_start();
  wait_for_predecessors();
  const long token = blockIdx.x;
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    const uint4 raw = x[token * vectors + v];
    for (int p = 0; p < parts; ++p) to[(token * parts + p) * vectors + v] = raw;
  }
}

/// Finishes float32 sums (tokens, out) with bias, residual and function, and rounds them once.
/// A 16-bit sum in their place would be rounded twice: with u the unit roundoff of 16 bits, GELU makes the first
/// rounding's error up to 1.13 u |v|, and the second adds u |y|. Where v is large and y = v, the error is up to 2.13 u,
/// more than the one u of linear's budget.
/// A thread takes N sums of a token, with gates of N / 2 elements of y.
template <class T, int N, bool Gated>
__global__ void __launch_bounds__(kThreads) finish_kernel(const float* sums, const __grid_constant__ LinearOutput to) {
  let_successor_start();
  wait_for_predecessors();
  const int token = blockIdx.x;
  constexpr int rows_of_output = Gated ? 2 : 1;
  const long rows = to.out * rows_of_output, row = (long(blockIdx.y) * kThreads + threadIdx.x) * N,
             at = token * rows + row;
  if (row >= rows) return;
  if constexpr (N == rows_of_output) {
    if constexpr (Gated)
      finish_gate(to, token, row, sums[at], sums[at + 1], gate_addends(to, row));
    else
      finish(to, token, row, sums[at], addends(to, token, row));
  } else {
    float v[N], added[N];
    load_vec(sums + at, v);
    const auto add = [&](const void* from, DType dtype, long i) {
      if (!from) return;
      load_vec(from, dtype, i, added);
#pragma unroll
      for (int e = 0; e < N; ++e) v[e] += added[e];
    };
    add(to.bias, to.bias_dtype, row);
    if constexpr (Gated) {
      float of_pairs[N / 2];
      apply_gates(v, of_pairs);
      store_few(static_cast<T*>(to.y) + at / 2, of_pairs);
    } else {
      add(to.residual, to.activation, at);
      apply(to.epilogue, v);
      store_vec_whole(static_cast<T*>(to.y) + at, v);
    }
  }
}

/// Adds the launches before the product with a packed weight. The first makes 16-bit matrices, side by side, that add
/// up to the weight: gptq_parts() of them. The second copies x once for each of them, side by side.
template <class T>
Status add_dequantise(const ops::Linear::Args& a, const PackedWeight& packed, const GptqLayout& layout, int parts,
                      void* weight, void* x, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const std::int64_t groups = (d.in + packed.format.group_size - 1) / packed.format.group_size;
  const DequantiseCall c{.matrix = gptq_matrix(packed, layout),
                         .pairs = layout.pairs,
                         .columns_per_group = layout.columns_per_group,
                         .plane_columns = int(groups * layout.columns_per_group),
                         .weight = weight};
  CF_TRY(launch(
      ops::Linear::name, launches,
      {.grid = dim3(unsigned(layout.row_tiles), unsigned((layout.chunks + kWarps - 1) / kWarps)), .block = kThreads},
      dequantise_kernel_for<T>(packed.format.bits), c));
  return launch(ops::Linear::name, launches, {.grid = unsigned(d.tokens), .block = kThreads}, repeat_kernel,
                static_cast<const uint4*>(a.x.data), static_cast<uint4*>(x), int(d.in / kVec), parts);
}

template <class T, bool Gated>
Status add_finish(const ops::Linear::Args& a, const float* sums, LaunchList& launches) {
  constexpr int few = Gated ? 2 : 1;
  const long rows = ops::Linear::dims(a).rows();
  const bool whole = rows % kVec == 0;
  const long block = kThreads * (whole ? kVec : few);
  return launch(ops::Linear::name, launches,
                {.grid = dim3(unsigned(a.y.shape[0]), unsigned((rows + block - 1) / block)), .block = kThreads},
                whole ? finish_kernel<T, kVec, Gated> : finish_kernel<T, few, Gated>, sums, linear_output(a));
}

}  // namespace

Result<bool> add_gemm(const ops::Linear::Args& a, const GemmPlan& plan, LaunchList& launches) {
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  const auto* const packed = std::get_if<PackedWeight>(&a.linear.weight);
  const auto& [parts, has_sums, at] = plan;
  std::byte* const scratch = launches.scratch().data;
  auto* const sums = reinterpret_cast<float*>(scratch + at.sums);
  const Gemm gemm{.tokens = d.tokens,
                  .in = packed ? parts * d.in : d.in,
                  .out = d.rows(),
                  .dtype = dtype,
                  .output = has_sums ? DType::f32 : dtype,
                  .x = packed ? scratch + at.x : a.x.data,
                  .weight = packed ? scratch + at.weight : std::get<DenseWeight>(a.linear.weight).weight.data,
                  .bias = has_sums ? nullptr : a.linear.bias.data,
                  .residual = has_sums ? nullptr : a.residual.data,
                  .y = has_sums ? sums : a.y.data,
                  .workspace = scratch};
  CF_TRY_ASSIGN(LaunchList::Call multiply, make_gemm(gemm, launches.device()));
  if (!multiply) return false;

  launches.use_scratch();
  const auto add = [&](auto zero) -> Status {
    using T = decltype(zero);
    if (packed) {
      CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, *packed));
      CF_TRY(
          add_dequantise<T>(a, *packed, layout, plan.parts, scratch + plan.at.weight, scratch + plan.at.x, launches));
    }
    launches.add_call(ops::Linear::name, std::move(multiply));
    if (!plan.has_sums) return {};
    return a.epilogue == ops::Epilogue::swiglu ? add_finish<T, true>(a, sums, launches)
                                               : add_finish<T, false>(a, sums, launches);
  };
  CF_TRY(dtype == DType::f16 ? add(f16{}) : add(bf16{}));
  return true;
}

}  // namespace cf::cuda
