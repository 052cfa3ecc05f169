#pragma once
// How the product of 9 to 128 tokens with a 16-bit weight matrix is laid out for Hopper's tensor cores.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/dtype.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// The most tokens of a launch.
inline constexpr std::int64_t kLinearWgmmaTokens = 128;

/// Why no kernel on Hopper's tensor cores takes a product.
inline constexpr std::string_view kNoWgmma = "needs wgmma";
/// What all kernels for Hopper's tensor cores ask for: 16 bits, and rows whose copies are aligned. Empty where they
/// take the product, else the reason why not.
constexpr std::string_view why_no_wgmma(const Arch& arch, std::int64_t in, std::int64_t out, DType activation) {
  if (!arch.has_wgmma()) return kNoWgmma;
  if (activation != DType::f16 && activation != DType::bf16) return "takes 16-bit activations";
  return in % 8 == 0 && out % 8 == 0 ? "" : "takes rows of a multiple of 8";
}

/// Why a product with a dense weight does not go to Hopper's tensor cores in this way. Empty where it does: more tokens
/// than gemv takes best.
constexpr std::string_view why_no_linear_wgmma(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                                               DType activation) {
  if (tokens <= arch.tuning->gemv_tokens) return "takes more tokens";
  if (tokens > arch.tuning->wgmma_tokens) return "takes fewer tokens";
  return why_no_wgmma(arch, in, out, activation);
}
constexpr bool is_linear_wgmma(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                               DType activation, bool packed) {
  return !packed && why_no_linear_wgmma(arch, tokens, in, out, activation).empty();
}

/// A tile is kLinearWgmmaTileRows rows of the weight, for all tokens. The blocks of a cluster divide the columns of a
/// tile among them, and add up their sums in the cluster's shared memory. A block's ring has `stages` stages; a stage
/// holds kLinearWgmmaColumns columns of the tile's weights and of the activations.
struct LinearWgmmaPlan {
  int token_tile;  // 16, 32, 64 or 128: the tokens, rounded up
  int row_tiles;   // of the weight
  int splits;      // of a tile's columns: the blocks of its cluster
  int stages;
  int smem_bytes;  // of a block
};

inline std::string to_string(const LinearWgmmaPlan& p) {
  return plan_text({{p.row_tiles, "row tiles"},
                    {p.splits, "splits"},
                    {p.token_tile, "tokens a tile"},
                    {p.stages, "stages"},
                    {p.smem_bytes, "B of shared memory"}});
}

inline constexpr int kLinearWgmmaTileRows = 128, kLinearWgmmaColumns = 64, kMostLinearWgmmaStages = 12;
/// Warps of a block that multiply: two warpgroups.
inline constexpr int kLinearWgmmaWarps = 8, kLinearWgmmaWarpRows = kLinearWgmmaTileRows / kLinearWgmmaWarps;

/// Up to this many tokens two blocks of a packed weight's product stand on an SM.
inline constexpr std::int64_t kPackedPairTokens = 32;

constexpr int linear_wgmma_token_tile(std::int64_t tokens) {
  return tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : 128;
}
/// Bytes of a stage's weights, of `bits` bits each, and of the whole stage.
constexpr int linear_wgmma_weight_bytes(int bits) { return kLinearWgmmaTileRows * kLinearWgmmaColumns * bits / 8; }
constexpr int linear_wgmma_stage_bytes(int token_tile, int bits = 16) {
  return linear_wgmma_weight_bytes(bits) + token_tile * kLinearWgmmaColumns * 2;
}
/// The first warp whose rows block `rank` of a cluster finishes; the warps before it are other blocks'.
constexpr int linear_wgmma_first_warp(int splits, int rank) { return (rank * kLinearWgmmaWarps + splits - 1) / splits; }

/// Floats from one token to the next of the sums of a warp's rows, and the bytes of the sums that come together in a
/// block. They lie where the ring was.
inline constexpr int kLinearWgmmaPartPitch = kLinearWgmmaWarpRows + 4;
constexpr int linear_wgmma_parts_bytes(int token_tile, int splits) {
  return (kLinearWgmmaWarps + splits - 1) / splits * splits * token_tile * kLinearWgmmaPartPitch * 4;
}

/// One block an SM at most, or `blocks_an_sm`. Up to 64 tokens an SM has room for a block of the next launch, too: its
/// copies of weights begin while this launch ends. The products of 128 tokens need the longer ring more. All clusters
/// have their SMs at once; the blocks of one lie on SMs of one group of 16 or more. A stage has `weight_bytes` of
/// weights. A split has at least kLeastSteps steps of kLinearWgmmaColumns columns.
constexpr LinearWgmmaPlan linear_wgmma_plan(const Arch& arch, std::int64_t tokens, std::int64_t in, std::int64_t out,
                                            int weight_bytes = linear_wgmma_weight_bytes(16), int blocks_an_sm = 1) {
  constexpr std::int64_t kLeastSteps = 4;
  constexpr int kGroupSms = 16, kMostRingBytes = 6 * linear_wgmma_stage_bytes(128);
  // A stage begins at a multiple of 1024 bytes; beside the ring a block has its barriers.
  constexpr int extra_bytes = 1024, static_bytes = 256;
  const int token_tile = linear_wgmma_token_tile(tokens),
            stage_bytes = weight_bytes + token_tile * kLinearWgmmaColumns * 2;
  const std::int64_t row_tiles = (out + kLinearWgmmaTileRows - 1) / kLinearWgmmaTileRows,
                     steps = (in + kLinearWgmmaColumns - 1) / kLinearWgmmaColumns;
  const int room_bytes = smem_per_block_bytes(arch, token_tile > 64 ? 1 : 2) - extra_bytes - static_bytes;
  const int stages = std::min({kMostLinearWgmmaStages, room_bytes / stage_bytes, kMostRingBytes / stage_bytes});
  const auto fits = [&](std::int64_t splits) {
    return arch.sm_count / kGroupSms * (kGroupSms * blocks_an_sm / splits) >= row_tiles &&
           linear_wgmma_parts_bytes(token_tile, int(splits)) <= stages * stage_bytes;
  };
  std::int64_t splits = std::max<std::int64_t>(
      1, std::min({std::int64_t(arch.max_cluster_blocks), std::int64_t(kLinearWgmmaWarps), steps / kLeastSteps}));
  while (splits > 1 && !fits(splits)) --splits;
  return {.token_tile = token_tile,
          .row_tiles = int(row_tiles),
          .splits = int(splits),
          .stages = stages,
          .smem_bytes = extra_bytes + stages * stage_bytes};
}

/// Both products of LinearSum in one launch. Its rows, tokens, clusters and ring are the second product's; the first
/// one's columns have the splits that its own launch would have, so that the sums have the same order.
struct LinearSumWgmmaPlan {
  LinearWgmmaPlan first, second;
  int smem_bytes;  // of a block
};

inline std::string to_string(const LinearSumWgmmaPlan& p) {
  return plan_text({{p.second.row_tiles, "row tiles"},
                    {p.first.splits, "splits of the first"},
                    {p.second.splits, "of the second"},
                    {p.second.token_tile, "tokens a tile"},
                    {p.second.stages, "stages"},
                    {p.smem_bytes, "B of shared memory"}});
}

/// The blocks of a cluster hold the sums of both products at once: for 64 tokens and more these need more memory than
/// the ring.
constexpr LinearSumWgmmaPlan linear_sum_wgmma_plan(const Arch& arch, std::int64_t tokens, std::int64_t in,
                                                   std::int64_t in2, std::int64_t out) {
  const LinearWgmmaPlan first = linear_wgmma_plan(arch, tokens, in, out),
                        second = linear_wgmma_plan(arch, tokens, in2, out);
  const int parts_bytes = 2 * linear_wgmma_parts_bytes(second.token_tile, second.splits), align_bytes = 1024;
  return {.first = first, .second = second, .smem_bytes = std::max(second.smem_bytes, align_bytes + parts_bytes)};
}

static_assert(kH200Tuning.wgmma_tokens <= kLinearWgmmaTokens);
static_assert(linear_wgmma_parts_bytes(128, 1) <= linear_wgmma_plan(kH200, 128, 64, 128).smem_bytes - 1024);

}  // namespace cf::cuda
