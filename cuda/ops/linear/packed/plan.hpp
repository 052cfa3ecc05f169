#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/ops/linear.hpp"
#include "cuda/ops/linear/pack/pack.hpp"
#include "cuda/ops/run.hpp"
#include "cuda/ops/token_launches.hpp"
#include "cuda/runtime/arch.hpp"
#include "cuda/runtime/plan_text.hpp"

namespace cf::cuda {

/// A block divides its columns into this many parts, of up to kGptqMaxChunks chunks of 64 columns. One token's slice of
/// x takes fewer registers, so that its parts may have kGptqOneTokenChunks; those of 16 and 32 tokens take more and have
/// kGptqWideChunks or, where all parts of a matrix have so many, kGptqQuad.
inline constexpr int kGptqParts = 8, kGptqMaxChunks = 5, kGptqOneTokenChunks = 8, kGptqWideChunks = 3, kGptqQuad = 4;
/// A part has `turns` warps, which take the block's tiles in turn.
constexpr int gptq_threads(int turns) { return 32 * kGptqParts * turns; }
/// linear has one warp a part and two blocks an SM.
inline constexpr int kLinearGptqTurns = kCompiledTuning.packed_turns, kLinearGptqBlocksPerSm = 2;
/// ln_qkv has two warps a part and one block an SM, so that an SM normalises the tokens once.
inline constexpr int kLnQkvGptqTurns = 2;

/// A packed matrix, as it is passed to kernels.
struct GptqMatrix {
  const char* codes;
  const char* scales;
  const int* order;  // the input of each column, or null: column k is input k
  int in, out, tiles, chunks, groups;
};

inline GptqMatrix gptq_matrix(const PackedWeight& w, const GptqLayout& layout) {
  return {.codes = reinterpret_cast<const char*>(layout.codes(w)),
          .scales = reinterpret_cast<const char*>(layout.scales(w)),
          .order = layout.order(w),
          .in = int(w.in),
          .out = int(w.out),
          .tiles = layout.row_tiles,
          .chunks = layout.chunks,
          .groups = layout.groups};
}

/// A warp holds its part of x in registers for up to this many tokens, the columns of a product; in the wide kernel for
/// up to kGptqWideTokens, two blocks an SM, or kGptqWidestTokens, one block an SM. Where a group can end in the middle of
/// a chunk, x lies in shared memory, once for each part, for up to kGptqWideTokens.
inline constexpr int kGptqRegisterTokens = 8, kGptqWideTokens = 16, kGptqWidestTokens = 32;
/// The most tiles of a cluster of the wide kernel: an SM has room for the sums of its blocks. More clusters than the
/// device holds take their turn.
inline constexpr int kGptqWideTiles = 8, kGptqWidestTiles = 10;

/// The blocks of an SM in a launch of linear. Up to kGptqWidestTokens tokens take twice the registers.
constexpr int linear_gptq_blocks_per_sm(bool wide, std::int64_t tokens) {
  return wide && tokens > kGptqWideTokens ? 1 : kLinearGptqBlocksPerSm;
}

/// What a plan depends on: the sizes of a matrix, whose groups have halves_a_group half chunks of 32 columns, and
/// whether the kernel of one token or the wide one multiplies it. Both take groups of whole chunks, and calls of one
/// token and of more than kGptqRegisterTokens. A matrix is in quads where the blocks' parts can all be kGptqQuad whole
/// chunks of inputs in their order, each pair of them in one group.
struct GptqSizes {
  int tiles, chunks, halves_a_group;
  bool one_token = false, in_quads = false, wide = false;
};

inline GptqSizes gptq_sizes(const GptqLayout& layout, std::int64_t call_tokens) {
  const int halves = layout.columns_per_group / 32;
  return {.tiles = layout.row_tiles,
          .chunks = layout.chunks,
          .halves_a_group = halves,
          .one_token = call_tokens == 1 && halves % 2 == 0,
          .in_quads = !layout.has_order && layout.inputs % kGptqColumns == 0 &&
                      layout.chunks % (kGptqParts * kGptqQuad) == 0 && halves % 4 == 0};
}

/// One token's product has columns for four groups of a slice, and a slice's fifth group must be its last chunk.
inline constexpr int kGptqOneTokenGroups = 4;
/// The number of blocks that divide a tile's columns if a part has up to `most_chunks` chunks: a power of two.
constexpr int gptq_split(int chunks, int most_chunks) {
  int split = 1;
  while (chunks > split * kGptqParts * most_chunks) split *= 2;
  return split;
}
/// The most chunks that a part may have. One token's are kGptqOneTokenChunks for long parts, kGptqMaxChunks for short
/// ones. A cluster of long parts has fewer blocks, and fewer sums are scaled and added up. Parts stay short
/// - where a group is one chunk: a long part would touch more groups than there are product columns for;
/// - where short parts already give every tile a cluster of its own, all resident at once;
/// - where a block's shared memory has no room for long parts beside ln_qkv's tokens.
constexpr int gptq_most_chunks(const Arch& arch, const GptqSizes& m) {
  if (m.wide) return m.in_quads ? kGptqQuad : kGptqWideChunks;
  const bool has_room = arch.smem_per_block_bytes > 128 << 10;
  const bool is_small = m.tiles * gptq_split(m.chunks, kGptqMaxChunks) <= kLinearGptqBlocksPerSm * arch.sm_count;
  return m.one_token && m.halves_a_group > 2 && has_room && !is_small ? kGptqOneTokenChunks : kGptqMaxChunks;
}
static_assert(kGptqMaxChunks == kGptqOneTokenGroups + 1);

/// How a GEMV with a packed 4-bit matrix is laid out. A cluster of `split` blocks takes up to
/// `tiles` tiles of 16 rows: gptq_tiles(). The chunks of 64 columns are divided among the parts of the cluster's
/// blocks. A warp's ring in shared memory has `stages` stages for the codes and scales of its part of its next tiles.
/// The cluster's first block sums up and finishes all elements. Where the elements are many, block r finishes
/// `block_elements` of them, from r * block_elements on.
struct GptqPlan {
  int split, tiles, block_elements, stages;
  int full;   // the first `full` clusters take `tiles` tiles, the others one less
  int early;  // stages that are asked for before the activations are there
  int stage_bytes;
  int chunks, longer;          // a part has `chunks` chunks, the first `longer` parts one more
  int halves_a_group;          // half chunks of a group
  std::uint32_t halves_magic;  // 2^31 / halves_a_group, rounded up
  int digit_bytes;             // of a warp's slice of one token's x; 0 where another kernel multiplies
  int turns;                   // warps of a part
  bool wide = false;           // the wide kernel multiplies
  int tokens, token_bits;      // of a launch; 1 << token_bits is the smallest power of two not below tokens
  int grid = 0, smem_bytes = 0;
  int first_rank = 0;  // the cluster's first block that takes this matrix: LinearSum has two matrices
};

inline std::string to_string(const GptqPlan& p) {
  return plan_text({{p.tokens, "tokens a launch"},
                    {p.grid, "blocks"},
                    {p.split, "splits"},
                    {p.tiles, "tiles a cluster"},
                    {p.chunks + (p.longer > 0), "chunks a part"},
                    {p.stages, "stages"},
                    {p.early, "of them early"},
                    {p.smem_bytes, "B of shared memory"}});
}

/// A cluster's tiles: [first, first + count).
struct GptqTiles {
  int first, count;
};

/// The tiles of cluster `cluster`. The matrix ends within the last cluster's tiles.
constexpr GptqTiles gptq_tiles(const GptqPlan& p, int tiles_of_matrix, int cluster) {
  const int behind = cluster > p.full ? cluster - p.full : 0, first = cluster * p.tiles - behind;
  const int most = p.tiles - (cluster >= p.full), left = tiles_of_matrix - first;
  return {first, most < left ? most : left};
}

/// A part's columns: chunks [first, first + count) and the groups that they touch.
struct GptqSlice {
  int first, count, first_group, groups;
};

/// The most chunks of a part's slice.
constexpr int gptq_slice_chunks(const GptqPlan& p) { return p.chunks + (p.longer > 0); }

/// The group of a half chunk: half_chunk / halves_a_group.
constexpr int gptq_group(const GptqPlan& p, int half_chunk) {
  return int(std::uint64_t(2 * std::uint32_t(half_chunk)) * p.halves_magic >> 32);
}

/// The part of all parts of a cluster that part `part` of its block `rank` is. With 16 tokens neighbouring parts are
/// different blocks', so that the longer parts are all blocks' alike.
constexpr int gptq_part(const GptqPlan& p, int rank, int part) {
  return p.wide ? part * p.split + rank : (rank - p.first_rank) * kGptqParts + part;
}

/// The columns of part `index` of all parts of a cluster.
constexpr GptqSlice gptq_slice(const GptqPlan& p, int index) {
  GptqSlice s{index * p.chunks + (index < p.longer ? index : p.longer), p.chunks + (index < p.longer), 0, 0};
  s.first_group = gptq_group(p, 2 * s.first);
  s.groups = s.count == 0 ? 0 : gptq_group(p, 2 * (s.first + s.count) - 1) - s.first_group + 1;
  return s;
}

/// The token of product column n among an octet of tokens. In this order eight lanes, those of two columns, can load a
/// whole line of one of tokens 0 to 3 from device memory, then of one of tokens 4 to 7, and exchange halves.
constexpr int gptq_token_of_column(int n) { return n / 2 + n % 2 * 4; }

/// Bytes from one token to the next of a part of x in shared memory. Four tokens take some whole lines of 128 bytes and
/// half a line, so that eight lanes, those of two columns, load 16 bytes each from different banks.
inline constexpr int kGptqTokenBytes = kGptqMaxChunks * kGptqColumns * 2 + 16;

/// Bytes of a chunk's digits, two for each column.
inline constexpr int kGptqDigitBytes = 2 * kGptqColumns;

constexpr bool gptq_x_in_registers(const GptqPlan& p) { return p.halves_a_group % 2 == 0; }
/// Bytes of x in a block's shared memory. The lanes of a warp exchange one token's digits there.
constexpr int gptq_x_bytes(const GptqPlan& p) {
  if (p.digit_bytes) return kGptqParts * p.turns * p.digit_bytes;
  return gptq_x_in_registers(p) ? 0 : kGptqParts * p.tokens * kGptqTokenBytes;
}

/// The bytes of a block's dynamic shared memory.
constexpr int gptq_smem_bytes(const GptqPlan& p) {
  const int elements = p.tiles * kGptqRows << p.token_bits;
  const int bytes = kGptqParts * p.turns * p.stages * (p.stage_bytes + 8) + gptq_x_bytes(p) +
                    (kGptqParts * elements + (p.split - 1) * p.block_elements) * 4 + 8;
  return (bytes + 15) / 16 * 16;
}

inline constexpr int kGptqMaxSplit = 8, kGptqMaxColumns = kGptqMaxSplit * kGptqParts * kGptqMaxChunks * kGptqColumns;

/// The dynamic shared memory of linear's blocks: so much that an SM has room for kLinearGptqBlocksPerSm of them and no
/// further block. Where blocks of the next kernel found room beside them, SMs would get unequal shares of the work, and
/// the four linears of a layer would take longer. With LaunchMode::leaves_room linear takes the plan's own bytes alone.
constexpr int linear_gptq_smem_bytes(const Arch& arch, const GptqPlan& p) {
  return std::max(p.smem_bytes, arch.smem_per_sm_bytes / (kLinearGptqBlocksPerSm + 1) / 16 * 16);
}

/// Shared memory that a kernel needs beside its plan's own.
struct GptqReserved {
  int bytes = 0, bytes_a_token = 0;
};

/// The clusters of `split` blocks that the device holds at once.
constexpr int gptq_resident_clusters(const Arch& arch, int split, int blocks_per_sm) {
  const int clusters = blocks_per_sm * arch.sm_count / split;
  return std::max(1, split > 2 ? clusters * arch.tuning->packed_clusters_elevenths / 11 : clusters);
}

/// Deals `tiles` tiles to the clusters of p.split blocks, for p.tokens tokens or fewer where shared memory is short.
/// The grid is 0 where it has no room for one token. `ahead_of_many` is for one token and many tiles.
constexpr void deal_gptq_tiles(const Arch& arch, int tiles, int blocks_per_sm, const GptqReserved& reserved,
                               const GptqAhead& ahead_of_many, GptqPlan& p) {
  const int slots = gptq_resident_clusters(arch, p.split, blocks_per_sm);
  const int most_tiles = p.tokens > kGptqWideTokens ? kGptqWidestTiles : kGptqWideTiles;
  const int rounds = p.wide ? (tiles - 1) / (slots * most_tiles) + 1 : 1;
  p.tiles = (tiles + slots * rounds - 1) / (slots * rounds);
  p.full = (tiles + p.tiles - 1) / p.tiles;
  p.grid = p.full * p.split;
  for (; p.tokens > 0; p.tokens /= 2) {
    for (p.token_bits = 0; 1 << p.token_bits < p.tokens;) ++p.token_bits;
    // One block finishes up to four elements a thread. With more elements it is faster if the cluster's blocks divide
    // them.
    const int runs = p.tiles << p.token_bits;  // of 16 elements
    p.block_elements =
        kGptqRows * (kGptqRows * runs <= 4 * gptq_threads(p.turns) ? runs : (runs + p.split - 1) / p.split);
    const bool many = p.tokens == 1 && p.turns == 1 && p.tiles >= ahead_of_many.many_tiles;
    const GptqAhead &few = arch.tuning->packed_ahead, &ahead = many ? ahead_of_many : few;
    for (p.stages = std::min((p.tiles + p.turns - 1) / p.turns, ahead.stages); p.stages > 0; --p.stages) {
      p.early = std::min(p.stages, ahead.early);
      p.smem_bytes = gptq_smem_bytes(p);
      const int bytes = p.smem_bytes + reserved.bytes + p.tokens * reserved.bytes_a_token;
      // Where the ring is longer than that of few tiles, an SM must still have room for all of its blocks.
      if (bytes <= smem_per_block_bytes(arch, p.stages > few.stages ? blocks_per_sm : 1)) return;
    }
  }
  p.grid = 0;
}

/// The most tokens of a launch.
constexpr int gptq_most_tokens(const GptqSizes& m) {
  if (m.wide) return kGptqWidestTokens;
  return m.halves_a_group % 2 ? kGptqWideTokens : kGptqRegisterTokens;
}

/// The plan of one launch for up to gptq_most_tokens() tokens, or for fewer where shared memory is short. `grid` is 0
/// where there is no such launch: the matrix has more than kGptqMaxColumns columns, or one token does not fit into
/// shared memory.
constexpr GptqPlan gptq_plan(const Arch& arch, const GptqSizes& m, std::int64_t tokens, int turns, int blocks_per_sm,
                             const GptqReserved& reserved, const GptqAhead& ahead_of_many) {
  GptqPlan p{.split = 1,
             .tiles = 0,
             .block_elements = 0,
             .stages = 0,
             .full = 0,
             .early = 0,
             .stage_bytes = 0,
             .chunks = 0,
             .longer = 0,
             .halves_a_group = m.halves_a_group,
             .halves_magic = (0x80000000u + std::uint32_t(m.halves_a_group) - 1) / std::uint32_t(m.halves_a_group),
             .digit_bytes = 0,
             .turns = turns,
             .wide = m.wide,
             .tokens = int(std::min<std::int64_t>(tokens, gptq_most_tokens(m))),
             .token_bits = 0};
  if (m.chunks * kGptqColumns > kGptqMaxColumns) return p;
  const int most_chunks = gptq_most_chunks(arch, m);
  p.split = m.wide && m.in_quads ? m.chunks / (kGptqParts * kGptqQuad) : gptq_split(m.chunks, most_chunks);
  const int parts = p.split * kGptqParts;
  p.chunks = m.chunks / parts;
  p.longer = m.chunks % parts;
  int groups = 0;
  for (int i = 0; i < parts; ++i) groups = std::max(groups, gptq_slice(p, i).groups);
  // One token's product reads four chunks of every slice. Those that a shorter slice lacks are multiplied by zeros.
  const int stage_chunks = std::max(kGptqOneTokenGroups, gptq_slice_chunks(p));
  if (m.one_token) p.digit_bytes = stage_chunks * kGptqDigitBytes;
  p.stage_bytes = (stage_chunks * kGptqTileBytes + groups * kGptqRows * 4 + 127) / 128 * 128;
  deal_gptq_tiles(arch, m.tiles, blocks_per_sm, reserved, ahead_of_many, p);
  return p;
}

constexpr GptqPlan gptq_plan(const Arch& arch, const GptqSizes& m, std::int64_t tokens, int turns, int blocks_per_sm,
                             const GptqReserved& reserved = {}) {
  return gptq_plan(arch, m, tokens, turns, blocks_per_sm, reserved, arch.tuning->packed_ahead_of_many);
}

/// Gives a plan without clusters as many blocks as the device holds at once. Their numbers of tiles differ by one at
/// most. For LaunchMode::shares_sms.
constexpr void fill_device(const Arch& arch, int tiles, int blocks_per_sm, GptqPlan& p) {
  if (p.split > 1) return;
  p.grid = std::min(tiles, blocks_per_sm * arch.sm_count);
  p.full = tiles - (p.tiles - 1) * p.grid;
}

/// The plans of LinearSum's two products, which one launch makes. A cluster's first block takes the columns of the
/// first matrix, the others those of the second. The first block finishes all elements.
struct GptqSumPlan {
  GptqPlan first, second;
};

inline std::string to_string(const GptqSumPlan& p) {
  return "first: " + to_string(p.first) + "; second: " + to_string(p.second);
}

/// The plans for up to kGptqRegisterTokens tokens. The grids are 0 where one launch cannot make both products: the
/// matrices differ in their rows, the first has too many columns for one block or the second for the cluster's others,
/// a group ends in the middle of a chunk, or one block cannot finish all elements.
constexpr GptqSumPlan gptq_sum_plan(const Arch& arch, const GptqSizes& first, const GptqSizes& second,
                                    std::int64_t tokens) {
  const auto plan = [&](const GptqSizes& m) {
    return gptq_plan(arch, m, tokens, kLinearGptqTurns, kLinearGptqBlocksPerSm);
  };
  GptqSumPlan p{plan(first), plan(second)};
  const bool fits = p.first.grid > 0 && p.second.grid > 0 && first.tiles == second.tiles && p.first.split == 1 &&
                    p.second.split < kGptqMaxSplit && tokens <= kGptqRegisterTokens && first.halves_a_group % 2 == 0 &&
                    second.halves_a_group % 2 == 0 && first.one_token == second.one_token;
  GptqPlan both = p.second;
  if (fits) {
    both.split += p.first.split;
    both.tokens = int(tokens);
    both.stage_bytes = std::max(p.first.stage_bytes, p.second.stage_bytes);
    both.digit_bytes = std::max(p.first.digit_bytes, p.second.digit_bytes);
    deal_gptq_tiles(arch, first.tiles, kLinearGptqBlocksPerSm, {}, arch.tuning->packed_ahead_of_sum, both);
  }
  if (!fits || both.tokens < tokens || both.block_elements < both.tiles * kGptqRows << both.token_bits) both.grid = 0;
  both.first_rank = 1;
  GptqPlan of_first = both;
  of_first.chunks = p.first.chunks;
  of_first.longer = p.first.longer;
  of_first.halves_a_group = p.first.halves_a_group;
  of_first.halves_magic = p.first.halves_magic;
  of_first.first_rank = 0;
  return {of_first, both};
}

/// Calls f with a value of the type of a 16-bit activation. Any other dtype is unimplemented.
template <class F>
Status with_gptq_activation(std::string_view op, DType dtype, F&& f) {
  if (dtype == DType::f16) return f(f16{});
  if (dtype == DType::bf16) return f(bf16{});
  return Status::error(Code::unimplemented, std::string(op) +
                                                ": cuda takes float16 or bfloat16 activations with GPTQ weights, got " +
                                                std::string(to_string(dtype)));
}

/// Refuses what with_gptq_activation() refuses.
inline Status check_gptq_activation(std::string_view op, DType dtype) {
  return with_gptq_activation(op, dtype, [](auto) { return Status(); });
}

/// The most tokens that a kernel takes. Each gives a token the same bits however many tokens there are. The kernel of
/// one multiplies activations as digits. Calls of one token take it, because it is faster.
enum class GptqTokens { one = 1, eight = 8, sixteen = 16, thirty_two = 32 };

/// Chooses a Kernels::kernel<GptqTokens, HalfChunks, Chunks> for a plan. Chunks is the most that a slice may have. The
/// kernels for slices of up to kGptqMaxChunks need fewer registers.
template <class Kernels>
auto gptq_kernel_for(const GptqPlan& p, const GptqSizes& m) {
  if (m.halves_a_group % 2)
    return p.tokens > kGptqRegisterTokens ? Kernels::template kernel<GptqTokens::sixteen, true>
                                          : Kernels::template kernel<GptqTokens::eight, true>;
  if (p.digit_bytes)
    return gptq_slice_chunks(p) > kGptqMaxChunks ? Kernels::template kernel<GptqTokens::one, false, kGptqOneTokenChunks>
                                                 : Kernels::template kernel<GptqTokens::one, false>;
  return Kernels::template kernel<GptqTokens::eight, false>;
}

/// Whether a call is plain: `rows` consecutive rows can be finished at once. The rows are packed in the order of
/// `pairs`, their number is a multiple of `rows`, and a bias has y's dtype.
inline bool gptq_is_plain(const ops::Linear::Args& a, const GptqLayout& layout, const RopePairs& pairs, int rows) {
  return layout.pairs == pairs && ops::Linear::dims(a).rows() % rows == 0 &&
         (!a.linear.bias || a.linear.bias.dtype == a.y.dtype);
}

/// The refusal of a GPTQ weight that nobody packed.
inline Status unpacked_gptq(std::string_view op) {
  return Status::error(Code::unimplemented, std::string(op) + ": cuda takes GPTQ weights packed by " +
                                                std::string(kCudaPacker) + ", got one as checkpoints store it");
}

using PackedLaunches = TokenLaunches<GptqPlan>;

/// Whether linear takes the wide kernel, which reads the weights once for 16 tokens or for 32. Both give a row the same
/// bits. All launches of a call take it, so that a row's bits do not depend on which launch has it. The kernel is compiled
/// for Hopper alone.
constexpr bool gptq_is_wide(const Arch& arch, const GptqSizes& m, std::int64_t call_tokens) {
  return call_tokens > kGptqRegisterTokens && m.halves_a_group % 2 == 0 && arch.has_wgmma() &&
         !arch.tuning->is_invariant() &&
         m.chunks <= kGptqMaxSplit * kGptqParts * (m.in_quads ? kGptqQuad : kGptqWideChunks);
}
static_assert(kH200Tuning.class_of(kGptqRegisterTokens).last == kGptqRegisterTokens);

/// The most tokens of a launch of the wide kernel. A launch of kGptqWidestTokens has one block an SM. It is slow where
/// clusters take their turn, and where they are of more than four blocks, of which an SM's neighbours hold few.
constexpr int gptq_wide_launch_tokens(const Arch& arch, GptqSizes m) {
  constexpr int most_split = 4;
  m.wide = true;
  const int blocks_per_sm = linear_gptq_blocks_per_sm(true, kGptqWidestTokens);
  const GptqPlan p = gptq_plan(arch, m, kGptqWidestTokens, kLinearGptqTurns, blocks_per_sm);
  const bool in_one_round = p.grid > 0 && p.full <= gptq_resident_clusters(arch, p.split, blocks_per_sm);
  return in_one_round && p.split <= most_split && p.tokens == kGptqWidestTokens ? kGptqWidestTokens : kGptqWideTokens;
}

/// Whether the wide kernel takes a call that wgmma takes, too: few tokens, in one launch, and parts of three or four
/// chunks. Shorter parts are more, and so are the sums to add up.
constexpr bool gptq_wide_comes_first(const Arch& arch, const GptqSizes& m, std::int64_t call_tokens) {
  const int parts = kGptqParts * gptq_split(m.chunks, kGptqWideChunks);
  return call_tokens <= arch.tuning->packed_wide_tokens && gptq_is_wide(arch, m, call_tokens) &&
         gptq_wide_launch_tokens(arch, m) == kGptqWidestTokens &&
         (m.in_quads || (m.chunks + parts - 1) / parts == kGptqWideChunks);
}

/// Calls f(first, plan) for every launch of linear's own kernels with a packed GPTQ weight, which takes tokens [first,
/// first + plan.tokens), and stops at the first Status that is not ok. Refuses a weight of too many columns.
template <class F>
Status for_each_gptq_launch(const Arch& arch, GptqSizes sizes, std::int64_t tokens, F&& f) {
  sizes.wide = gptq_is_wide(arch, sizes, tokens);
  const std::int64_t most = sizes.wide ? gptq_wide_launch_tokens(arch, sizes) : gptq_most_tokens(sizes);
  for (std::int64_t first = 0; first < tokens;) {
    const std::int64_t left = std::min(tokens - first, most);
    const GptqPlan plan = gptq_plan(arch, sizes, left, kLinearGptqTurns, linear_gptq_blocks_per_sm(sizes.wide, left));
    if (plan.grid == 0)
      return Status::error(Code::unimplemented, "linear: cuda takes GPTQ weights of up to " +
                                                    std::to_string(kGptqMaxColumns) + " columns, got " +
                                                    std::to_string(kGptqColumns * sizes.chunks));
    CF_TRY(f(first, plan));
    first += plan.tokens;
  }
  return {};
}

}  // namespace cf::cuda
