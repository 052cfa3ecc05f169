#pragma once
// Products of packed 4-bit codes on Hopper's tensor cores. Operand a is code - zero, made in registers: both are small
// whole numbers, so every product is that of the exact weight. The sums of a group meet their scale in float32 where
// the group ends.
#include "cuda/device/barrier.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "cuda/ops/linear/wgmma/ring.cuh"
#include "cuda/runtime/tensor_map.hpp"

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

/// Of a row's word of scales: the scale, and CodeBase with the zero added, twice.
__device__ inline float scale_of(std::uint32_t word) { return unpack(word, f16{}).x; }
template <class T>
__device__ std::uint32_t zero_of(std::uint32_t word) {
  const float zero = CodeBase<T>::value + unpack(word, f16{}).y;
  return pack_pair<T>(zero, zero);
}

/// a / b, but for the last bit of the rarest.
__device__ inline float ratio(float a, float b) {
  const float inverse = reciprocal_approximate(b), q = a * inverse;
  return fmaf(fmaf(-q, b, a), inverse, q);
}

/// A block's stages in shared memory: weights as kPackedWeightBytes says, and Rows rows of operand b. The copy engine
/// puts a stage's codes down as rows of 128 bytes, four for each tile of 16 rows, and the scales as a row of two groups
/// for each tile.
template <int Rows>
struct PackedRing {
  static constexpr int stage_bytes = kPackedWeightBytes + Rows * kTileRowBytes;
  unsigned char* first;         // at a multiple of 1024 bytes
  std::uint64_t *full, *empty;  // the stages' barriers
  int stages;

  __device__ unsigned char* a(int stage) const { return first + stage * stage_bytes; }
  __device__ unsigned char* scales(int stage) const { return a(stage) + kPackedCodesBytes; }
  __device__ unsigned char* b(int stage) const { return a(stage) + kPackedWeightBytes; }
};

/// Begins the copies of a step of the weights, for the rows from tile `tile` on.
__device__ inline void copy_packed(unsigned char* to, const CUtensorMap& codes, const CUtensorMap& scales,
                                   int halves_a_group, int tile, int step, std::uint64_t* full) {
  constexpr int rows = kGptqTileBytes / kTileRowBytes, group_elements = kGptqGroupBytes / 2;
  copy_tensor_tile(to, &codes, 0, step * rows, tile, full);
  copy_tensor_tile(to + kPackedCodesBytes, &scales, 2 * step / halves_a_group * group_elements, tile, 0, full);
}

/// The words of scales of rows g and g + 8 of a warp's tile, g = lane / 4, in the first or second group of a stage.
__device__ inline uint2 stage_scales(const unsigned char* scales, int group) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  return *reinterpret_cast<const uint2*>(scales + warp * kTileRowBytes + ((4 * group + g / 2) ^ warp) * 16 + g % 2 * 8);
}

/// A lane's part of the codes of 32 * Halves columns of its warp's tile.
///
/// Of each 16 columns a lane (g = lane / 4, t = lane % 4) wants 2t, 2t + 1, 8 + 2t and 9 + 2t in rows g and g + 8. A
/// chunk's bytes 16 (4g + i) .. hold columns 8i .. 8i + 7 of these rows, and 32 + 8i .. (pack/format.hpp). So the four
/// lanes of a row load the same bytes, and each takes its own pair of every word.
template <int Halves>
struct LaneCodes {
  std::uint32_t words[4][2 * Halves];

  /// Loads from half chunk `half` on. In the order in which the copy engine puts a stage's units of 16 bytes down, those
  /// of eight rows lie in 32 different banks.
  __device__ void load(const unsigned char* codes, int half) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const unsigned char* const row =
        codes + warp * kGptqTileBytes + g / 2 * kTileRowBytes + (g ^ warp) % 2 * 64 + half * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned char* const from = row + (i ^ g / 2) * 16;
      if constexpr (Halves == 2)
        *reinterpret_cast<uint4*>(words[i]) = *reinterpret_cast<const uint4*>(from);
      else
        *reinterpret_cast<uint2*>(words[i]) = *reinterpret_cast<const uint2*>(from);
    }
  }

  /// Makes operand a of the k-th 16 columns.
  template <class T>
  __device__ void make_operand(int k, const std::uint32_t (&zero)[2], std::uint32_t (&a)[4]) const {
    const int shift = gptq_shift(2 * (threadIdx.x % 4));
    std::uint32_t made[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::uint32_t word = words[k % 2 * 2 + e / 2][k / 2 * 2 + e % 2];
      made[e] = difference(and_or(word >> shift, 0x000f000f, CodeBase<T>::bits), zero[e % 2], T{});
    }
    copy_registers(a, made);
  }
};

/// sum += a warpgroup's products of 64 rows and Tokens tokens, over `count` steps of 64 columns from step `first` on.
/// The steps come in the ring from `slot` on; release(stage) says that the warp is done with a stage. Groups have
/// `halves_a_group` times 32 columns: a multiple of Halves, which are a unit. The ring has Stages stages.
///
/// With InOne the products of all groups are added to the sums themselves, which leaves registers for twice as many
/// tokens. The sums are in units of the group's scale: where a group ends, they are multiplied by its scale over that of
/// the next. No scale is 0.
///
/// While the products of a unit run, the operands of the next one are made, and the codes of the next but one loaded. A
/// product whose operand a is in registers holds up its warp until the product before it is done. So half of the
/// operands are made between two halves of the products.
template <class T, int Tokens, int Halves, int Stages, bool InOne = false, class Release>
__device__ void multiply_codes(const PackedRing<Tokens>& ring, RingSlot& slot, int first, int count, int halves_a_group,
                               Release release, float (&sum)[Tokens / 2]) {
  constexpr int kUnits = 2 / Halves, kProducts = 2 * Halves;  // a step has units, a unit has products of 16 columns
  const int units = count * kUnits, units_a_group = halves_a_group / Halves;
  int left = units_a_group - first * kUnits % units_a_group;  // units of the group, from the next products on

  LaneCodes<Halves> codes;    // of the unit behind the one whose operands are made
  uint2 scales, next_scales;  // of the group of the last operands, and of these codes
  RingSlot of_codes = slot;
  const auto load = [&](int unit, bool begins) {  // begins: the unit begins a group
    if (unit == 0) wait_barrier(ring.full + of_codes.stage, of_codes.parity);
    next_scales = stage_scales(ring.scales(of_codes.stage), unit == 1 && begins);
    codes.load(ring.a(of_codes.stage), unit);
    if (unit == kUnits - 1) of_codes.next(Stages);
  };
  std::uint32_t a[2][kProducts][4];  // of units in turn
  const auto make = [&](int turn, int k) {
    const std::uint32_t zero[] = {zero_of<T>(next_scales.x), zero_of<T>(next_scales.y)};
    codes.template make_operand<T>(k, zero, a[turn][k]);
  };
  load(0, false);
#pragma unroll
  for (int k = 0; k < kProducts; ++k) make(0, k);
  scales = next_scales;
  float scale[] = {scale_of(scales.x), scale_of(scales.y)};
  if (units > 1) load(kUnits - 1, left == 1);

  float apart[Tokens / 2];
  float(&of_group)[Tokens / 2] = InOne ? sum : apart;
  bool is_added = InOne;
  const auto add_group = [&] {
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] = fmaf(scale[i / 2 % 2], of_group[i], sum[i]);
  };
  const auto scale_sums = [&](const float(&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] *= factor[i / 2 % 2];
  };
  const std::uint32_t first_b = std::uint32_t(tile_along_k(ring.b(0)));
  int finished = -1;  // a stage whose products are the last but those of one unit
#pragma unroll 1
  for (int i = 0; i < units; i += 2) {
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int unit = kUnits == 2 ? turn : 0;
      const std::uint32_t b = first_b + slot.stage * (ring.stage_bytes >> 4) + unit * 2 * std::uint32_t(kWgmmaStep);
      const bool has_next = i + turn + 1 < units, has_next_but_one = i + turn + 2 < units;
      const auto multiply = [&](int k) {
        wgmma(of_group, a[turn][k], tile_along_k_at(b + k * std::uint32_t(kWgmmaStep)), InOne || k > 0 || is_added,
              T{});
      };
      if (InOne || !is_added) keep_in_registers(of_group);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kProducts / 2; ++k) multiply(k);
      wgmma_commit();
      wgmma_wait<1>();  // the other operands' products are done
#pragma unroll
      for (int k = 0; k < kProducts; ++k) keep_in_registers(a[1 - turn][k]);
      if (finished >= 0) release(finished);
      if (has_next)
#pragma unroll
        for (int k = 0; k < kProducts / 2; ++k) make(1 - turn, k);
      wgmma_fence();
#pragma unroll
      for (int k = kProducts / 2; k < kProducts; ++k) multiply(k);
      wgmma_commit();
      is_added = true;
      finished = unit == kUnits - 1 ? slot.stage : -1;
      if (unit == kUnits - 1) slot.next(Stages);

      const bool ends = --left == 0;
      if (ends) left = units_a_group;
      if (has_next) {
#pragma unroll
        for (int k = kProducts / 2; k < kProducts; ++k) make(1 - turn, k);
        scales = next_scales;
        if (has_next_but_one) load(unit, left == 1);
      }
      if (ends) {
        const float next[] = {scale_of(scales.x), scale_of(scales.y)};
        const float factor[] = {ratio(scale[0], next[0]), ratio(scale[1], next[1])};
        wgmma_wait<0>();
        keep_in_registers(of_group);
        if constexpr (InOne) {
          if (has_next) scale_sums(factor);
        } else {
          add_group();
          is_added = false;
        }
        if (!InOne || has_next) scale[0] = next[0], scale[1] = next[1];
      }
      if (!has_next) break;
    }
  }
  wgmma_wait<0>();
  keep_in_registers(of_group);
  if constexpr (InOne)
    scale_sums(scale);
  else if (is_added)
    add_group();
  release(finished);
}
#endif

}  // namespace cf::cuda
