#include "cuda/ops/linear/packed/decode.cuh"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/wgmma/block.cuh"
#include "cuda/ops/linear/wgmma/wgmma.hpp"
#include "cuda/runtime/launch.hpp"

namespace cf::cuda {
namespace {

struct GptqWgmmaCall {
  WgmmaCall product;
  GptqMatrix matrix;
  RopePairs pairs;
  int halves_a_group;  // half chunks of a group
};

#ifdef CF_HAVE_WGMMA
/// Rows in the order of a packed matrix.
struct PackedOrder {
  static constexpr bool always = false;
  const RopePairs& pairs;
  __device__ bool holds() const { return pairs.head_dim == 0; }
  __device__ int row(int r) const { return pairs.row(r); }
};

/// Codes as 16-bit numbers: a number whose last four bits are free, with a code in them. The difference to the same
/// number with the zero added is code - zero, exactly.
template <class T>
struct CodeBase;
template <>
struct CodeBase<f16> {
  static constexpr std::uint32_t bits = 0x64006400;
  static constexpr float value = 1024;
};
template <>
struct CodeBase<bf16> {
  static constexpr std::uint32_t bits = 0x43004300;
  static constexpr float value = 128;
};

/// A group's scales and zeros of a lane's rows g and g + 8.
template <class T>
struct GroupScales {
  float scale[2];
  std::uint32_t zero[2];  // CodeBase + zero, twice

  __device__ explicit GroupScales(const uint2& words) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 row = unpack(r ? words.y : words.x, f16{});  // scale, zero
      scale[r] = row.x;
      zero[r] = pack_pair<T>(CodeBase<T>::value + row.y, CodeBase<T>::value + row.y);
    }
  }
};

/// A warpgroup's sums of 64 rows for Tokens tokens, over the block's steps. Its operand a is code - zero, in registers.
/// The sums of a group meet their scales where the group ends.
///
/// A lane (g = lane / 4, t = lane % 4) wants of each 16 columns 2t, 2t + 1, 8 + 2t and 9 + 2t in rows g and g + 8. A
/// chunk's bytes 16 (4g + i) .. hold columns 8i .. 8i + 7 of these rows, and 32 + 8i .. (pack/format.hpp). So the four
/// lanes of a row load the same 64 bytes, and each takes its own pair of every word.
template <class T, class Ring, int Tokens>
__device__ void multiply_codes(const GptqWgmmaCall& c, const Ring& ring, const Steps& steps, int first_row,
                               float (&sum)[Tokens / 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, shift = gptq_shift(2 * t);
  const int tile = min(first_row / kGptqRows + warp, c.matrix.tiles - 1);
  const char* const scales = c.matrix.scales + long(tile) * c.matrix.groups * kGptqGroupBytes + g * 8;
  int group = 2 * steps.first / c.halves_a_group, ends_in = (group + 1) * c.halves_a_group - 2 * steps.first;
  const auto load_scales = [&](int of) {
    return *reinterpret_cast<const uint2*>(scales + long(min(of, c.matrix.groups - 1)) * kGptqGroupBytes);
  };
  uint2 next = load_scales(group + 1);
  GroupScales<T> now(load_scales(group));

  float of_group[Tokens / 2];
  bool is_added = false;
  std::uint32_t a[4][4];  // of the chunk's four times 16 columns
  const auto end_group = [&] {
    wgmma_wait<0>();
    keep_in_registers(of_group);
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] = fmaf(now.scale[i / 2 % 2], of_group[i], sum[i]);
    is_added = false;
  };
  RingSlot slot;
#pragma unroll 1
  for (int i = 0; i < steps.count; ++i, slot.next(ring.stages)) {
    wait_barrier(ring.full + slot.stage, slot.parity);
    const uint4* const codes = reinterpret_cast<const uint4*>(ring.a(slot.stage) + warp * kGptqTileBytes) + 4 * g;
    const std::uint64_t b = tile_along_k(ring.b(slot.stage));
    const uint4 words[] = {codes[0], codes[1], codes[2], codes[3]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        std::uint32_t made[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const uint4& of = words[2 * k + e / 2];
          const std::uint32_t word = e % 2 ? (half ? of.w : of.y) : (half ? of.z : of.x);
          made[e] = difference((word >> shift & 0x000f000f) | CodeBase<T>::bits, now.zero[e % 2], T{});
        }
        copy_registers(a[2 * half + k], made);
      }
      if (!is_added) keep_in_registers(of_group);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        wgmma(of_group, a[2 * half + k], b + (2 * half + k) * kWgmmaStep, is_added, T{});
        is_added = true;
      }
      wgmma_commit();
      if (--ends_in == 0) {
        end_group();
        now = GroupScales<T>(next);
        ++group;
        ends_in = c.halves_a_group;
        next = load_scales(group + 1);
      }
    }
    wgmma_wait<0>();  // operand a is made anew, and the stage is empty
#pragma unroll
    for (auto& operand : a) keep_in_registers(operand);
    __syncwarp();  // all lanes have read the codes
    if (lane == 0) arrive(ring.empty + slot.stage);
  }
  if (is_added) end_group();
}
#endif

template <class T, int Tokens, bool Gated>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    linear_wgmma_gptq_kernel([[maybe_unused]] const __grid_constant__ CUtensorMap x,
                             [[maybe_unused]] const __grid_constant__ GptqWgmmaCall c) {
#ifdef CF_HAVE_WGMMA
  if (threadIdx.x == kWgmmaConsumers) prefetch_map(&x);
  using Ring = WgmmaRing<Tokens, 4>;
  static_assert(Ring::a_bytes == kLinearWgmmaWarps * kGptqTileBytes && kLinearWgmmaColumns == kGptqColumns);
  const PackedOrder order{c.pairs};
  multiply_rows<T, Tokens, Gated, Ring>(
      c.product, order,
      [&](const Ring& ring, const Steps& steps, int first_row) {
        // A lane copies a tile. Of tiles that the matrix does not have nothing is finished.
        const int tile = min(first_row / kGptqRows + int(threadIdx.x % 32), c.matrix.tiles - 1);
        const char* const codes = c.matrix.codes + long(tile) * c.matrix.chunks * kGptqTileBytes;
        copy_steps(ring, steps, x, [&](int lane, int step, unsigned char* to, std::uint64_t* full) {
          if (lane < kLinearWgmmaWarps)
            copy_bulk(to + lane * kGptqTileBytes, codes + step * kGptqTileBytes, kGptqTileBytes, full);
        });
      },
      [&](const Ring& ring, const Steps& steps, int first_row, float(&sum)[Tokens / 2]) {
        multiply_codes<T, Ring, Tokens>(c, ring, steps, first_row, sum);
      });
#endif
}

template <class T, bool Gated>
auto kernel_for(int token_tile) {
  return token_tile <= 32 ? linear_wgmma_gptq_kernel<T, 32, Gated> : linear_wgmma_gptq_kernel<T, 64, Gated>;
}

}  // namespace

Status launch_wgmma_packed(const ops::Linear::Args& a, const WgmmaPackedLaunches& plan, LaunchList& launches) {
  const auto& weight = std::get<PackedWeight>(a.linear.weight);
  const auto d = ops::Linear::dims(a);
  const DType dtype = a.x.dtype;
  const bool gated = a.epilogue == ops::Epilogue::swiglu;
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, weight));
  const auto add = [&](auto zero) -> Status {
    using T = decltype(zero);
    for (const auto& l : plan.launches) {
      const T* const x = static_cast<const T*>(a.x.data) + l.first * d.in;
      CUtensorMap map;
      CF_TRY(make_tensor_map({.data = x, .dtype = dtype, .columns = d.in, .rows = l.tokens}, l.plan.token_tile, map));
      GptqWgmmaCall c{.product = wgmma_call(a, l.plan),
                      .matrix = gptq_matrix(weight, layout),
                      .pairs = layout.pairs,
                      .halves_a_group = layout.columns_per_group / 32};
      c.product.tokens = int(l.tokens);
      c.product.output.y = static_cast<T*>(a.y.data) + l.first * d.out;
      if (a.residual) c.product.output.residual = static_cast<const T*>(a.residual.data) + l.first * d.out;
      CF_TRY(launch(ops::Linear::name, launches,
                    {.grid = unsigned(l.plan.row_tiles * l.plan.splits),
                     .block = kWgmmaThreads,
                     .smem_bytes = std::size_t(l.plan.smem_bytes),
                     .cluster_blocks = l.plan.splits},
                    gated ? kernel_for<T, true>(l.plan.token_tile) : kernel_for<T, false>(l.plan.token_tile), map, c));
    }
    return {};
  };
  return dtype == DType::f16 ? add(f16{}) : add(bf16{});
}

}  // namespace cf::cuda
