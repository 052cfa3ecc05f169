#pragma once
// Products of packed 4-bit codes on Hopper's tensor cores. Operand a is code - zero, made in registers: both are small
// whole numbers, so every product is that of the exact weight. The sums of a group meet their scale in float32 where
// the group ends.
#include "cuda/device/barrier.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/linear/pack/format.hpp"
#include "cuda/ops/linear/wgmma/ring.cuh"

namespace cf::cuda {

// Other devices' code has no use for what follows.
#ifdef CF_HAVE_WGMMA
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

/// The scales and zeros of rows g and g + 8 of a lane's tile, g = lane / 4.
struct CodeScales {
  const char* first;  // of group 0
  int groups;

  /// Of groups that the matrix does not have it loads those of the last.
  __device__ uint2 load(int group) const {
    return *reinterpret_cast<const uint2*>(first + long(min(group, groups - 1)) * kGptqGroupBytes);
  }
  __device__ static float scale(std::uint32_t word) { return unpack(word, f16{}).x; }
  /// CodeBase and the zero, twice.
  template <class T>
  __device__ static std::uint32_t zero(std::uint32_t word) {
    const float zero = CodeBase<T>::value + unpack(word, f16{}).y;
    return pack_pair<T>(zero, zero);
  }
};

/// Operand a of 32 * Halves columns, from half chunk `half` on, of a warp's tile of codes in shared memory.
///
/// A lane (g = lane / 4, t = lane % 4) wants of each 16 columns 2t, 2t + 1, 8 + 2t and 9 + 2t in rows g and g + 8. A
/// chunk's bytes 16 (4g + i) .. hold columns 8i .. 8i + 7 of these rows, and 32 + 8i .. (pack/format.hpp). So the four
/// lanes of a row load the same bytes, and each takes its own pair of every word.
template <class T, int Halves>
__device__ void make_operand(const unsigned char* codes, int half, const std::uint32_t (&zero)[2],
                             std::uint32_t (&a)[2 * Halves][4]) {
  const int lane = threadIdx.x % 32, shift = gptq_shift(2 * (lane % 4));
  const unsigned char* const row = codes + lane / 4 * 64 + half * 8;
  std::uint32_t words[4][2 * Halves];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Halves == 2)
      *reinterpret_cast<uint4*>(words[i]) = *reinterpret_cast<const uint4*>(row + 16 * i);
    else
      *reinterpret_cast<uint2*>(words[i]) = *reinterpret_cast<const uint2*>(row + 16 * i);
  }
#pragma unroll
  for (int k = 0; k < 2 * Halves; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t word = words[k % 2 * 2 + e / 2][k / 2 * 2 + e % 2];
      a[k][e] = difference((word >> shift & 0x000f000f) | CodeBase<T>::bits, zero[e % 2], T{});
    }
}

/// sum += a warpgroup's products of 64 rows and Tokens tokens, over `count` steps of 64 columns from step `first` on.
/// The steps come in the ring from `slot` on; release(stage) says that the warp is done with a stage. Groups have
/// `halves_a_group` times 32 columns: a multiple of Halves, which are multiplied at once.
///
/// While products run, the operand of the next ones is made. It lies in other registers: those of a product belong to
/// the tensor cores until the product is done.
template <class T, int Tokens, int Halves, class Ring, class Release>
__device__ void multiply_codes(const Ring& ring, RingSlot& slot, int first, int count, const CodeScales& scales,
                               int halves_a_group, Release release, float (&sum)[Tokens / 2]) {
  constexpr int kUnits = 2 / Halves, kProducts = 2 * Halves;  // a step has units, a unit has products of 16 columns
  const int units = count * kUnits, units_a_group = halves_a_group / Halves;
  int group = first * kUnits / units_a_group, ends_in = (group + 1) * units_a_group - first * kUnits;
  uint2 next = scales.load(group);
  float scale[] = {CodeScales::scale(next.x), CodeScales::scale(next.y)};
  std::uint32_t zero[] = {CodeScales::zero<T>(next.x), CodeScales::zero<T>(next.y)};
  next = scales.load(group + 1);

  float of_group[Tokens / 2];
  bool is_added = false;
  const auto end_group = [&] {
    wgmma_wait<0>();
    keep_in_registers(of_group);
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] = fmaf(scale[i / 2 % 2], of_group[i], sum[i]);
  };
  std::uint32_t a[2][kProducts][4];  // of units in turn
  RingSlot of_codes = slot;
  const auto make = [&](int turn, int unit) {
    if (unit == 0) wait_barrier(ring.full + of_codes.stage, of_codes.parity);
    std::uint32_t made[kProducts][4];
    make_operand<T, Halves>(ring.a(of_codes.stage) + threadIdx.x / 32 * kGptqTileBytes, unit, zero, made);
#pragma unroll
    for (int k = 0; k < kProducts; ++k) copy_registers(a[turn][k], made[k]);
    if (unit == kUnits - 1) of_codes.next(ring.stages);
  };
  make(0, 0);

  const std::uint32_t first_b = std::uint32_t(tile_along_k(ring.b(0)));
  int finished = -1;  // a stage whose products are the last but those of one unit
#pragma unroll 1
  for (int i = 0; i < units; i += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int unit = kUnits == 2 ? turn : 0;
      const std::uint32_t b = first_b + slot.stage * (Ring::stage_bytes >> 4) + unit * 2 * std::uint32_t(kWgmmaStep);
      if (!is_added) keep_in_registers(of_group);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kProducts; ++k)
        wgmma(of_group, a[turn][k], tile_along_k_at(b + k * std::uint32_t(kWgmmaStep)), k > 0 || is_added, T{});
      wgmma_commit();
      is_added = true;
      wgmma_wait<1>();  // the other operand's products are done
#pragma unroll
      for (int k = 0; k < kProducts; ++k) keep_in_registers(a[1 - turn][k]);
      if (finished >= 0) release(finished);
      finished = unit == kUnits - 1 ? slot.stage : -1;
      if (unit == kUnits - 1) slot.next(ring.stages);
      if (i + turn + 1 >= units) break;

      const bool ends = --ends_in == 0;
      if (ends) zero[0] = CodeScales::zero<T>(next.x), zero[1] = CodeScales::zero<T>(next.y);
      make(1 - turn, kUnits == 2 ? 1 - unit : 0);
      if (ends) {
        end_group();
        is_added = false;
        scale[0] = CodeScales::scale(next.x), scale[1] = CodeScales::scale(next.y);
        ++group;
        next = scales.load(group + 1);
        ends_in = units_a_group;
      }
    }
  }
  end_group();
  release(finished);
}
#endif

}  // namespace cf::cuda
