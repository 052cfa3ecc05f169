#include "cuda/persistent/plan.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/contract.hpp"
#include "cuda/persistent/deal.hpp"
#include "cuda/persistent/layout.hpp"
#include "cuda/persistent/phases.hpp"

namespace cf::cuda {
namespace {

/// The fewest stages of the largest size that the ring has room for.
constexpr int kMinStages = 3;
/// The most shared memory that a head's gathered partial results take: of a lone head, and of one of a GQA tile, which
/// has more blocks to fill.
constexpr int kMaxGatheredBytes = 8 << 10, kMaxGqaGatheredBytes = 17 << 10;

Status refuse(std::string what) {
  return Status::error(Code::unimplemented, std::string(kPersistentName) + ": cuda takes " + what);
}
Status bad(std::string what) { return bad_argument(kPersistentName, std::move(what)); }
std::string text(std::int64_t n) { return std::to_string(n); }

Status check_packed(const PersistentModel& m) {
  if (m.head_dim > kMaxPackedHeadDim && m.head_dim != kWidePackedHeadDim)
    return refuse("head_dim up to " + text(kMaxPackedHeadDim) + ", or " + text(kWidePackedHeadDim) +
                  ", with packed weights, got " + text(m.head_dim));
  for (const auto& [name, value, multiple] :
       {std::tuple{"hidden", m.hidden_size, kDigitColumns},
        std::tuple{"intermediate", m.intermediate_size, kDigitColumns},
        std::tuple{"heads * head_dim", m.heads * m.head_dim, kDigitColumns},
        std::tuple{"rows of q, k and v", (m.heads + 2 * m.kv_heads) * m.head_dim, kGptqRows}})
    if (value % multiple)
      return refuse(std::string(name) + " a multiple of " + text(multiple) + " with packed weights, got " +
                    text(value));
  return {};
}

Status check(const PersistentModel& m, std::int64_t batch) {
  struct Size {
    const char* name;
    std::int64_t value;
  };
  for (const auto& [name, value] :
       {Size{"hidden_size", m.hidden_size}, Size{"heads", m.heads}, Size{"kv_heads", m.kv_heads},
        Size{"head_dim", m.head_dim}, Size{"intermediate_size", m.intermediate_size}})
    if (value < 1) return bad(std::string(name) + " must be at least 1, got " + text(value));
  if (m.ranks == 1 && !m.adds_residual)
    return refuse("a rank that adds the residual, got one that leaves it to another rank");
  if (m.ranks > 1 && m.packed) return refuse("dense weights on several GPUs, got packed ones");
  if (m.head_norm && m.use_parallel_residual)
    return refuse("a norm of each head of q and k beside a sequential residual, got a parallel one");
  if (m.learned_positions || m.rotary_dim == 0)
    return refuse("rotary position embeddings, got " +
                  std::string(m.learned_positions ? "learned ones" : "layers without RoPE"));
  CF_TRY((ops::QkvHeads{m.heads, m.kv_heads, m.qkv_layout}.check(kPersistentName)));
  const std::int64_t all_heads = m.ranks * m.heads * m.head_dim;
  if (m.qkv_layout == ops::QkvLayout::interleaved_by_head && m.hidden_size != all_heads)
    return bad("hidden_size must be heads * head_dim = " + text(all_heads) + ", got " + text(m.hidden_size));
  if (m.rotary_dim < 2 || m.rotary_dim > m.head_dim || m.rotary_dim % 2)
    return bad("rotary_dim must be even, 2 to head_dim " + text(m.head_dim) + ", got " + text(m.rotary_dim));
  if (m.dtype != DType::f16 && m.dtype != DType::bf16)
    return refuse("float16 or bfloat16, got " + std::string(to_string(m.dtype)));
  if (batch < 1 || batch > kMaxPersistentBatch)
    return refuse("1 to " + text(kMaxPersistentBatch) + " sequences, got " + text(batch));
  for (const auto& [name, value] :
       {Size{"hidden", m.hidden_size}, Size{"head_dim", m.head_dim}, Size{"intermediate", m.intermediate_size}})
    if (value % 8) return refuse(std::string(name) + " a multiple of 8, got " + text(value));
  if (m.head_dim > kMaxPersistentHeadDim)
    return refuse("head_dim up to " + text(kMaxPersistentHeadDim) + ", got " + text(m.head_dim));
  if (m.hidden_size > kMaxPersistentHidden)
    return refuse("hidden up to " + text(kMaxPersistentHidden) + ", got " + text(m.hidden_size));
  return m.packed ? check_packed(m) : Status();
}

/// Replaces the plan's own value by the choice, if there is one.
Status choose(std::string_view name, const std::optional<int>& choice, int lowest, int highest, int& own) {
  if (!choice) return {};
  if (*choice < lowest || *choice > highest)
    return bad(std::string(name) + " must be " + text(lowest) + " to " + text(highest) + ", got " + text(*choice));
  own = *choice;
  return {};
}

/// The smallest power of two, from `least` to `limit`, that cuts a row into slices of equally many columns, where these
/// are a multiple of eight and at most `most_columns`. 0 where there is none.
int slices(int columns, int most_columns, int least, int limit) {
  int n = least;
  while (n <= limit && (columns > n * most_columns || columns % (8 * n))) n *= 2;
  return n <= limit ? n : 0;
}

/// The value of PersistentPlan::gqa_heads where heads share keys.
int gqa_heads(const PersistentDims& d) { return d.head_dim > kMaxGqaHeadDim ? 1 : gqa_tile_heads(d.group); }

/// Plans the grid, and how a GQA tile's keys are split over it.
Status plan_grid(const Arch& arch, const PersistentDims& d, const PersistentModel& m, const PersistentChoices& choices,
                 PersistentPlan& p) {
  const bool packed = m.packed;
  // Every block must have rows of q, k and v, and rows of each layer's output: kernel.cuh says why.
  const LayerRows rows = d.rows(packed);
  const int most_blocks = std::min({arch.sm_count, rows.qkv / rows.together, rows.out / rows.together});
  p.grid = most_blocks;
  CF_TRY(choose("blocks", choices.blocks, 1, most_blocks, p.grid));
  p.up_eighths = packed && d.batch == 1 ? arch.tuning->packed_up_eighths : arch.tuning->up_eighths;
  CF_TRY(choose("up_eighths", choices.up_eighths, 0, 8, p.up_eighths));
  // The kernels for packed weights, and those of ranks with a parallel residual, are compiled for one head a GQA tile
  // alone.
  const bool shares = !packed && (m.ranks == 1 || !m.use_parallel_residual);
  p.gqa_heads = choices.shares_keys.value_or(true) && shares ? gqa_heads(d) : 1;
  p.group_gqa_tiles = d.group / p.gqa_heads;
  p.gqa_tiles = d.heads / p.gqa_heads;
  const int gathered_bytes = p.gqa_heads > 1 ? kMaxGqaGatheredBytes : kMaxGatheredBytes;
  // A block merges its key splits one after another: with more splits than blocks it would wait for one of its own.
  const int most_splits = std::min({32, p.grid, gathered_bytes / (partial_floats(d.head_dim) * 4)});
  p.attention_splits = std::clamp(p.grid / (d.batch * p.gqa_tiles), 1, most_splits);
  return choose("attention_splits", choices.attention_splits, 1, most_splits, p.attention_splits);
}

/// Finds the slices of rows, and a ring that fits beside what they need.
class Slicing {
 public:
  Slicing(const Arch& arch, const PersistentDims& d, const PersistentModel& m, const PersistentPlan& grid,
          bool tile_products)
      : smem_bytes_(arch.smem_per_block_bytes),
        packed_group_(m.packed_group),
        tile_products_(tile_products),
        packed_(m.packed),
        sequential_(!m.use_parallel_residual),
        of_ranks_(m.ranks > 1),
        usual_partials_in_(grid.partials_in),
        d_(d),
        deals_(d.rows(m.packed), grid.grid),
        plan(grid) {
    plan.out_rows = deals_.most_rows(Weight::dense);
  }

  /// Of packed weights tries the longest slices first. Of dense weights tries one token's row product first: with
  /// slices of one length, the longest first, then with slices of any length. Tries the tile product then: with
  /// shared norms, then without. False where no ring of kMinStages fits.
  bool find() {
    if (packed_) {
      for (int most_columns = kMaxPackedColumns; most_columns >= kDigitColumns; most_columns /= 2)
        if (packed_product(most_columns)) return true;
      return false;
    }
    if (d_.batch == 1 && !tile_products_)
      for (int columns : {kWholeSliceColumns[0], kWholeSliceColumns[1], kWholeSliceColumns[2], kAnyColumns})
        if (row_product(columns)) return true;
    for (bool shared_norms : {true, false})
      for (int most_columns = kMaxSliceColumns; most_columns >= 256; most_columns /= 2)
        if (tile_product(most_columns, shared_norms)) return true;
    return false;
  }

 private:
  static constexpr int kAnyColumns = 0;

  bool cut(int most_columns, int limit) {
    plan.hidden_slices = slices(d_.hidden, most_columns, 1, limit);
    plan.context_slices = slices(d_.attention, most_columns, 1, limit);
    plan.act_slices = plan.hidden_slices ? slices(d_.intermediate, most_columns, plan.hidden_slices, limit) : 0;
    if (plan.act_slices == 0 || plan.context_slices == 0) return false;
    plan.hidden_columns = d_.hidden / plan.hidden_slices;
    plan.context_columns = d_.attention / plan.context_slices;
    plan.act_columns = d_.intermediate / plan.act_slices;
    return true;
  }
  /// Whether consume_row_product() has a loop for slices of `columns` columns.
  static bool has_loop(int columns) {
    return row_chunks(columns) >= kMinRowChunks || std::ranges::count(kWholeSliceColumns, columns) > 0;
  }
  /// `columns`: one of kWholeSliceColumns, which all slices then have except those of mlp.act in registers; or
  /// kAnyColumns.
  bool row_product(int columns) {
    if (!cut(columns == kAnyColumns ? kMaxSliceColumns : columns, kConsumerWarps)) return false;
    // Where each consumer warp has a slice of mlp.act of its own, the warp loads that slice to registers. With a
    // parallel residual the auxiliary warps fetch mlp.act while the consumer warps multiply. Slices of 1024 columns are
    // slower in registers: their stages are many and short (data/bench/TRIALS.md, act-in-registers).
    const int own_slice = d_.intermediate % (8 * kConsumerWarps) ? 0 : d_.intermediate / kConsumerWarps;
    plan.act_in_registers = sequential_ && row_chunks(own_slice) >= kMinRowChunks && own_slice <= kMaxSliceColumns;
    if (plan.act_in_registers) plan.act_slices = kConsumerWarps, plan.act_columns = own_slice;
    plan.partials_in = plan.act_in_registers ? PartialsIn::attn_x : usual_partials_in_;
    const auto fits = [&](int slice) { return columns == kAnyColumns ? has_loop(slice) : slice == columns; };
    if (!fits(plan.hidden_columns) || !fits(plan.context_columns)) return false;
    if (!plan.act_in_registers && !fits(plan.act_columns)) return false;
    plan.products = sequential_ ? Products::sequential_rows : Products::rows;
    plan.shared_norms = false;
    int most_hidden_rows = 0;  // of a phase whose rows have hidden's slices
    for (const PhaseSpec& p : kSequentialLayer)
      if (!is_fetched(p)) most_hidden_rows = std::max(most_hidden_rows, most_rows(p));
    plan.head_rows = whole_stages(most_hidden_rows);
    // Warps own the rows of a product that are not sliced, unless two rows make an element.
    int own_rows = 0;
    plan.shared_sums = 0;
    const auto make_room = [&](const PhaseSpec& p, int rows) {
      const bool pairs = p.publishes == Dependency::mlp_act && d_.rows_of_act == 2;
      int& room = slices_of(p) == 1 && !pairs ? own_rows : plan.shared_sums;
      room = std::max(room, rows * slices_of(p));
    };
    for (const PhaseSpec& p : kSequentialLayer) make_room(p, most_rows(p));
    make_room(kHead, most_hidden_rows);
    plan.warp_rows = own_rows ? (own_rows + kConsumerWarps - 1) / kConsumerWarps + 1 : 0;
    return ring_fits();
  }
  /// Slices are whole groups of digits. The last slice of a row may be smaller than the others.
  bool packed_product(int most_columns) {
    const auto cut_groups = [&](int columns, int& slices, int& slice_columns) {
      slices = (columns + most_columns - 1) / most_columns;
      slice_columns = (columns / kDigitColumns + slices - 1) / slices * kDigitColumns;
      slices = (columns + slice_columns - 1) / slice_columns;
    };
    cut_groups(d_.hidden, plan.hidden_slices, plan.hidden_columns);
    cut_groups(d_.attention, plan.context_slices, plan.context_columns);
    cut_groups(d_.intermediate, plan.act_slices, plan.act_columns);
    if (std::max({plan.hidden_slices, plan.context_slices, plan.act_slices}) > kMaxSlices) return false;
    plan.products = d_.batch == 1 && !tile_products_ ? Products::packed : Products::packed_tiles;
    plan.shared_norms = false;
    plan.warp_rows = 0;
    plan.shared_sums = kConsumerWarps * most_rows_of_all();
    return ring_fits();
  }
  bool tile_product(int most_columns, bool shared_norms) {
    if (!cut(most_columns, 64)) return false;
    plan.products = Products::tiles;
    plan.act_in_registers = false;
    plan.partials_in = usual_partials_in_;
    plan.shared_norms = shared_norms;
    plan.warp_rows = 0;
    plan.shared_sums = kConsumerWarps * most_rows_of_all();
    return ring_fits();
  }
  int slices_of(const PhaseSpec& p) const {
    return p.input == Input::context   ? plan.context_slices
           : p.input == Input::mlp_act ? plan.act_slices
                                       : plan.hidden_slices;
  }
  /// The most rows that a block multiplies in a phase.
  int most_rows(const PhaseSpec& p) const {
    if (p.is_attention()) return 0;
    return p.rows == PhaseRows::all ? deals_.most_rows(p.weight()) : most_up_rows();
  }
  /// The most rows of any phase. Every consumer warp has partial sums of each row. The head's parts have no more rows.
  int most_rows_of_all() {
    int rows = 0;
    for (const PhaseSpec& p : kSequentialLayer) rows = std::max(rows, most_rows(p));
    plan.head_rows = whole_stages(rows);
    return rows;
  }
  /// The most rows of a block in up_first or in up_rest. A block with fewer rows of mlp.dense_h_to_4h may have more of
  /// them in up_rest.
  int most_up_rows() const {
    const int up = deals_.most_rows(Weight::up), fewer = up - deals_.of[int(Weight::up)].together;
    return std::max({rows_before_attention(plan, up), up - rows_before_attention(plan, up),
                     fewer - rows_before_attention(plan, fewer)});
  }
  /// At most `rows` rows, in tiles of two stages where there are as many.
  static int whole_stages(int rows) {
    constexpr int tile_rows = 2 * kStageSlices;
    return rows < tile_rows ? rows : rows / tile_rows * tile_rows;
  }
  /// The ring gets the bytes that the other parts of a block's shared memory leave. Its largest stage has room for a
  /// tile of keys and values, too. False where the ring has room for fewer than kMinStages of these.
  bool ring_fits() {
    const int columns = std::max({plan.hidden_columns, plan.context_columns, plan.act_columns});
    const int stage_bytes = packed_ ? packed_stage_bytes(columns, packed_group_) : kStageSlices * columns * 2;
    const int tile_bytes = kTileKeys * d_.head_dim * 4;
    plan.stage_bytes = std::max((stage_bytes + 127) / 128 * 128, tile_bytes);
    plan.stage_keys = plan.stage_bytes / tile_bytes * kTileKeys;
    plan.ring_bytes = 0;
    plan.ring_bytes = (smem_bytes_ - persistent_layout(d_, plan, of_ranks_).bytes) & -128;
    plan.stages = plan.ring_bytes / plan.stage_bytes;
    return plan.stages >= kMinStages;
  }

  int smem_bytes_, packed_group_;
  bool tile_products_, packed_, sequential_, of_ranks_;
  PartialsIn usual_partials_in_;  // where the partial results lie unless mlp.act is in registers
  PersistentDims d_;
  LayerDeals deals_;

 public:
  PersistentPlan plan;
};

}  // namespace

Result<PersistentPlan> plan_persistent(const Arch& arch, const PersistentModel& model, std::int64_t batch,
                                       const PersistentChoices& choices) {
  CF_TRY(check(model, batch));
  const PersistentDims d = persistent_dims(model, batch);
  PersistentPlan p{};
  CF_TRY(plan_grid(arch, d, model, choices, p));
  // With a parallel residual attn_x is free then, since up reads its tokens from mlp_x. With packed weights attn_x
  // holds digits.
  p.partials_in = model.packed ? PartialsIn::own : model.use_parallel_residual ? PartialsIn::attn_x : PartialsIn::mlp_x;

  Slicing slicing(arch, d, model, p, choices.tile_products);
  // Gathered partial results take shared memory too: fewer splits may leave room for the ring.
  int& splits = slicing.plan.attention_splits;
  while (!slicing.find() && !choices.attention_splits && splits > 1) splits /= 2;
  p = slicing.plan;
  if (p.stages < kMinStages)
    return refuse("a hidden of which a ring of " + text(kMinStages) + " stages fits " +
                  text(arch.smem_per_block_bytes) + " B of shared memory, got " + text(d.hidden) + " with " +
                  text(batch) + " sequences");
  CF_TRY(choose("stages", choices.stages, kMinStages, p.stages, p.stages));
  if (choices.stages) p.ring_bytes = p.stages * p.stage_bytes;
  p.stages_in_flight = std::clamp(arch.tuning->bytes_in_flight / p.stage_bytes, 1, p.stages - 2);
  CF_TRY(choose("stages_in_flight", choices.stages_in_flight, 1, p.stages - 2, p.stages_in_flight));
  p.ahead_stages = arch.tuning->ahead_stages;
  CF_TRY(choose("ahead_stages", choices.ahead_stages, 0, 32, p.ahead_stages));
  p.ahead_clocks = 1024 / arch.tuning->ahead_bytes_per_clock;
  p.bytes_in_flight = choices.stages_in_flight ? p.stages_in_flight * p.stage_bytes : arch.tuning->bytes_in_flight;
  p.key_stage = ring_stage(p, p.stage_keys * d.head_dim * 4);
  p.smem_bytes = persistent_layout(d, p, model.ranks > 1).bytes;
  p.divisors = {.attention_splits = Divisor(p.attention_splits),
                .gqa_tiles = Divisor(p.gqa_tiles),
                .group_gqa_tiles = Divisor(p.group_gqa_tiles),
                .head_rows = Divisor(p.head_rows)};
  return p;
}

Status check_resident(const PersistentPlan& plan, int sm_count, int blocks_per_sm) {
  const int most = sm_count * blocks_per_sm;
  if (plan.grid <= most) return {};
  return refuse("at most the " + text(most) + " blocks that the device holds at once, " + text(blocks_per_sm) +
                " on each of " + text(sm_count) + " SMs, got " + text(plan.grid));
}

std::string to_string(Products p) {
  switch (p) {
    case Products::rows:
    case Products::sequential_rows: return "row products";
    case Products::tiles: return "tile products";
    case Products::packed: return "packed products";
    default: return "packed tile products";
  }
}

std::string to_string(const PersistentPlan& p) {
  return text(p.grid) + " blocks, rows in " + text(p.hidden_slices) + " and " + text(p.act_slices) +
         " slices, ring of " + text(p.ring_bytes) + " B, stages of up to " + text(p.stage_bytes) + " B, " +
         text(p.bytes_in_flight) + " B in flight, " + text(p.ahead_stages) + " ahead in the L2, " +
         to_string(p.products) + ", " + text(p.attention_splits) + " splits of " + text(kSplitKeys) + " or more of " +
         (p.gqa_heads > 1 ? "the keys of " + text(p.gqa_heads) + " heads" : "a head's keys") + ", " +
         text(p.up_eighths) + " eighths of mlp.dense_h_to_4h before attention, " + text(p.stage_keys) +
         " keys a stage, " + text(p.smem_bytes) + " B of shared memory";
}

}  // namespace cf::cuda
