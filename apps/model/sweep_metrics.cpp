#include "apps/model/sweep_metrics.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <system_error>

#include "apps/cli/statistics.hpp"
#include "apps/cli/terminal.hpp"
#include "core/atomic_file.hpp"
#include "core/model/memorizer.hpp"
#include "golden/checkpoint/sha256.hpp"

namespace cf::apps {
namespace {

constexpr std::int64_t kContext = 32, kSequence = 64;  // of a sequence that may be memorised: ids given, and all

/// Adds ids to a checksum, each as eight bytes, little-endian.
void add_ids(checkpoint::Sha256& sum, std::span<const std::int32_t> ids) {
  for (const std::int32_t id : ids) {
    std::uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = std::uint8_t(std::uint64_t(id) >> (8 * i));
    sum.update(bytes, sizeof bytes);
  }
}

}  // namespace

std::string folder_of(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return std::filesystem::path(path).filename().string();
}

Result<SweepMetrics> SweepMetrics::open(SweepMetricsOptions options) {
  SweepMetrics m;
  m.options_ = std::move(options);
  const SweepMetricsOptions& o = m.options_;
  if (!o.tokens.empty()) {
    CF_TRY_ASSIGN(m.ids_, read_text(o.tokens, o.limit));
    CF_TRY(check_text(o.tokens, m.ids_, std::int64_t(1) << 31));
    m.windows_ =
        windows_of(std::int64_t(m.ids_.size()), m.context(), std::min(o.stride.value_or(m.context()), m.context()));
    checkpoint::Sha256 sum;
    add_ids(sum, m.ids_);
    m.ids_sha256_ = checkpoint::hex_of(sum.finish());
  }
  if (!o.sequences.empty()) {
    CF_TRY_ASSIGN(m.sequences_, Sequences::open(o.sequences, o.row, o.id_type));
    if (m.sequences_->length() < kSequence)
      return Status::error(Code::invalid_file, fmt::format("{}: expected sequences of at least {} ids, got {}",
                                                           o.sequences, kSequence, m.sequences_->length()));
    m.count_ = o.count.value_or(m.sequences_->count());
    if (m.count_ > m.sequences_->count())
      return Status::error(Code::invalid_argument,
                           fmt::format("--count: expected 1 to {}, got {}", m.sequences_->count(), m.count_));
    checkpoint::Sha256 sum;
    for (std::int64_t i = 0; i < m.count_; ++i) {
      CF_TRY_ASSIGN(const std::vector<std::int32_t> sequence, m.sequences_->read(i, kSequence));
      add_ids(sum, sequence);
    }
    m.sequences_sha256_ = checkpoint::hex_of(sum.finish());
  }
  if (!o.per_token.empty()) {
    std::error_code error;
    std::filesystem::create_directories(o.per_token, error);
    if (error) return Status::error(Code::io_error, o.per_token + ": " + error.message());
  }
  return m;
}

nlohmann::ordered_json SweepMetrics::settings() const {
  nlohmann::ordered_json made = nlohmann::ordered_json::object();
  if (!ids_.empty()) {
    made["ids"] = ids_sha256_;
    made["context"] = options_.context;
    made["stride"] = options_.stride.value_or(options_.context);
  }
  if (sequences_) made["sequences"] = sequences_sha256_;
  return made;
}

std::int64_t SweepMetrics::slots() const {
  return std::min(options_.slots, std::max(std::int64_t(windows_.size()), count_));
}

std::int64_t SweepMetrics::capacity() const {
  return std::max(ids_.empty() ? 1 : context() - 1, sequences_ ? kSequence : 1);
}

Result<SweepMetrics::Measured> SweepMetrics::measure(RevisionRunner& runner, const std::string& revision,
                                                     std::vector<std::int32_t> never) {
  Measured measured;
  std::optional<std::vector<double>> nats;
  for (const std::string& name : options_.names) {
    if (name == kMemorization) {
      CF_TRY(add_memorization(runner, revision, never, measured));
      continue;
    }
    if (!nats) {
      CF_TRY_ASSIGN(nats, surprisal(runner, revision));
    }
    std::vector<double> scored;
    std::ranges::copy_if(*nats, std::back_inserter(scored), [](double x) { return !std::isnan(x); });
    const Mean mean = mean_of(scored);
    if (name == kSurprisal) {
      // The series' own deviation, not the estimate of one that it is drawn from.
      const double n = double(scored.size());
      measured.emplace_back(name + ".mean", mean.mean);
      measured.emplace_back(name + ".std", mean.error * std::sqrt(n - 1));
      continue;
    }
    const double perplexity = std::exp(mean.mean);
    if (!std::isfinite(perplexity))
      return Status::error(Code::invalid_argument,
                           fmt::format("perplexity: expected a finite number, got exp({})", mean.mean));
    measured.emplace_back(name, perplexity);
    measured.emplace_back(name + ".error", perplexity * mean.error);
  }
  if (nats && !options_.per_token.empty()) CF_TRY(write_per_token(revision, *nats));
  return measured;
}

Result<std::vector<double>> SweepMetrics::surprisal(RevisionRunner& runner, const std::string& revision) const {
  CF_TRY(check_text(options_.tokens, ids_, runner.config().vocab_size));
  // The CPU reads many windows no faster than one.
  const std::int64_t slots = runner.on_gpu() ? std::min(options_.slots, std::int64_t(windows_.size())) : 1;
  CF_TRY_ASSIGN(std::shared_ptr<SlotLease> lease, runner.lease(slots, context() - 1));
  std::vector<double> nats(ids_.size(), std::numeric_limits<double>::quiet_NaN());
  Progress progress("scoring " + revision, std::int64_t(ids_.size()));
  CF_TRY(score_windows(
      std::move(lease), ids_, windows_, options_.tokens, [&] { return runner.check(); },
      [&](std::int64_t done) { progress.set(done); },
      [&](std::int64_t place, double log_prob) { nats[std::size_t(place)] = -log_prob; }));
  return nats;
}

Status SweepMetrics::add_memorization(RevisionRunner& runner, const std::string& revision,
                                      std::vector<std::int32_t> never, Measured& measured) {
  const std::int64_t slots = std::min(options_.slots, count_);
  CF_TRY_ASSIGN(std::shared_ptr<SlotLease> lease, runner.lease(slots, kSequence));
  CF_TRY_ASSIGN(Memorizer memorizer, Memorizer::create(std::move(lease), {.context = kContext,
                                                                          .continuation = kSequence - kContext,
                                                                          .never = std::move(never)}));
  std::int64_t equal = 0, exact = 0, done = 0;
  Progress progress("continuing sequences by " + revision, count_);
  const auto put = [&](std::span<const Memorized> ended) -> Status {
    for (const Memorized& m : ended) {
      equal += m.equal;
      exact += m.prefix == kSequence - kContext;
    }
    progress.set(done += std::int64_t(ended.size()));
    return runner.check();
  };
  CF_TRY(continue_sequences(memorizer, *sequences_, 0, count_, kSequence, slots, put));
  measured.emplace_back(std::string(kMemorization) + ".accuracy",
                        double(equal) / double(count_) / double(kSequence - kContext));
  measured.emplace_back(std::string(kMemorization) + ".exact", double(exact) / double(count_));
  return {};
}

Status SweepMetrics::write_per_token(const std::string& revision, const std::vector<double>& nats) const {
  std::string lines = "position,id,surprisal_nats\n";
  for (std::size_t i = 0; i < ids_.size(); ++i) lines += fmt::format("{},{},{:.9g}\n", i, ids_[i], nats[i]);
  return write_file_atomically(options_.per_token + "/" + folder_of(revision) + ".csv", lines);
}

}  // namespace cf::apps
