#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ops/linear.hpp"
#include "cuda/arch.hpp"
#include "cuda/cuda.hpp"

namespace cf::cuda {

inline constexpr int kGptqRows = 16, kGptqColumns = 64, kGptqTileBytes = 512, kGptqMaxChunks = 5;
/// A block's warps: its parts of the columns have `turns` each, which take the tiles in turn.
inline constexpr int kGptqParts = 8;
constexpr int gptq_threads(int turns) { return 32 * kGptqParts * turns; }
/// Linear's blocks have a turn, and an SM two of them: on an H200 the four linears of a Pythia-2.8B layer are faster so
/// than with blocks of two turns that leave a successor's first tiles room to arrive, but compilers half the registers.
inline constexpr int kLinearGptqTurns = 1, kLinearGptqBlocksPerSm = 2;
/// ln_qkv's blocks have two, and an SM one: its tokens are normalised once an SM.
inline constexpr int kLnQkvGptqTurns = 2;

/// GptqTiles as kernels are given them.
struct GptqMatrix {
  const char* codes;
  const char* scales;
  const int* order;  // null: column k is input k
  int in, out, tiles, chunks, groups;
};

inline GptqMatrix gptq_matrix(const GptqTiles& t, std::int64_t in, std::int64_t out) {
  return {.codes = reinterpret_cast<const char*>(t.codes.data),
          .scales = reinterpret_cast<const char*>(t.scales.data),
          .order = t.order.data,
          .in = int(in),
          .out = int(out),
          .tiles = int(t.codes.shape[0]),
          .chunks = int(t.codes.shape[1]),
          .groups = int(t.scales.shape[1])};
}

/// What a plan depends on.
struct GptqSizes {
  int tiles, chunks, halves_a_group;
};

inline GptqSizes gptq_sizes(const GptqTiles& t) {
  return {int(t.codes.shape[0]), int(t.codes.shape[1]), int(t.columns_per_group / 32)};
}

/// How far a warp's copies run ahead of its multiplications.
struct GptqAhead {
  int stages;  // of its ring, at most
  int early;   // of them, those that are asked for before the activations
};

/// An early stage keeps memory busy until the activations come; more keep those waiting, which queue up behind them.
inline constexpr GptqAhead kGptqAhead{.stages = 2, .early = 1};
/// One token's product of many tiles a block gains by a longer ring: it has longer to wait for what runs beside it.
inline constexpr GptqAhead kGptqFarAhead{.stages = 4, .early = 3};
inline constexpr int kGptqManyTiles = 4;

/// How the product of a few tokens with 4-bit tiles is laid out. A block takes `tiles` tiles of 16 outputs; the chunks
/// of 64 columns are dealt to `split` blocks of a cluster and the parts of each. A warp has the copy engine bring its
/// part of its next `stages` tiles into its own ring in shared memory, of the first `early` before x is there. A
/// cluster's first block sums up and finishes its elements, or where they are many each block the next `share` of them.
struct GptqPlan {
  int split, tiles, share, stages, early, stage_bytes;
  int chunks, longer;          // of each part; the first `longer` have one more
  int halves_a_group;          // half chunks
  std::uint32_t halves_magic;  // 2^31 over those, rounded up
  int turns;                   // of a block's warps
  int tokens, token_bits;      // at once; counted to this power of two
  int grid = 0, smem_bytes = 0;
};

/// A part of the columns: chunks [first, first + count) and the groups that they touch.
struct GptqSlice {
  int first, count, first_group, groups;
};

/// The group that a half chunk belongs to.
constexpr int gptq_group(const GptqPlan& p, int half_chunk) {
  return int(std::uint64_t(2 * std::uint32_t(half_chunk)) * p.halves_magic >> 32);
}

constexpr GptqSlice gptq_slice(const GptqPlan& p, int index) {
  GptqSlice s{index * p.chunks + (index < p.longer ? index : p.longer), p.chunks + (index < p.longer), 0, 0};
  s.first_group = gptq_group(p, 2 * s.first);
  s.groups = s.count == 0 ? 0 : gptq_group(p, 2 * (s.first + s.count) - 1) - s.first_group + 1;
  return s;
}

/// Bytes from one token to the next of a part of x: half a line more than whole ones, so that the 64 bytes of one and
/// of the next lie in different banks.
inline constexpr int kGptqTokenBytes = kGptqMaxChunks * kGptqColumns * 2 + 64;

/// Up to this many tokens, a product's columns, a warp holds its part of x in registers. Of more, and where groups end
/// within chunks, it lies in shared memory.
inline constexpr int kGptqRegisterTokens = 8;
constexpr int gptq_x_bytes(const GptqPlan& p) {
  return p.tokens > kGptqRegisterTokens || p.halves_a_group % 2 ? kGptqParts * p.tokens * kGptqTokenBytes : 0;
}

/// The bytes of a block's dynamic shared memory.
constexpr int gptq_smem_bytes(const GptqPlan& p) {
  const int elements = p.tiles * kGptqRows << p.token_bits;
  const int bytes = kGptqParts * p.turns * p.stages * (p.stage_bytes + 8) + gptq_x_bytes(p) +
                    (kGptqParts * elements + (p.split - 1) * p.share) * 4 + 8;
  return (bytes + 15) / 16 * 16;
}

inline constexpr int kGptqMaxSplit = 8, kGptqMaxColumns = kGptqMaxSplit * kGptqParts * kGptqMaxChunks * kGptqColumns;

/// Linear's dynamic shared memory: as much as leaves an SM room for its blocks and no other. Where a successor's find room
/// beside them SMs are shared out unevenly, and the four linears of a layer take longer.
constexpr int linear_gptq_smem_bytes(const Arch& arch, const GptqPlan& p) {
  return std::max(p.smem_bytes, arch.smem_per_sm_bytes / (kLinearGptqBlocksPerSm + 1) / 16 * 16);
}

/// Up to 16 tokens at once, fewer where shared memory is short, of which a block's caller reserves a part. `grid` is 0
/// where the matrix has too many columns or shared memory no room.
constexpr GptqPlan gptq_plan(const Arch& arch, const GptqSizes& m, std::int64_t tokens, int turns, int blocks_per_sm,
                             int reserved_bytes = 0, int reserved_bytes_a_token = 0) {
  GptqPlan p{.split = 1,
             .tiles = 0,
             .share = 0,
             .stages = 0,
             .early = 0,
             .stage_bytes = 0,
             .chunks = 0,
             .longer = 0,
             .halves_a_group = m.halves_a_group,
             .halves_magic = (0x80000000u + std::uint32_t(m.halves_a_group) - 1) / std::uint32_t(m.halves_a_group),
             .turns = turns,
             .tokens = int(std::min<std::int64_t>(tokens, 16)),
             .token_bits = 0};
  while (p.split < kGptqMaxSplit && m.chunks > p.split * kGptqParts * kGptqMaxChunks) p.split *= 2;
  const int parts = p.split * kGptqParts;
  if (m.chunks > parts * kGptqMaxChunks) return p;
  p.chunks = m.chunks / parts;
  p.longer = m.chunks % parts;
  int groups = 0;
  for (int i = 0; i < parts; ++i) groups = std::max(groups, gptq_slice(p, i).groups);
  // One token's product multiplies four chunks of any slice, of shorter ones what lies behind them, by zeros.
  const int stage_chunks = std::max(kGptqMaxChunks - 1, p.chunks + (p.longer > 0));
  p.stage_bytes = (stage_chunks * kGptqTileBytes + groups * kGptqRows * 4 + 127) / 128 * 128;
  // Of clusters of four and eight an H200 holds 62 and 30 where it has room for 66 and 33 times as many blocks.
  const int clusters = blocks_per_sm * arch.sm_count / p.split;
  const int slots = std::max(1, p.split > 2 ? clusters * 10 / 11 : clusters);
  p.tiles = (m.tiles + slots - 1) / slots;
  p.grid = (m.tiles + p.tiles - 1) / p.tiles * p.split;
  for (; p.tokens > 0; p.tokens /= 2) {
    for (p.token_bits = 0; 1 << p.token_bits < p.tokens;) ++p.token_bits;
    // One block finishes up to four elements a thread. More take longer to be sent to it than to be shared out.
    const int runs = p.tiles << p.token_bits;  // of 16 elements
    p.share = kGptqRows * (kGptqRows * runs <= 4 * gptq_threads(turns) ? runs : (runs + p.split - 1) / p.split);
    const bool far = p.tokens == 1 && turns == 1 && p.tiles >= kGptqManyTiles;
    const GptqAhead ahead = far ? kGptqFarAhead : kGptqAhead;
    for (p.stages = std::min((p.tiles + turns - 1) / turns, ahead.stages); p.stages > 0; --p.stages) {
      p.early = std::min(p.stages, ahead.early);
      p.smem_bytes = gptq_smem_bytes(p);
      const int bytes = p.smem_bytes + reserved_bytes + p.tokens * reserved_bytes_a_token;
      // A longer ring must leave an SM room for its blocks.
      if (bytes <= smem_per_block_bytes(arch, p.stages > kGptqAhead.stages ? blocks_per_sm : 1)) return p;
    }
  }
  p.grid = 0;
  return p;
}

/// Calls f with a value of a 16-bit activation's type; anything else is unimplemented.
template <class F>
Status with_gptq_activation(std::string_view op, DType dtype, F&& f) {
  if (dtype == DType::f16) return f(f16{});
  if (dtype == DType::bf16) return f(bf16{});
  return Status::error(Code::unimplemented, std::string(op) +
                                                ": cuda takes float16 or bfloat16 activations with GPTQ weights, got " +
                                                std::string(to_string(dtype)));
}

/// What a kernel is compiled for: at most so many tokens. One token's kernel adds otherwise than the others, which give
/// a token the same bits however many there are: it is for calls of one token, where it is a tenth faster.
enum class GptqTokens { one, eight, sixteen };

/// Kernels::kernel<GptqTokens, HalfChunks> for a plan, of a call of so many tokens.
template <class Kernels>
auto gptq_kernel_for(const GptqPlan& p, const GptqSizes& m, std::int64_t call_tokens) {
  const bool sixteen = p.tokens > kGptqRegisterTokens;
  if (m.halves_a_group % 2)
    return sixteen ? Kernels::template kernel<GptqTokens::sixteen, true>
                   : Kernels::template kernel<GptqTokens::eight, true>;
  if (call_tokens == 1) return Kernels::template kernel<GptqTokens::one, false>;
  return sixteen ? Kernels::template kernel<GptqTokens::sixteen, false>
                 : Kernels::template kernel<GptqTokens::eight, false>;
}

/// linear with tiles in place of a dense weight, its arguments checked.
Status run_gptq(const ops::Linear::Args& args, const GptqTiles& tiles, Context& context);

}  // namespace cf::cuda
