// The persistent kernel's plan, layout, phases and exchange, without CUDA: for an H200 and an RTX 5090 on any machine.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/model/config.hpp"
#include "cuda/persistent/arguments.hpp"
#include "cuda/persistent/plan.hpp"
#include "cuda/persistent/variants.hpp"
#include "cuda/step/fastest_impl.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"

using namespace cf;
using namespace cf::cuda;
using cf::test::gated_model_of;
using cf::test::model_of;
using cf::test::refusal_fault;

namespace {

/// The product whose partial sums have no room beside the rows of the blocks that begin a layer's deals and of those
/// behind them, or nothing.
std::string sums_fault(const PersistentDims& d, const PersistentPlan& p) {
  const bool tiles = p.products == Products::tiles;
  const auto fits = [&](int rows, int slices, bool pairs) {
    if (tiles) return kConsumerWarps * rows <= p.shared_sums;
    if (slices > 1 || pairs) return rows * slices <= p.shared_sums;
    const int stages = (rows + kStageSlices - 1) / kStageSlices;
    return (stages + 1) / 2 <= p.warp_rows;  // a warp has one row of every second stage
  };
  const LayerDeals deals(d.rows(), p.grid);
  const bool pairs = d.rows_of_act == 2;
  for (int block = 0; block < p.grid; ++block) {
    const auto count = [&](Weight w) { return deals.deal(w, 0, block).count; };
    for (Weight w : {Weight::qkv, Weight::up, Weight::dense})
      if (count(w) > deals.most_rows(w)) return "more rows than the most";
    const int up = count(Weight::up), up_first = rows_before_attention(p, up);
    if (!fits(count(Weight::qkv), p.hidden_slices, false)) return "qkv";
    if (!fits(up_first, p.hidden_slices, pairs) || !fits(up - up_first, p.hidden_slices, pairs)) return "up";
    if (pairs && (up % 2 || up_first % 2)) return "half of a pair";
    if (!fits(count(Weight::dense), p.context_slices, false)) return "dense";
    if (!fits(count(Weight::down), p.act_slices, false)) return "down";
  }
  return fits(p.head_rows, p.hidden_slices, false) ? "" : "head";
}

/// The first part of attention for which shared memory has no room; empty where there is room for all.
std::string attention_fault(const PersistentDims& d, const PersistentPlan& p, const PersistentLayout& l,
                            bool parallel_residual) {
  const int heads = p.gqa_heads, floats = partial_floats(d.head_dim);
  if (heads < 1 || heads > kMaxGqaHeads || d.group != p.group_gqa_tiles * heads || p.gqa_tiles * heads != d.heads)
    return "GQA tiles";
  if (heads > 1 && d.head_dim > kMaxGqaHeadDim) return "GQA tiles of wide heads";
  if (p.attention_splits < 1 || p.attention_splits > 32) return "splits";
  const bool own_place = p.partials_in == PartialsIn::own;
  if (p.partials_in == PartialsIn::mlp_x && (parallel_residual || p.act_in_registers))
    return "up's tokens lie where attention's results come";
  if (p.act_in_registers &&
      (parallel_residual || p.products != Products::sequential_rows || p.act_slices != kConsumerWarps))
    return "mlp.act in registers";
  if ((l.mlp_x == l.attn_x) != p.act_in_registers) return "two kinds of tokens in one place";
  if (l.angles - l.warp_states < kConsumerWarps * heads * kSoftmaxStateBytes) return "states";
  if (l.angles - l.best_of_warps < kConsumerWarps * d.batch * 8 || l.best_of_warps < l.warp_states) return "best keys";
  // The newest key lies behind the queries. ldmatrix reads it at multiples of 16 bytes, which are eight elements.
  if (query_stride(d.head_dim, heads) % 8 || query_stride(d.head_dim, heads) < d.head_dim) return "distance of queries";
  if (values_stride(d.head_dim, heads) < d.head_dim) return "distance of values";
  const int new_token_bytes = (heads * query_stride(d.head_dim, heads) + 2 * d.head_dim) * 2;
  if ((own_place ? l.warp_values : l.moments) - l.new_token < new_token_bytes) return "new token";
  if (l.gathered - l.warp_values < kConsumerWarps * heads * values_stride(d.head_dim, heads) * 4) return "values";
  // Every head of a GQA tile is merged by one split's block, which has a place for each that it merges.
  int most = 0;
  for (int splits = 1; splits <= p.attention_splits; ++splits) {
    int merged = 0;
    for (int split = 0; split < splits; ++split) {
      int own = 0;
      for (int of = split; of < heads; of += splits) ++own;
      merged += own, most = std::max(most, own * splits);
    }
    if (merged != heads) return "merged heads";
  }
  if (most != merged_partials(p)) return "merged partial results";
  const int partials = p.attention_splits > 1 ? most * floats : 0;
  const bool before_mlp_x = p.partials_in == PartialsIn::attn_x && !p.act_in_registers;
  const int behind = own_place ? l.moments : before_mlp_x ? l.mlp_x : l.residual;
  if (behind - l.gathered < partials * 4) return "gathered partial results";
  if (!own_place && l.warp_values != (p.partials_in == PartialsIn::attn_x ? l.attn_x : l.mlp_x))
    return "place of other tokens";
  return "";
}

/// Checks a kind of stages of `bytes` bytes. Returns the first fault, or nothing.
std::string stage_fault(const PersistentPlan& p, const RingStage& stage, int bytes) {
  const int most = stage.slots - 2;
  if (stage.bytes() < bytes || stage.slots * stage.bytes() > p.ring_bytes) return "slots";
  if (stage.slots < 3 || stage.slots > kMaxRingStages) return "number of slots";
  if (stage.in_flight < 1 || stage.in_flight > most) return "stages in flight";
  if (stage.in_flight > 1 && stage.in_flight * bytes > p.bytes_in_flight) return "too many bytes in flight";
  if (stage.in_flight < most && (stage.in_flight + 1) * bytes <= p.bytes_in_flight) return "too few bytes in flight";
  // Wherever a stage ends, the next one lies in the first place behind it, or in the ring's first.
  for (int end = 0; end <= p.ring_bytes; end += 128) {
    const int slot = (end + stage.bytes() - 1) / stage.bytes();
    if (stage.first_slot(end) != (slot < stage.slots ? slot : 0)) return "first place";
  }
  return "";
}

/// Checks a plan. Returns the first fault, or nothing.
std::string fault(const Arch& arch, const ModelConfig& m, std::int64_t batch, const PersistentPlan& p) {
  const PersistentDims d = persistent_dims(persistent_model(m, m.dtype), batch);
  const PersistentLayout l = persistent_layout(d, p);
  if (const std::string product = sums_fault(d, p); !product.empty()) return "partial sums: " + product;
  const int sums_bytes =
      (kConsumerWarps * p.warp_rows + p.shared_sums) * int(batch) * (is_rows(p.products) ? 8 : 1) * 4;
  if (l.ring - l.sums < sums_bytes) return "sums";
  if (p.grid < 1 || p.grid > arch.sm_count) return "grid";
  if (p.smem_bytes > arch.smem_per_block_bytes || p.smem_bytes != l.bytes) return "shared memory";
  if (p.stages_in_flight < 1 || p.stages < p.stages_in_flight + 2) return "stages";
  if (p.ring_bytes % 128 || p.ring_bytes < p.stages * p.stage_bytes) return "the ring's bytes";
  if (p.ahead_stages < 0 || p.ahead_clocks < 1) return "prefetches";
  if (p.hidden_slices < 1 || p.act_slices % p.hidden_slices) return "slices";
  for (const ProductShape& s : product_shapes(d, p, {})) {
    const int bytes = kStageSlices * 2 * s.slice_columns;
    if (const std::string what = stage_fault(p, s.stage, bytes); !what.empty()) return "a product's stages: " + what;
    if (s.columns != s.slices * s.slice_columns) return "a product's slices";
  }
  if (const std::string what = stage_fault(p, p.key_stage, p.stage_keys * d.head_dim * 4); !what.empty())
    return "stages of keys: " + what;
  const std::int64_t hidden = m.hidden_size, act = m.intermediate_size;
  if (hidden % (8 * p.hidden_slices) || act % (8 * p.act_slices)) return "slices of whole pieces";
  const std::int64_t context = m.num_attention_heads * m.head_dim();
  if (context % (8 * p.context_slices) || p.context_columns * p.context_slices != context) return "context's slices";
  const auto all_columns = {hidden / p.hidden_slices, context / p.context_slices, act / p.act_slices};
  if (p.stage_bytes < kStageSlices * 2 * std::max(all_columns)) return "stage";
  for (const std::int64_t columns : all_columns)
    if (warp_lines(int(columns)) > kMaxLines || kConsumerWarps * warp_lines(int(columns)) * kLineColumns < columns)
      return "lines";
  if (std::max(all_columns) > kMaxSliceColumns) return "slice columns";
  for (const std::int64_t columns : all_columns)
    if (is_rows(p.products) && std::ranges::find(kWholeSliceColumns, columns) == kWholeSliceColumns.end() &&
        (row_chunks(int(columns)) < kMinRowChunks || row_chunks(int(columns)) > kMaxRowChunks))
      return "chunks of a row product";
  if (is_rows(p.products) && (p.products == Products::rows) != m.use_parallel_residual) return "kind of residual";
  if (is_rows(p.products) &&
      (batch > 1 || std::max({p.hidden_slices, p.context_slices, p.act_slices}) > kConsumerWarps))
    return "slices of a row product";
  if (l.hidden_row < 2 * std::max(hidden, context)) return "a token's row";
  if (p.stage_keys < 16 || p.stage_keys % 16 || p.stage_keys * m.head_dim() * 4 > p.stage_bytes)
    return "keys of a stage";
  if (const std::string what = attention_fault(d, p, l, m.use_parallel_residual); !what.empty())
    return "attention: " + what;
  if (l.barriers != 0) return "the zero that TileTokens relies on";
  // Every part begins behind the one before.
  const bool own_place = p.partials_in == PartialsIn::own;
  struct Part {
    const char* name;
    int begin, alignment = 128;
  };
  const Part parts[] = {{"notice", l.notice, 8},
                        {"layer_pointers", l.layer_pointers, 16},
                        {"lengths", l.lengths, 4},
                        {"positions", l.positions, 4},
                        {"newest_pages", l.newest_pages, 4},
                        {"ids", l.ids, 4},
                        {"best", l.best, 8},
                        {"warp_states", l.warp_states, 16},
                        {"angles", l.angles},
                        {"new_token", l.new_token},
                        {"warp_values", own_place ? l.warp_values : l.moments},
                        {"gathered", own_place ? l.gathered : l.moments},
                        {"moments", l.moments},
                        {"norm_weights", l.norm_weights},
                        {"attn_x", l.attn_x},
                        {"mlp_x", l.mlp_x},
                        {"residual", l.residual},
                        {"sums", l.sums},
                        {"ring", l.ring}};
  int end = (2 * kMaxRingStages + kSignals) * 8;
  for (const auto& [name, begin, alignment] : parts) {
    if (begin < end) return std::string(name) + " overlaps what lies before it";
    if (begin % alignment) return std::string(name) + " is misaligned";
    end = begin;
  }
  for (const auto& [begin, next] :
       {std::pair{l.lengths, l.positions}, {l.positions, l.newest_pages}, {l.newest_pages, l.ids}, {l.ids, l.best}})
    if (next - begin < 4 * batch) return "a word of each sequence";
  if (l.lengths - l.layer_pointers < 2 * int(sizeof(LayerPointers))) return "pointers of two layers";
  if (l.ring + p.ring_bytes > l.bytes) return "ring";
  return "";
}

/// What the kernel says of a model that it does not take; empty of one that it does.
std::string not_built(const ModelConfig& m) {
  if (m.family().positions == Positions::learned) return "rotary position embeddings, got learned ones";
  if (m.hidden_size <= kMaxPersistentHidden) return "";
  return "hidden up to " + std::to_string(kMaxPersistentHidden) + ", got " + std::to_string(m.hidden_size);
}

}  // namespace

TEST_CASE("persistent: presets have plans for an H200 and for an RTX 5090") {
  for (const ModelConfig& m : presets())
    for (std::int64_t batch = 1; batch <= 8; ++batch)
      for (const Arch& arch : {kH200, kRtx5090}) {
        CAPTURE(m.name, batch, arch.sm_count);
        const auto plan = plan_persistent(arch, persistent_model(m, m.dtype), batch);
        if (const std::string refused = not_built(m); !refused.empty()) {
          CHECK(refusal_fault(plan.status(), Code::unimplemented, {refused}) == "");
          continue;
        }
        // Beyond this the tokens leave no room for a ring.
        const std::int64_t widest = std::max(m.hidden_size, m.num_attention_heads * m.head_dim());
        if (!plan && batch * widest > (arch.sm_count == kH200.sm_count ? 32768 : 8192)) {
          CHECK(refusal_fault(plan.status(), Code::unimplemented, {"B of shared memory"}) == "");
          continue;
        }
        REQUIRE(plan);
        CAPTURE(to_string(*plan));
        CHECK(fault(arch, m, batch, *plan) == "");
        CHECK(plan->grid == std::min<std::int64_t>(arch.sm_count, m.hidden_size));
        CHECK(batch * plan->gqa_tiles * plan->attention_splits <=
              std::max<std::int64_t>(plan->grid, batch * plan->gqa_tiles));
      }
}

TEST_CASE("persistent: presets have plans for packed weights, on an H200 and on an RTX 5090") {
  std::set<std::string> refused;
  for (const ModelConfig& m : presets())
    for (const auto& [arch, batch] :
         {std::pair{kH200, 1}, {kH200, 2}, {kH200, 4}, {kH200, 8}, {kRtx5090, 1}, {kRtx5090, 2}, {kRtx5090, 4}}) {
      PersistentModel model = persistent_model(m, m.dtype);
      model.packed = true;
      CAPTURE(m.name, arch.sm_count, batch);
      const auto plan = plan_persistent(arch, model, batch);
      if (!plan) {
        CHECK(refusal_fault(plan.status(), Code::unimplemented, {"persistent: cuda takes "}) == "");
        refused.insert(m.name + (batch > 1 ? ", tokens" : ""));
        continue;
      }
      const PersistentDims d = persistent_dims(model, batch);
      CAPTURE(to_string(*plan));
      CHECK(plan->products == (batch == 1 ? Products::packed : Products::packed_tiles));
      CHECK(plan->smem_bytes <= arch.smem_per_block_bytes);
      CHECK(plan->stages >= 3);
      const LayerDeals deals(d.rows(true), plan->grid);
      CHECK(plan->grid == std::min<std::int64_t>(arch.sm_count, m.hidden_size / 16));
      for (int start = 0; start < plan->grid; ++start)
        for (int block = 0; block < plan->grid; ++block) REQUIRE(deals.deal(Weight::down, start, block).count > 0);
      const PersistentLayout l = persistent_layout(d, *plan);
      const DigitOffsets digits = digit_offsets(d, *plan, l);
      // Of several tokens attn_x has the context or a slice of mlp.act, mlp_x a norm's output or a slice.
      const int act = batch == 1 ? d.intermediate : plan->act_columns, in_attn = std::max(d.hidden, d.attention),
                in_mlp = std::max(d.hidden, act);
      CHECK(l.hidden_row >= in_attn * 2);
      CHECK(l.act_row >= act * 2);
      CHECK(l.attn_x + batch * std::max(l.hidden_row, batch == 1 ? 0 : l.act_row) <= l.mlp_x);
      CHECK(l.mlp_x + batch * std::max(l.hidden_row, l.act_row) <= digits.attn);
      CHECK(digits.row >= std::max(in_attn, in_mlp) / kDigitColumns * kDigitScaleBytes);
      CHECK(digits.attn + batch * digits.row <= digits.mlp);
      CHECK(digits.mlp + batch * digits.row <= digits.end);
      CHECK(digits.end <= l.residual);
      const auto packed = [](int columns) {
        return PackedShape{.scales = 0,
                           .input_columns = 0,
                           .inputs = columns,
                           .columns = columns,
                           .groups = columns / 128,
                           .group_columns = 128};
      };
      const auto shapes =
          product_shapes(d, *plan, {packed(d.hidden), packed(d.hidden), packed(d.attention), packed(d.intermediate)});
      const int rows[] = {d.qkv_rows, d.intermediate * d.rows_of_act, d.hidden, d.hidden};
      for (Weight w : {Weight::qkv, Weight::up, Weight::dense, Weight::down}) {
        // The slices make up the row, and only the last one may be smaller.
        const ProductShape& shape = shapes[std::size_t(w)];
        CHECK(shape.slice_columns % kDigitColumns == 0);
        CHECK((shape.slices - 1) * shape.slice_columns < shape.columns);
        CHECK(shape.columns <= shape.slices * shape.slice_columns);
        CHECK(packed_stage_bytes(shape.slice_columns, 128) <= plan->stage_bytes);
        if (w != Weight::up) CHECK(kConsumerWarps * deals.most_rows(w) <= plan->shared_sums);
        int dealt = 0;
        for (int block = 0; block < plan->grid; ++block) {
          const Deal deal = deals.deal(w, deals.start(3), block);
          CHECK((deal.first % kGptqRows == 0 && deal.count % kGptqRows == 0));
          const int before = rows_before_attention(*plan, deal.count);
          if (w == Weight::up) CHECK(kConsumerWarps * std::max(before, deal.count - before) <= plan->shared_sums);
          CHECK(before % kGptqRows == 0);
          dealt += deal.count;
        }
        CHECK(dealt == rows[int(w)]);
      }
      // The head, and dense weights beside packed ones.
      for (const ProductShape& dense : product_shapes(d, *plan, {})) {
        CHECK((dense.slices - 1) * dense.slice_columns < dense.columns);
        CHECK(dense.columns <= dense.slices * dense.slice_columns);
        CHECK(kStageSlices * dense.slice_columns * 2 <= plan->stage_bytes);
      }
    }
  CHECK(refused.contains("pythia-1b"));  // heads of 256 elements
  for (const char* name : {"pythia-410m", "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "llama-3.1-8b"})
    CHECK(!refused.contains(name));
  // Wider models may be refused: eight tokens of 4096 elements leave no shared memory for a ring.
  for (const char* name : {"pythia-410m", "pythia-1.4b"}) CHECK(!refused.contains(std::string(name) + ", tokens"));
}

TEST_CASE("persistent: every variant of a preset's plan is a plan, and another one") {
  for (const ModelConfig& m : presets())
    for (const Arch& arch : {kH200, kRtx5090}) {
      if (!not_built(m).empty()) continue;
      const auto own = plan_persistent(arch, persistent_model(m, m.dtype), 1);
      REQUIRE(own);
      const std::vector<PersistentVariant> variants = persistent_variants(*own);
      std::set<std::string> plans;
      for (const PersistentVariant& v : variants) {
        CAPTURE(m.name, arch.sm_count, v.choice, v.value);
        const auto plan = plan_persistent(arch, persistent_model(m, m.dtype), 1, v.choices);
        INFO(plan.status().message());
        REQUIRE(plan);
        CHECK(fault(arch, m, 1, *plan) == "");
        CHECK(plans.insert(to_string(*plan)).second);
        const bool sums_alike =
            plan->attention_splits == own->attention_splits && !v.choices.shares_keys && !v.choices.tile_products;
        if (!sums_alike) CHECK(!same_bits(*plan, *own));
        // A choice that leaves less or more shared memory to the slices may change them where there is little.
        const bool leaves_slices =
            v.choice == "none" || v.choices.stages || v.choices.stages_in_flight || v.choices.ahead_stages;
        if (leaves_slices || (sums_alike && arch.sm_count == kH200.sm_count)) CHECK(same_bits(*plan, *own));
        if (v.choices.tile_products) CHECK(plan->products == Products::tiles);
      }
      CHECK(plans.contains(to_string(*own)));
    }
}

TEST_CASE("persistent: heads share keys in long caches alone, unless they are told to") {
  const ModelConfig m = gated_model_of(ModelType::llama, 8, 2, 64, 512, 1024);
  const auto heads = [&](std::int64_t batch, std::int64_t capacity, const PersistentChoices& choices = {}) {
    const auto plan =
        plan_persistent(kH200, persistent_model(m, m.dtype), batch, for_capacity(kH200, choices, batch, capacity));
    REQUIRE(plan);
    return plan->gqa_heads;
  };
  CHECK(heads(1, 4096) == 1);
  CHECK(heads(1, 4097) == 4);
  CHECK(heads(2, 2048) == 1);
  CHECK(heads(2, 2049) == 4);
  CHECK(heads(1, 4096, {.shares_keys = true}) == 4);
  CHECK(heads(1, 131072, {.shares_keys = false}) == 1);
}

TEST_CASE("persistent: choices that cannot be are refused by name") {
  const auto m = find_preset("pythia-2.8b");
  REQUIRE(m);
  const auto own = plan_persistent(kH200, persistent_model(*m, m->dtype), 1);
  REQUIRE(own);
  const auto refused = [&](const PersistentChoices& choices, std::initializer_list<std::string_view> parts) {
    return refusal_fault(plan_persistent(kH200, persistent_model(*m, m->dtype), 1, choices).status(),
                         Code::invalid_argument, parts);
  };
  const std::string most = std::to_string(own->stages);
  CHECK(refused({.blocks = 133}, {"blocks must be 1 to 132, got 133"}) == "");
  CHECK(refused({.blocks = 0}, {"blocks must be 1 to 132, got 0"}) == "");
  CHECK(refused({.stages = 2}, {"stages must be 3 to " + most + ", got 2"}) == "");
  CHECK(refused({.stages = own->stages + 1}, {"stages must be 3 to " + most}) == "");
  CHECK(refused({.stages = 5, .stages_in_flight = 4}, {"stages_in_flight must be 1 to 3, got 4"}) == "");
  CHECK(refused({.ahead_stages = 33}, {"ahead_stages must be 0 to 32, got 33"}) == "");
  CHECK(refused({.up_eighths = 9}, {"up_eighths must be 0 to 8, got 9"}) == "");
  CHECK(refused({.attention_splits = 0}, {"attention_splits must be 1 to ", "got 0"}) == "");
  CHECK(refused({.blocks = 3, .attention_splits = 4}, {"attention_splits must be 1 to 3, got 4"}) == "");
}

TEST_CASE("persistent: Llama's and Qwen2's presets have row products of one token, on an RTX 5090 where a ring fits") {
  struct Expected {
    const char* name;
    Products rtx5090;
    int most_sequences_on_5090;
  };
  for (const Expected& e : {Expected{"llama-3.2-1b", Products::sequential_rows, 8},
                            {"llama-3.2-3b", Products::sequential_rows, 5},
                            {"llama-3.1-8b", Products::sequential_rows, 3},
                            {"llama-2-7b", Products::sequential_rows, 3},
                            {"qwen2.5-7b", Products::tiles, 3}}) {
    const auto m = find_preset(e.name);
    REQUIRE(m);
    for (const Arch& arch : {kH200, kRtx5090}) {
      const int most = arch.sm_count == kH200.sm_count ? kMaxPersistentBatch : e.most_sequences_on_5090;
      for (int batch = 1; batch <= kMaxPersistentBatch; ++batch) {
        CAPTURE(e.name, arch.sm_count, batch);
        const auto plan = plan_persistent(arch, persistent_model(*m, m->dtype), batch);
        CHECK(bool(plan) == (batch <= most));
        const Products of_one = arch.sm_count == kH200.sm_count ? Products::sequential_rows : e.rtx5090;
        if (plan) CHECK(plan->products == (batch == 1 ? of_one : Products::tiles));
      }
    }
  }
}

TEST_CASE("persistent: the query heads of a kv head share its keys, and more splits of these fill the grid") {
  struct Expected {
    int heads, kv_heads, head_dim, gqa_heads, splits_of_one, splits_of_8;
  };
  for (const Expected& e : {Expected{24, 8, 128, 3, 16, 2},
                            {32, 8, 128, 4, 16, 2},
                            {28, 4, 128, 7, 32, 4},
                            {32, 8, 64, 4, 16, 2},
                            {16, 2, 64, 8, 32, 8},
                            {16, 8, 64, 2, 16, 2},
                            // Groups of more heads than a GQA tile takes make up several tiles, or none.
                            {16, 1, 128, 8, 32, 8},
                            {24, 2, 128, 6, 32, 4},
                            {11, 1, 64, 1, 12, 1},
                            // Wide heads have no GQA tiles, nor have groups of one.
                            {8, 2, 256, 1, 7, 2},
                            {32, 32, 128, 1, 4, 1}}) {
    CAPTURE(e.heads, e.kv_heads, e.head_dim);
    ModelConfig m = gated_model_of(ModelType::llama, e.heads, e.kv_heads, e.head_dim, 1024, 4096);
    for (const auto& [batch, splits] : {std::pair{1, e.splits_of_one}, {8, e.splits_of_8}}) {
      const auto plan = plan_persistent(kH200, persistent_model(m, m.dtype), batch);
      REQUIRE(plan);
      CAPTURE(batch, to_string(*plan));
      CHECK(plan->gqa_heads == e.gqa_heads);
      CHECK(plan->gqa_tiles == e.heads / e.gqa_heads);
      CHECK(plan->attention_splits == splits);
      CHECK(plan->partials_in == PartialsIn::mlp_x);
      CHECK(fault(kH200, m, batch, *plan) == "");
      CHECK((to_string(*plan).find("the keys of " + std::to_string(e.gqa_heads) + " heads") != std::string::npos) ==
            (e.gqa_heads > 1));
      // Every number of splits, also fewer than a GQA tile has heads.
      for (int chosen = 1; chosen <= splits; ++chosen) {
        const auto other = plan_persistent(kH200, persistent_model(m, m.dtype), batch, {.attention_splits = chosen});
        REQUIRE(other);
        CAPTURE(to_string(*other));
        CHECK(fault(kH200, m, batch, *other) == "");
      }
    }
    // With a parallel residual up's tokens lie in mlp_x.
    m.use_parallel_residual = true;
    const auto parallel = plan_persistent(kH200, persistent_model(m, m.dtype), 1);
    REQUIRE(parallel);
    CHECK(parallel->partials_in == PartialsIn::attn_x);
    CHECK(fault(kH200, m, 1, *parallel) == "");
  }
}

TEST_CASE("persistent: every block has rows of q, k and v") {
  const ModelConfig m = gated_model_of(ModelType::llama, 1, 1, 24, 1024, 4096);
  const auto plan = plan_persistent(kH200, persistent_model(m, m.dtype), 1);
  REQUIRE(plan);
  CHECK(plan->grid == 3 * 24);
  CHECK(fault(kH200, m, 1, *plan) == "");
}

TEST_CASE("persistent: odd models have plans") {
  for (const ModelConfig& m :
       {gated_model_of(ModelType::qwen2, 28, 4, 128, 3584, 1008),
        gated_model_of(ModelType::llama, 16, 16, 64, 1024, 1024),
        gated_model_of(ModelType::llama, 16, 2, 128, 2048, 2048),
        gated_model_of(ModelType::mistral, 20, 5, 128, 2560, 5120), gated_model_of(ModelType::llama, 1, 1, 8, 8, 8),
        // Heads that do not make up hidden_size: sliced or not where hidden is, row and tile products.
        gated_model_of(ModelType::mistral, 32, 8, 128, 5120, 14336),
        gated_model_of(ModelType::llama, 8, 2, 128, 2048, 4096),
        gated_model_of(ModelType::llama, 32, 4, 64, 1024, 2048),
        gated_model_of(ModelType::llama, 16, 2, 128, 4096, 8192), gated_model_of(ModelType::qwen2, 14, 2, 64, 256, 320),
        // Row products of slices of three lengths, whose last chunks are not whole.
        gated_model_of(ModelType::llama, 9, 3, 128, 1160, 2264),
        gated_model_of(ModelType::qwen2, 20, 4, 128, 2608, 5008), model_of(18, 64, 16, 4608), model_of(1, 8, 2, 8),
        model_of(3, 80, 20, 200), model_of(4, 32, 8, 96), model_of(1, 256, 256, 72), model_of(2, 256, 64, 4096)})
    for (std::int64_t batch : {1, 3, 8}) {
      CAPTURE(m.name, m.hidden_size, batch);
      const auto plan = plan_persistent(kH200, persistent_model(m, m.dtype), batch);
      if (!plan && m.intermediate_size == 14336) {
        CHECK(batch == 8);
        continue;
      }
      REQUIRE(plan);
      CHECK(fault(kH200, m, batch, *plan) == "");
    }
}

TEST_CASE("persistent: mlp.act goes to registers where each warp has a long slice of its own") {
  const auto plan = [](const char* name, PersistentChoices choices = {}) {
    const auto m = find_preset(name);
    REQUIRE(m);
    const auto p = plan_persistent(kH200, persistent_model(*m, m->dtype), 1, for_capacity(kH200, choices, 1, 512));
    REQUIRE(p);
    return *p;
  };
  for (const auto& [name, act_columns] :
       {std::pair{"llama-3.1-8b", 1792}, {"llama-2-7b", 1376}, {"qwen2.5-7b", 2368}}) {
    CAPTURE(name);
    CHECK(plan(name).act_in_registers);
    CHECK(plan(name).act_columns == act_columns);
    // The ring has the bytes that mlp.act would take.
    CHECK(plan(name).ring_bytes > 200 << 10);
    CHECK_FALSE(plan(name, {.tile_products = true}).act_in_registers);
  }
  // Eighths of a row are too short, and with a parallel residual other warps fetch mlp.act.
  for (const char* name : {"llama-3.2-1b", "llama-3.2-3b", "llama-2.8b-shape", "pythia-6.9b"}) {
    CAPTURE(name);
    CHECK_FALSE(plan(name).act_in_registers);
  }
}

TEST_CASE("persistent: every product has as many stages as the ring has room for") {
  const auto m = find_preset("llama-3.2-3b");
  REQUIRE(m);
  const auto plan = plan_persistent(kH200, persistent_model(*m, m->dtype), 1);
  REQUIRE(plan);
  const auto shapes = product_shapes(persistent_dims(persistent_model(*m, m->dtype), 1), *plan, {});
  const RingStage &up = shapes[std::size_t(Weight::up)].stage, &down = shapes[std::size_t(Weight::down)].stage;
  CHECK(up.bytes() == 4 * 1536 * 2);
  CHECK(down.bytes() == 4 * 2048 * 2);
  CHECK(up.slots == plan->ring_bytes / up.bytes());
  CHECK(down.slots == plan->ring_bytes / down.bytes());
}

TEST_CASE("persistent: a row of packed weights has as many slices as their number has room for") {
  const ModelConfig m = gated_model_of(ModelType::llama, 8, 8, 128, 1024, 800 * 128);
  int planned = 0;  // without the bound a small ring takes 160 slices
  for (int kilobytes = 227; kilobytes > 8; --kilobytes)
    for (std::int64_t batch : {1, 2}) {
      Arch arch = kH200;
      arch.smem_per_block_bytes = kilobytes << 10;
      PersistentModel model = persistent_model(m, DType::f16);
      model.packed = true;
      const auto plan = plan_persistent(arch, model, batch);
      if (!plan) continue;
      ++planned;
      CAPTURE(kilobytes, batch, to_string(*plan));
      CHECK(plan->act_slices <= kMaxSlices);
      CHECK(product_shapes(persistent_dims(model, batch), *plan, {})[int(Weight::down)].slices == plan->act_slices);
    }
  CHECK(planned > 0);
}

TEST_CASE("persistent: divisors divide exactly") {
  for (int number : {1, 2, 3, 5, 7, 8, 12, 28, 32, 107, 128, 1000, 4095, 4096}) {
    CAPTURE(number);
    const Divisor by(number);
    int wrong = 0;
    for (int dividend = 0; dividend <= 1 << 23; dividend += dividend < 1 << 18 ? 1 : 61)
      wrong += by.quotient(dividend) != dividend / number;
    CHECK(wrong == 0);
    CHECK(by.quotient((1 << 23) / number * number - 1) == (1 << 23) / number - 1);
  }
  // Entries of pages.
  for (int number = 64; number <= 1024; number += 64) {
    CAPTURE(number);
    const Divisor by(number);
    int wrong = 0;
    for (int quotient = 0; quotient <= (1 << 29) / number - 1; quotient += quotient < 1 << 12 ? 1 : 997)
      for (int rest : {0, 1, number - 1}) wrong += by.quotient(quotient * number + rest) != quotient;
    CHECK(wrong == 0);
  }
}

TEST_CASE("persistent: steps are launched so by size, residual, slots, weights and GPU") {
  const auto impl = [](const char* preset, std::int64_t slots, const Arch& arch = kH200, bool is_quantised = false) {
    const auto m = find_preset(preset);
    REQUIRE(m);
    return fastest_impl(arch, *m, DType::f16, is_quantised, slots);
  };
  Arch older = kH200;
  older.compute_capability = 80;
  for (const auto& [preset, slots] : {std::pair{"pythia-2.8b", 1},
                                      {"pythia-2.8b", 4},
                                      {"pythia-410m", 1},
                                      {"llama-3.2-3b", 1},
                                      {"llama-3.1-8b", 1},
                                      {"llama-3.1-8b", 2},
                                      {"qwen2.5-7b", 2}}) {
    CAPTURE(preset, slots);
    CHECK(impl(preset, slots) == Impl::persistent);
    CHECK(impl(preset, slots, older) == Impl::graph);
    CHECK(impl(preset, slots, kH200, true) == Impl::graph);
  }
  for (const auto& [preset, slots] : {std::pair{"pythia-2.8b", 5},
                                      {"pythia-410m", 2},
                                      {"pythia-160m", 1},
                                      {"llama-3.2-1b", 2},
                                      {"llama-3.2-3b", 2},
                                      {"llama-3.1-8b", 3}}) {
    CAPTURE(preset, slots);
    CHECK(impl(preset, slots) == Impl::graph);
  }
  ModelConfig deep = *find_preset("pythia-1.4b");
  deep.num_hidden_layers = kMaxPersistentLayers - 1;
  CHECK(fastest_impl(kH200, deep, DType::f16, false, 1) == Impl::persistent);
  deep.num_hidden_layers = kMaxPersistentLayers;
  CHECK(fastest_impl(kH200, deep, DType::f16, false, 1) == Impl::graph);
}

TEST_CASE("persistent: the plan of Pythia-2.8B prints what it is") {
  const auto m = find_preset("pythia-2.8b");
  REQUIRE(m);
  const auto plan = plan_persistent(kH200, persistent_model(*m, m->dtype), 1);
  REQUIRE(plan);
  const std::string text = to_string(*plan);
  CHECK(plan->ahead_clocks == 1024 / 13);  // 13 bytes a clock
  for (const char* part : {"132 blocks", "ring of 19", "stages of up to 20480 B", "61440 B in flight",
                           "8 ahead in the L2", "row products", "4 splits", "B of shared memory"}) {
    CAPTURE(text, part);
    CHECK(text.find(part) != std::string::npos);
  }
}

namespace {

/// The phases of a layer in one launch or in two, as a launch has them.
std::vector<std::vector<PhaseSpec>> launches_of(bool parallel, bool tiled, bool act_in_registers, bool in_halves) {
  std::vector<std::vector<PhaseSpec>> launches;
  const std::vector<LayerPart> parts =
      in_halves ? std::vector{LayerPart::first_half, LayerPart::second_half} : std::vector{LayerPart::whole};
  for (LayerPart part : parts) {
    const PhaseTable table = phase_table({parallel, tiled, act_in_registers}, part);
    const auto last = std::find_if(table.begin(), table.end(), [](const PhaseSpec& p) { return p.is_last != 0; });
    launches.emplace_back(table.begin(), last + 1);
  }
  return launches;
}

/// The first fault of a launch's phases in the order in which a block goes through them; nothing where there is none.
/// `made` has what blocks have made for each other so far, and whether a phase has awaited it.
std::string launch_fault(const std::vector<PhaseSpec>& phases, std::map<Dependency, bool>& made) {
  bool has_first_norm = false, has_second_norm = false, keeps_rows = false;
  bool attn_x_is_free = true, mlp_x_is_free = true, has_context = false, has_act = false;
  for (const PhaseSpec& p : phases) {
    if (p.awaits != Dependency::none) {
      if (!made.contains(p.awaits)) return "awaits what nobody has made";
      made[p.awaits] = true;
    }
    if (p.norms != Norms::none && p.awaits != Dependency::hidden && p.awaits != Dependency::attn_residual)
      return "a norm of nothing";
    if (unsigned(p.norms) & 1) has_first_norm = true, attn_x_is_free = false;
    if (unsigned(p.norms) & 2) has_second_norm = true, mlp_x_is_free = false;
    if (p.brings == Dependency::context) {
      if (!attn_x_is_free) return "brings the context over input_layernorm's output";
      if (p.input != Input::context) return "brings the context before it is needed";
      has_context = true;
    }
    if (p.brings == Dependency::mlp_act) {
      if (!mlp_x_is_free) return "brings mlp.act over up's tokens";
      if (!made.contains(Dependency::mlp_act)) return "brings what nobody has made";
      has_act = true;
    }
    if (is_fetched(p) && p.awaits != (p.input == Input::context ? Dependency::context : Dependency::mlp_act))
      return "multiplies by what it does not await";
    if (!p.is_attention()) {
      const bool by_consumers = p.fetched_by != Fetcher::auxiliary;
      if (p.input == Input::first_norm && !has_first_norm) return "multiplies by a norm that is not made";
      if (p.input == Input::second_norm && !has_second_norm) return "multiplies by a norm that is not made";
      if (p.input == Input::context && !has_context) return "multiplies by a context that nobody brings";
      if (p.input == Input::mlp_act && has_act == by_consumers) return "mlp.act is brought twice, or not at all";
      if (!is_fetched(p) && by_consumers) return "fetches a norm";
    }
    if (p.adds == Residuals::attn_residual && !made.contains(Dependency::attn_residual)) return "adds nothing";
    if (p.adds_kept && !keeps_rows) return "adds rows that no phase has kept";
    if (p.publishes == Dependency::none)
      keeps_rows = true;
    else
      made.emplace(p.publishes, false);
    if (p.frees == Frees::attn_x) attn_x_is_free = true;
    if (p.frees == Frees::mlp_x) mlp_x_is_free = true;
    if (p.publishes == Dependency::hidden && !p.is_last) return "works behind the output";
    if (p.is_last != (&p == &phases.back())) return "goes on behind the last phase";
  }
  return "";
}

}  // namespace

TEST_CASE("persistent: a phase awaits what an earlier one publishes, and every row of every matrix is read once") {
  for (bool parallel : {true, false})
    for (bool tiled : {true, false})
      for (bool act_in_registers : {true, false})
        for (bool in_halves : {true, false}) {
          if (act_in_registers && (tiled || parallel)) continue;
          CAPTURE(parallel, tiled, act_in_registers, in_halves);
          std::map<Dependency, bool> made{{Dependency::hidden, false}};  // the layer before has made its output
          std::map<unsigned, std::vector<PhaseRows>> read;
          std::set<Phase> names;
          std::vector<Residuals> added;
          for (const auto& launch : launches_of(parallel, tiled, act_in_registers, in_halves)) {
            made.erase(Dependency::hidden);
            if (launch.front().awaits == Dependency::hidden) made[Dependency::hidden] = false;
            CHECK(launch_fault(launch, made) == "");
            for (const PhaseSpec& p : launch) {
              CHECK(names.insert(p.phase).second);
              if (!p.is_attention()) read[p.matrix].push_back(p.rows);
              if (p.adds != Residuals::none) added.push_back(p.adds);
            }
          }
          CHECK(names.size() == std::size_t(kLayerPhases));
          CHECK(read.size() == std::size_t(kWeights));
          for (const auto& [matrix, rows] : read)
            CHECK((rows == std::vector{PhaseRows::all} ||
                   rows == std::vector{PhaseRows::before_attention, PhaseRows::behind_attention}));
          // Somebody needs whatever is made; the output is the next layer's.
          for (const auto& [what, is_needed] : made) CHECK((is_needed || what == Dependency::hidden));
          CHECK(made.contains(Dependency::hidden));
          CHECK(made.contains(Dependency::attn_residual) == !parallel);
          CHECK(added ==
                (parallel ? std::vector{Residuals::input} : std::vector{Residuals::input, Residuals::attn_residual}));
        }
}

TEST_CASE("persistent: a fault in the table of phases is found") {
  const auto fault_of = [](auto change) {
    std::vector<PhaseSpec> phases = launches_of(true, true, false, false)[0];
    change(phases);
    std::map<Dependency, bool> made{{Dependency::hidden, false}};
    return launch_fault(phases, made);
  };
  CHECK(fault_of([](auto&) {}) == "");
  CHECK(fault_of([](auto& p) { std::swap(p[2], p[4]); }) != "");
  CHECK(fault_of([](auto& p) { p[0].norms = Norms::first; }) == "multiplies by a norm that is not made");
  CHECK(fault_of([](auto& p) { p[0].frees = Frees::none; }) == "brings the context over input_layernorm's output");
  CHECK(fault_of([](auto& p) { p[3].frees = Frees::none; }) == "brings mlp.act over up's tokens");
  CHECK(fault_of([](auto& p) { p[5].fetched_by = Fetcher::consumer; }) == "mlp.act is brought twice, or not at all");
  CHECK(fault_of([](auto& p) { p[4].publishes = Dependency::attn_residual; }) == "adds rows that no phase has kept");
  CHECK(fault_of([](auto& p) { p[2].publishes = Dependency::choice; }) == "awaits what nobody has made");
}

TEST_CASE("persistent: with a parallel residual what a phase awaits is made two phases earlier") {
  for (std::size_t at = 1; at < kParallelLayer.size(); ++at) {
    const Dependency awaited = kParallelLayer[at].awaits;
    if (awaited != Dependency::none) CHECK(kParallelLayer[at - 1].publishes != awaited);
  }
  // The context comes after mlp.act in the second of two launches alone: mlp.act has one place there.
  CHECK(has_two_act_buffers(phase_table({.parallel_residual = true, .tiled = true})));
  CHECK(has_two_act_buffers(phase_table({.tiled = true})));
  CHECK_FALSE(has_two_act_buffers(phase_table({.parallel_residual = true, .tiled = true}, LayerPart::second_half)));
  CHECK(has_two_act_buffers(phase_table({.tiled = true}, LayerPart::second_half)));
}

TEST_CASE("persistent: heads are normalised in attention alone, and only where the model has such norms") {
  for (bool head_norm : {false, true})
    for (LayerPart part : {LayerPart::whole, LayerPart::first_half, LayerPart::second_half})
      for (const PhaseSpec& p : phase_table({.head_norm = head_norm}, part))
        CHECK(bool(p.norms_heads) == (head_norm && p.phase == Phase::attention));
  CHECK_FALSE(PhaseCode<Products::rows>::head_norm);
  CHECK((PhaseCode<Products::sequential_rows>::head_norm && PhaseCode<Products::tiles>::head_norm));
  CHECK((PhaseCode<Products::packed>::head_norm && PhaseCode<Products::packed_tiles>::head_norm));
}

TEST_CASE("persistent: kernels have the code of their own kind of residual alone") {
  using Rows = PhaseCode<Products::rows>;
  using SequentialRows = PhaseCode<Products::sequential_rows>;
  CHECK((Rows::both_norms && Rows::kept_rows && Rows::auxiliary_fetches));
  CHECK((!Rows::attn_residual && !Rows::consumers_fetch && !Rows::act_in_registers));
  CHECK((SequentialRows::attn_residual && SequentialRows::consumers_fetch && SequentialRows::act_in_registers));
  CHECK((!SequentialRows::both_norms && !SequentialRows::kept_rows && !SequentialRows::auxiliary_fetches));
  using Packed = PhaseCode<Products::packed>;
  CHECK((Packed::both_norms && Packed::attn_residual && Packed::consumers_fetch && Packed::auxiliary_fetches));
  using Tiles = PhaseCode<Products::tiles>;
  CHECK((Tiles::both_norms && Tiles::attn_residual && Tiles::auxiliary_fetches && !Tiles::consumers_fetch));
}

TEST_CASE("persistent: words of an exchange do not overlap, and an epoch tells the launches that may meet apart") {
  for (bool tiled : {false, true})
    for (bool has_head : {false, true}) {
      CAPTURE(tiled, has_head);
      const ExchangeSizes sizes{.batch = tiled ? 3 : 1,
                                .hidden = 264,
                                .qkv_rows = 392,
                                .heads = 9,
                                .head_dim = 24,
                                .intermediate = 1000,
                                .grid = 131,
                                .splits = 5,
                                .partial_floats = 26,
                                .tiled = tiled,
                                .has_head = has_head};
      Exchange x;
      const std::size_t bytes = allocate_words(x, sizes, nullptr);
      std::vector<std::byte> memory(bytes + 256);
      std::byte* const first = memory.data() + 256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256;
      CHECK(allocate_words(x, sizes, first) == bytes);
      std::byte* end = first;
      std::set<Dependency> announced;
      for_each_words(x, sizes, [&](auto* words, std::int64_t count, const WordSpec& spec) {
        std::byte* const begin = reinterpret_cast<std::byte*>(words);
        CHECK(begin >= end);
        CHECK((begin - first) % 256 == 0);
        CHECK(count > 0);
        end = begin + std::size_t(count) * sizeof(*words);
        CHECK(spec.epoch_bits <= int(8 * sizeof(*words)));
        // What has no epoch is announced by other words, or its writer alone reads it.
        if (spec.epoch_bits > 0) announced.insert(spec.of);
      });
      for_each_words(x, sizes, [&](auto*, std::int64_t, const WordSpec& spec) { CHECK(announced.contains(spec.of)); });
      CHECK(announced.size() == std::size_t(kDependencies - !has_head));
      CHECK(reinterpret_cast<std::byte*>(x.grid_state) >= end);
      CHECK(reinterpret_cast<std::byte*>(x.grid_state + 1) <= first + bytes);
    }
  // Two launches of many tokens, one behind the other, and what the launch after them makes of their words.
  Exchange x;
  x.token_epochs = kMaxPersistentLayers + 1;
  std::set<unsigned> epochs;
  unsigned last = 0;
  for (unsigned launches : {0u, 5u})
    for (int token = 0; token < 5; ++token)
      for (int layer = 0; layer < x.token_epochs; ++layer) {
        const unsigned epoch = x.epoch(x.first_epoch(launches, false), token, layer);
        CHECK(epoch > last);  // none is 0, which memory has at first
        last = epoch;
      }
  // The second launch of a layer reads the epochs of the first.
  CHECK(x.first_epoch(7, true) == x.first_epoch(6, false));
  // A word is at most two launches of one token old: all its epochs differ in the bits that a NormWord has.
  for (int layer = 0; layer < 3 * x.token_epochs; ++layer) epochs.insert((last + unsigned(layer)) & 0xff);
  CHECK(epochs.size() == std::size_t(3 * x.token_epochs));
}

TEST_CASE("persistent: ranks of presets have plans, and one rank alone adds the residual") {
  for (const ModelConfig& m : presets())
    for (const std::int64_t ranks : {2, 4, 8}) {
      const Result<ModelSpec> part = m.spec().of_rank(ranks - 1, ranks);
      if (!part || m.family().positions == Positions::learned) continue;
      const PersistentModel model = persistent_model(*part, m.dtype);
      for (const std::int64_t batch : {1, 4}) {
        CAPTURE(m.name, ranks, batch);
        const auto plan = plan_persistent(kH200, model, batch);
        if (!plan) continue;  // as refused for the whole model
        const PersistentDims d = persistent_dims(model, batch);
        CHECK(plan->smem_bytes == persistent_layout(d, *plan, true).bytes);
        CHECK(plan->smem_bytes <= kH200.smem_per_block_bytes);
        CHECK(sums_fault(d, *plan) == "");
        CHECK((plan->gqa_heads == 1 || m.spec().traits.residual != Residual::parallel));
      }
    }
  for (const bool parallel : {false, true}) {
    int adding = 0;
    for (const bool adds : {false, true})
      for (const PhaseSpec& p : phase_table({.parallel_residual = parallel, .adds_residual = adds})) {
        CHECK((adds || p.adds == Residuals::none));
        adding += p.adds != Residuals::none;
      }
    CHECK(adding == (parallel ? 1 : 2));
  }
}

TEST_CASE("persistent: what ranks store for each other does not overlap") {
  for (const int ranks : {2, 3, 8}) {
    RankExchange x{.ranks = ranks};
    std::vector<std::byte> area(std::size_t(RankExchange::bytes(ranks)));
    x.areas[1] = area.data();
    const std::byte* end = area.data() + sizeof(RankState);
    CHECK(reinterpret_cast<std::byte*>(x.state(1)) == area.data());
    const auto check = [&](auto words) {
      for (int buffer = 0; buffer < RankExchange::kBuffers; ++buffer)
        for (int from = 0; from < ranks; ++from) {
          const auto* const begin = reinterpret_cast<const std::byte*>(words(buffer, from));
          CHECK(begin >= end);
          CHECK((begin - area.data()) % 256 == 0);
          end = reinterpret_cast<const std::byte*>(words(buffer, from) + RankExchange::kPart);
        }
    };
    check([&](int buffer, int from) { return x.floats(1, buffer, from); });
    check([&](int buffer, int from) { return x.norms(1, buffer, from); });
    CHECK(end <= area.data() + area.size());
  }
}

TEST_CASE("persistent: ranks that run at their own pace find every word, and no other in its place") {
  struct Word {
    unsigned tag = 0;  // the eight bits that a NormWord has
    int number = -1;   // of its exchange
  };
  struct Walk {
    RankState state{};
    std::size_t launch = 0;
    int layer = -1;           // the one that is made next; -1 before the launch begins
    Word words[2][3];         // by buffer and rank
    int behind_with[2][3]{};  // of each word: turns until the rank sees it
    Word on_the_way[2][3];
  };
  std::mt19937 random(1);
  for (int ranks : {2, 3}) {
    std::vector<std::pair<int, int>> launches;  // first and last layer
    for (int i = 0; i < 3000; ++i) {
      const int first = int(random() % kMaxPersistentLayers);
      launches.emplace_back(first,
                            random() % 2 ? first + 1 : std::min(first + 1 + int(random() % 5), kMaxPersistentLayers));
    }
    std::vector<Walk> all(static_cast<std::size_t>(ranks));
    int number_of_exchange = 0, idle = 0;
    std::vector<int> made(all.size(), 0);
    while (std::ranges::any_of(all, [&](const Walk& w) { return w.launch < launches.size(); })) {
      REQUIRE(++idle < 100000);  // nobody goes on
      const std::size_t r = random() % all.size();
      Walk& w = all[r];
      for (int buffer : {0, 1})
        for (int from = 0; from < ranks; ++from)
          if (int& behind = w.behind_with[buffer][from]; behind > 0 && --behind == 0)
            w.words[buffer][from] = w.on_the_way[buffer][from];
      if (w.launch == launches.size()) continue;
      const auto [first, last] = launches[w.launch];
      if (w.layer < 0) w.layer = first;
      const RankNotice notice = RankNotice::begin(w.state, first);
      if (w.layer > first) {  // every rank's words of the layer before
        const int buffer = notice.buffer(Dependency::hidden, w.layer - 1);
        const auto here = [&](const Word& word) { return word.tag == (notice.epoch(w.layer) & 0xff); };
        if (!std::all_of(w.words[buffer], w.words[buffer] + ranks, here)) continue;
        for (int from = 0; from < ranks; ++from) REQUIRE(w.words[buffer][from].number == made[r] - 1);
      }
      idle = 0;
      if (w.layer == last) {
        w.state.exchanges += unsigned(last - first);
        ++w.state.grid.launches;
        ++w.launch;
        w.layer = -1;
        continue;
      }
      for (Walk& to : all) {
        const int buffer = notice.buffer(Dependency::hidden, w.layer);
        REQUIRE(to.behind_with[buffer][r] == 0);
        to.on_the_way[buffer][r] = {notice.epoch(w.layer + 1) & 0xff, made[r]};
        to.behind_with[buffer][r] = 1 + int(random() % 4);
      }
      number_of_exchange = std::max(number_of_exchange, ++made[r]);
      ++w.layer;
    }
    CHECK(number_of_exchange > 3000);
  }
}

TEST_CASE("persistent: a report names a dependency, and the rank that has not made it") {
  for (int rank : {-1, 0, 7}) {
    const int code = dependency_code(kMaxPersistentLayers, Dependency::choice);
    const auto report = unsigned(report_code(code, rank));
    CHECK(code_of(report) == code);
    CHECK(late_rank_of(report) == rank);
  }
}

TEST_CASE("persistent: a dependency's code names its layer, and 0 names none") {
  int last = 0;
  for (int layer : {0, 1, 31})
    for (Dependency d :
         {Dependency::qkv, Dependency::context, Dependency::attn_residual, Dependency::mlp_act, Dependency::hidden}) {
      const int code = dependency_code(layer, d);
      CHECK(code > last);
      CHECK(layer_of_code(code) == layer);
      CHECK(dependency_of_code(code) == d);
      last = code;
    }
}

TEST_CASE("persistent: rows are dealt once each, and as evenly as can be") {
  struct Sizes {
    int hidden, qkv, intermediate, rows_of_act, grid;
  };
  for (const Sizes& s : {Sizes{2560, 7680, 10240, 1, 132},
                         {2560, 7680, 10240, 1, 170},
                         {240, 720, 200, 1, 132},
                         {8, 24, 8, 1, 132},
                         {5120, 15360, 20480, 1, 1},
                         {4096, 6144, 14336, 2, 132},
                         {3584, 4608, 18944, 2, 170},
                         {64, 128, 24, 2, 132}}) {
    CAPTURE(s.hidden, s.qkv, s.intermediate, s.rows_of_act, s.grid);
    const LayerDeals deals({.qkv = s.qkv, .act = s.intermediate, .rows_of_act = s.rows_of_act, .out = s.hidden},
                           s.grid);
    std::vector<long> read(std::size_t(s.grid));
    constexpr int layers = 40;
    for (int layer = 0; layer < layers; ++layer) CHECK(deals.next_start(deals.start(layer)) == deals.start(layer + 1));
    for (int layer = 0; layer < layers; ++layer)
      for (const auto& [of, rows, columns] : {std::tuple<Weight, int, int>{Weight::qkv, s.qkv, s.hidden},
                                              {Weight::up, s.intermediate * s.rows_of_act, s.hidden},
                                              {Weight::dense, s.hidden, s.hidden},
                                              {Weight::down, s.hidden, s.intermediate}}) {
        std::vector<int> dealt(std::size_t(rows), 0);
        for (int block = 0; block < s.grid; ++block) {
          const Deal d = deals.deal(of, deals.start(layer), block);
          if (of == Weight::up) CHECK((d.first % s.rows_of_act == 0 && d.count % s.rows_of_act == 0));
          for (int i = 0; i < d.count; ++i) ++dealt.at(std::size_t(d.row(i)));
          read[std::size_t(block)] += long(d.count) * columns;
        }
        CHECK(std::all_of(dealt.begin(), dealt.end(), [](int n) { return n == 1; }));
      }
    // A row or two more than another, over all layers.
    const auto [least, most] = std::minmax_element(read.begin(), read.end());
    CHECK(*most - *least <= 4l * (s.rows_of_act * s.hidden + s.intermediate));
  }
}

TEST_CASE("persistent: every row of q, k and v is one head's, where the layout has it") {
  for (const ModelConfig& m :
       {model_of(1, 8, 2, 8), model_of(5, 80, 20, 200), gated_model_of(ModelType::llama, 1, 1, 8, 8, 8),
        gated_model_of(ModelType::qwen2, 14, 2, 64, 896, 8), gated_model_of(ModelType::mistral, 24, 8, 128, 3072, 8)}) {
    CAPTURE(m.name);
    const ModelShape shape = m.spec().shape;
    const PersistentDims d = persistent_dims(persistent_model(m, m.dtype), 1);
    CHECK(d.qkv_rows == shape.qkv_size());
    CHECK(d.group * d.kv_heads == d.heads);
    CHECK(d.rows().act * d.rows().rows_of_act == m.spec().mlp_rows());
    std::vector<int> taken(std::size_t(d.qkv_rows), 0);
    for (int part = 0; part < 3; ++part)
      for (int head = 0; head < (part == 0 ? d.heads : d.kv_heads); ++head) {
        const QkvOffsets& p = d.qkv_offsets;
        const int first = part == 0   ? head * p.q_step
                          : part == 1 ? p.k_first + head * p.kv_step
                                      : p.v_first + head * p.kv_step;
        CHECK(first == shape.qkv_heads().index(part, head) * d.head_dim);
        for (int i = 0; i < d.head_dim; ++i) ++taken.at(std::size_t(first + i));
      }
    CHECK(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
  }
}

TEST_CASE("persistent: what the kernel does not take is refused by name") {
  const ModelConfig good = model_of(4, 64, 16, 512);
  const auto refused = [&](auto change, std::int64_t batch, std::initializer_list<std::string_view> parts,
                           Code code = Code::unimplemented) {
    ModelConfig m = good;
    change(m);
    return refusal_fault(plan_persistent(kH200, persistent_model(m, m.dtype), batch).status(), code, parts);
  };
  CHECK(refused([](ModelConfig& m) { m.dtype = DType::f32; }, 1, {"float16 or bfloat16", "got float32"}) == "");
  CHECK(refused([](ModelConfig&) {}, 0, {"1 to 8 sequences, got 0"}) == "");
  CHECK(refused([](ModelConfig&) {}, 9, {"1 to 8 sequences, got 9"}) == "");
  CHECK(refused([](ModelConfig& m) { m.intermediate_size = 500; }, 1, {"intermediate a multiple of 8, got 500"}) == "");
  CHECK(refused([](ModelConfig& m) { m = model_of(4, 60, 16, 512); }, 1, {"head_dim a multiple of 8, got 60"}) == "");
  CHECK(refused([](ModelConfig& m) { m = model_of(1, 264, 16, 512); }, 1, {"head_dim up to 256, got 264"}) == "");
  CHECK(refused([](ModelConfig& m) { m = model_of(33, 256, 32, 512); }, 1, {"hidden up to 6144, got 8448"}) == "");
  CHECK(refused([](ModelConfig& m) { m.rotary_dim = 3; }, 1, {"rotary_dim must be even, 2 to head_dim 64, got 3"},
                Code::invalid_argument) == "");
  CHECK(refused([](ModelConfig& m) { m.intermediate_size = 0; }, 1, {"intermediate_size must be at least 1, got 0"},
                Code::invalid_argument) == "");
  CHECK(refused([](ModelConfig& m) { m.rotary_dim = 0; }, 1, {"rotary position embeddings, got layers without RoPE"}) ==
        "");
  PersistentModel model = persistent_model(good, good.dtype);
  model.learned_positions = true;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::unimplemented,
                      {"rotary position embeddings, got learned ones"}) == "");
  model = persistent_model(good, good.dtype);
  model.head_norm = true;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::unimplemented,
                      {"a norm of each head of q and k beside a sequential residual, got a parallel one"}) == "");
  model.use_parallel_residual = false;
  CHECK(plan_persistent(kH200, model, 1));
  model = persistent_model(good, good.dtype);
  model.hidden_size = 512;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::invalid_argument,
                      {"hidden_size must be heads * head_dim = 256, got 512"}) == "");
  const Result<ModelSpec> second_rank = good.spec().of_rank(1, 2);
  REQUIRE(second_rank);
  model = persistent_model(*second_rank, good.dtype);
  CHECK(plan_persistent(kH200, model, 1));
  model.packed = true;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::unimplemented,
                      {"dense weights on several GPUs, got packed ones"}) == "");
  model.packed = false;
  model.ranks = 1;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::unimplemented,
                      {"a rank that adds the residual, got one that leaves it to another"}) == "");
  model = persistent_model(good, good.dtype);
  model.kv_heads = 2;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::invalid_argument,
                      {"kv_heads must be heads 4 where q, k and v are interleaved by head, got 2"}) == "");
  model = persistent_model(gated_model_of(ModelType::llama, 8, 2, 64, 512, 512), good.dtype);
  model.kv_heads = 3;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::invalid_argument,
                      {"heads must be a multiple of kv_heads 3, got 8"}) == "");
  model.kv_heads = 0;
  CHECK(refusal_fault(plan_persistent(kH200, model, 1).status(), Code::invalid_argument,
                      {"kv_heads must be at least 1, got 0"}) == "");
}

TEST_CASE("persistent: a grid of more blocks than a device holds at once is refused") {
  const ModelConfig m = model_of(4, 64, 16, 512);
  const auto plan = plan_persistent(kRtx5090, persistent_model(m, m.dtype), 1);
  REQUIRE(plan);
  CHECK(plan->grid == 170);
  for (const auto& [sm_count, blocks_per_sm] : {std::pair{170, 1}, {171, 1}, {85, 2}, {132, 2}})
    CHECK(check_resident(*plan, sm_count, blocks_per_sm));
  CHECK(refusal_fault(check_resident(*plan, 132, 1), Code::unimplemented,
                      {"persistent: cuda takes at most the 132 blocks that the device holds at once, 1 on each of 132 "
                       "SMs, got 170"}) == "");
  CHECK(refusal_fault(check_resident(*plan, 84, 2), Code::unimplemented, {"the 168 blocks", "2 on each of 84"}) == "");
  CHECK(refusal_fault(check_resident(*plan, 132, 0), Code::unimplemented, {"the 0 blocks", "got 170"}) == "");
}
