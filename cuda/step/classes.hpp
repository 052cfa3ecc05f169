#pragma once
// Which sizes of steps give a row the same bits. Without CUDA's headers. Private to cuda and the programs.
#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/weights.hpp"
#include "cuda/ops/attention/attention.hpp"
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/wgmma/plan.hpp"
#include "cuda/runtime/arch.hpp"

namespace cf::cuda {

/// Tokens `first` to `last`; a last range has no end, which is kAnyTokens.
struct TokenRange {
  std::int64_t first, last;
  bool operator==(const TokenRange&) const = default;
};

/// "1 to 8, 9 to 128, 129 or more"
inline std::string to_string(std::span<const TokenRange> ranges) {
  std::string text;
  for (const TokenRange& r : ranges) {
    if (!text.empty()) text += ", ";
    text += std::to_string(r.first);
    if (r.last == kAnyTokens)
      text += " or more";
    else if (r.last > r.first)
      text += " to " + std::to_string(r.last);
  }
  return text;
}

/// The ranges that end at these numbers of tokens, and the range without an end behind them.
inline std::vector<TokenRange> ranges_to(const std::set<std::int64_t>& lasts) {
  std::vector<TokenRange> ranges;
  std::int64_t first = 1;
  for (std::int64_t last : lasts) {
    if (last < first || last == kAnyTokens) continue;
    ranges.push_back({first, last});
    first = last + 1;
  }
  ranges.push_back({first, kAnyTokens});
  return ranges;
}

/// The sizes of steps: within a range a row of any op but attention has the same bits, whatever the number of rows. The
/// model's activations have 16 bits or 32; `formats` are those of its quantised weights, none where all are dense.
inline std::vector<TokenRange> step_classes(const Arch& arch, std::span<const WeightFormat> formats = {}) {
  const Tuning& t = *arch.tuning;
  if (t.is_invariant()) return ranges_to({});
  std::set<std::int64_t> lasts{t.gemv_tokens};
  for (const StepClass& c : t.step_classes) lasts.insert(c.last);
  if (arch.has_wgmma()) lasts.insert(t.wgmma_tokens);
  const auto is_fp8 = [](const WeightFormat& f) { return f.is_fp8; };
  if (std::ranges::any_of(formats, is_fp8)) lasts.insert(t.fp8_tokens);
  const bool has_gptq = !std::ranges::all_of(formats, is_fp8);
  if (has_gptq) lasts.insert({1, t.packed_tokens});  // one token has a kernel of its own
  if (has_gptq && arch.has_wgmma())
    lasts.insert({t.packed_wgmma_first - 1, t.packed_wide_tokens, kPackedPairTokens, t.packed_wgmma_tokens});
  return ranges_to(lasts);
}

/// The lengths of runs: within a range attention has one kernel. That of the first range divides a sequence's keys as
/// query_classes() says; the others give a row the same bits in all runs of the range. `group` query heads read one kv
/// head.
inline std::vector<TokenRange> attention_classes(const Arch& arch, std::int64_t head_dim, std::int64_t group) {
  const std::int64_t prefill = arch.tuning->prefill_queries;
  std::set<std::int64_t> lasts{prefill - 1};
  if (wgmma_pays(arch, head_dim, kWgmmaQueryRows) && !arch.tuning->is_invariant())
    lasts.insert(std::max(prefill, (kWgmmaQueryRows + group - 1) / group) - 1);
  return ranges_to(lasts);
}

/// The queries of a launch of decode attention, those of all its sequences: within a range a sequence's keys are divided
/// alike, and a row has the same bits. `d` has the model's heads and the cache's sizes. An invariant model has one range.
inline std::vector<TokenRange> query_classes(const Arch& arch, ops::Attention::Dims d, DType activation) {
  if (arch.tuning->is_invariant()) return ranges_to({});
  std::set<std::int64_t> lasts;
  d.q_len = 1;
  const auto splits = [&](std::int64_t queries) {
    d.batch = queries;
    return attention_plan(arch, d, activation).splits;
  };
  for (std::int64_t last = 1, of_last = splits(1); of_last > 1; ++last)
    if (const std::int64_t of_next = splits(last + 1); of_next != of_last) {
      lasts.insert(last);
      of_last = of_next;
    }
  return ranges_to(lasts);
}

}  // namespace cf::cuda
