// Log-probabilities of given ids on the GPU: the kernel beside the host's float64 within its bound, and a model's scores
// beside the oracle.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "core/log_probs.hpp"
#include "core/model/score.hpp"
#include "core/model/slot_lease.hpp"
#include "core/model/taps.hpp"
#include "core/procedural.hpp"
#include "core/sampling.hpp"
#include "cpu_ref/model.hpp"
#include "cuda/ops/sample/score.hpp"
#include "cuda/serve/model.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/cuda/late_bytes.hpp"
#include "tests/support/refusal.hpp"
#include "tests/support/setups.hpp"
#include "tests/support/taken.hpp"

using namespace cf;
using namespace cf::test;
using cuda::LogitOf;
using cuda::Model;
using cuda::RowSum;

namespace {

using Ids = std::vector<std::int32_t>;
using Random = std::mt19937_64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32};

/// row_score()'s bound, and what LogProbs may add to it.
double bound_of(std::int64_t vocab, double log_prob) {
  const double n = double(vocab), u = 0x1p-24, double_u = 0x1p-53;
  return u * (2 + std::log(n)) + n * std::ldexp(1.0, -sampling::kWeightBits - 1) + 0x1p-40 +
         double_u * (n / 8 + 5 + 3 * std::log(n) + 4 * std::abs(log_prob));
}

/// Rows of logits on the device and what they are asked. NaN lies before and behind the logits, and guard bytes around
/// what the kernel writes.
class Call {
 public:
  Call(DType dtype, std::vector<std::vector<float>> rows, std::vector<Ids> next, std::int64_t top)
      : dtype_(dtype), next_(std::move(next)), top_(top), rows_(std::int64_t(rows.size())) {
    vocab_ = std::int64_t(rows.at(0).size());
    // One element more than a multiple of 16 bytes, so that rows begin at any address.
    std::vector<std::byte> bytes(std::size_t(offset() + 64 + rows_ * row_bytes()), std::byte{0xff});
    for (std::size_t r = 0; r < rows.size(); ++r)
      convert(rows[r].data(), DType::f32, bytes.data() + offset() + std::int64_t(r) * row_bytes(), dtype, vocab_);
    stored_ = bytes;
    logits_.emplace(bytes);
    for (const Ids& ids : next_) {
      asked_.insert(asked_.end(), ids.begin(), ids.end());
      ends_.push_back(std::int32_t(asked_.size()));
    }
    Ids words(asked_);
    words.insert(words.end(), ends_.begin(), ends_.end());
    asked_on_device_.emplace(std::as_bytes(std::span(words)));
    answers_.emplace(std::vector<std::byte>(answer_bytes() + 2 * kGuard, std::byte{0xab}));
  }

  cuda::ScoreArgs args() const {
    std::byte* const to = answers_->data() + kGuard;
    auto* const words = reinterpret_cast<const std::int32_t*>(asked_on_device_->data());
    const auto ids = std::int64_t(asked_.size());
    return {.logits = {logits_->data() + offset(), {rows_, vocab_}, dtype_},
            .next_end = {words + ids, {rows_}},
            .next = {words, {ids}},
            .sums = reinterpret_cast<RowSum*>(to),
            .next_logits = reinterpret_cast<float*>(to + next_logits_at()),
            .likely = reinterpret_cast<LogitOf*>(to + likely_at()),
            .top = top_};
  }
  const DeviceBytes& logits() const { return *logits_; }
  ConstAnyView<1> row(std::int64_t i) const { return {stored_.data() + offset() + i * row_bytes(), {vocab_}, dtype_}; }

  Status submit(const cuda::Context& c, const cuda::Submission& how = {}) const {
    cuda::LaunchList launches(c);
    CF_TRY(cuda::prepare(args(), launches));
    return launches.submit(c.stream(), how);
  }
  /// Poisons the answers.
  void poison() { answers_->bring(std::vector<std::byte>(answer_bytes() + 2 * kGuard, std::byte{0xab})); }
  /// The answers' bytes, once all of the device's work is done.
  std::vector<std::byte> answers() const {
    require_cuda(cudaDeviceSynchronize());
    std::vector<std::byte> all(answers_->size());
    answers_->fetch(all.data());
    const auto untouched = [](std::byte b) { return b == std::byte{0xab}; };
    CHECK(std::all_of(all.begin(), all.begin() + kGuard, untouched));
    CHECK(std::all_of(all.end() - kGuard, all.end(), untouched));
    return {all.begin() + kGuard, all.end() - kGuard};
  }
  std::vector<RowScore> scores(const std::vector<std::byte>& answers) const {
    const auto values = [&]<class T>(const T*, std::size_t at, std::size_t count) {
      std::vector<T> made(count);
      std::memcpy(made.data(), answers.data() + at, count * sizeof(T));
      return made;
    };
    std::vector<RowScore> made;
    for (std::size_t r = 0, begin = 0; r < next_.size(); begin = std::size_t(ends_[r++])) {
      const auto sum = values(static_cast<const RowSum*>(nullptr), r * sizeof(RowSum), 1);
      const auto likely = values(static_cast<const LogitOf*>(nullptr),
                                 likely_at() + r * std::size_t(top_) * sizeof(LogitOf), std::size_t(top_));
      const auto logits =
          values(static_cast<const float*>(nullptr), next_logits_at() + begin * sizeof(float), next_[r].size());
      made.push_back(cuda::row_score(sum[0], next_[r], logits, likely));
    }
    return made;
  }
  /// Runs the call twice, which gives the same bits, and compares every score with the host's.
  void check(const cuda::Context& c) {
    require_ok(submit(c));
    const std::vector<std::byte> bytes = answers();
    poison();
    require_ok(submit(c));
    REQUIRE(answers() == bytes);
    const std::vector<RowScore> got = scores(bytes);
    for (std::size_t r = 0; r < got.size(); ++r) {
      INFO("row " << r << " of " << vocab_ << " logits of " << to_string(dtype_));
      check_score(got[r], score_row(row(std::int64_t(r)), next_[r], top_), vocab_);
    }
  }

  static void check_score(const RowScore& got, const RowScore& exact, std::int64_t vocab) {
    REQUIRE(got.status.message() == exact.status.message());
    REQUIRE(got.next.size() == exact.next.size());
    REQUIRE(got.top.size() == exact.top.size());
    const auto check = [&](double ours, double theirs) {
      CAPTURE(ours, theirs, bound_of(vocab, theirs));
      REQUIRE((ours == theirs || std::abs(ours - theirs) <= bound_of(vocab, theirs)));
    };
    for (std::size_t i = 0; i < got.next.size(); ++i) {
      check(got.next[i].log_prob, exact.next[i].log_prob);
      REQUIRE(got.next[i].greedy == exact.next[i].greedy);
    }
    for (std::size_t i = 0; i < got.top.size(); ++i) {
      check(got.top[i].log_prob, exact.top[i].log_prob);
      REQUIRE(got.top[i].id == exact.top[i].id);
    }
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 256;

  std::int64_t offset() const { return 64 + std::int64_t(size_bytes(dtype_)); }
  std::int64_t row_bytes() const { return vocab_ * std::int64_t(size_bytes(dtype_)); }
  std::size_t likely_at() const { return std::size_t(rows_) * sizeof(RowSum); }
  std::size_t next_logits_at() const { return likely_at() + std::size_t(rows_ * top_) * sizeof(LogitOf); }
  std::size_t answer_bytes() const { return next_logits_at() + asked_.size() * sizeof(float); }

  DType dtype_;
  std::vector<Ids> next_;
  std::int64_t top_, rows_, vocab_ = 0;
  Ids asked_, ends_;
  std::vector<std::byte> stored_;
  std::optional<DeviceBytes> logits_, asked_on_device_, answers_;
};

float normal(Random& random, float mean, float deviation) {
  return std::normal_distribution<float>(mean, deviation)(random);
}

/// Logits of all kinds, below float16's largest number.
const std::vector<std::function<float(Random&, std::int64_t id)>>& kinds() {
  static const std::vector<std::function<float(Random&, std::int64_t)>> all{
      [](Random& r, std::int64_t) { return normal(r, 0, 2); },
      [](Random& r, std::int64_t) { return normal(r, -20, 6); },
      [](Random& r, std::int64_t) { return std::round(normal(r, 0, 2)); },  // ties
      [](Random&, std::int64_t) { return -2.5f; },                          // all alike
      [](Random& r, std::int64_t id) { return id % 3 == 1 ? normal(r, 0, 3) : -kInfinity; },
      [](Random& r, std::int64_t) { return normal(r, 0, 12000); },  // far apart
      [](Random& r, std::int64_t id) { return normal(r, 0, 2) + 20 * (id % 61 == 3); },
      [](Random& r, std::int64_t) { return r() % 2 ? 0.0f : -0.0f; },
      [](Random&, std::int64_t id) { return float(id) * -0x1p-9f; },
      [](Random& r, std::int64_t) { return 1 + float(r() % 256) * 0x1p-23f; },  // float32 alone tells them apart
      [](Random& r, std::int64_t id) { return id == 0 ? 40.0f : normal(r, 0, 1); },
  };
  return all;
}

std::vector<float> row_of(std::size_t kind, std::int64_t vocab, Random& random) {
  std::vector<float> row;
  for (std::int64_t id = 0; id < vocab; ++id) row.push_back(std::clamp(kinds()[kind](random, id), -kInfinity, 60000.f));
  if (std::all_of(row.begin(), row.end(), [](float x) { return x == -kInfinity; })) row.back() = 1;
  return row;
}

/// `count` ids that a row is asked for, the last id among them.
Ids ids_of_row(std::size_t count, std::int64_t vocab, Random& random) {
  Ids ids;
  for (std::size_t i = 0; i < count; ++i)
    ids.push_back(i == 0 ? std::int32_t(vocab - 1) : std::int32_t(random() % std::uint64_t(vocab)));
  return ids;
}

/// A row of each kind, asked for none, one and many ids.
Call call_of(DType dtype, std::int64_t vocab, std::int64_t top) {
  Random random(std::uint64_t(vocab) * 8 + std::uint64_t(dtype));
  std::vector<std::vector<float>> rows;
  std::vector<Ids> next;
  constexpr std::size_t counts[] = {1, 0, 4, 1, 1500};
  for (std::size_t kind = 0; kind < kinds().size(); ++kind) {
    rows.push_back(row_of(kind, vocab, random));
    next.push_back(ids_of_row(counts[kind % std::size(counts)], vocab, random));
  }
  return {dtype, std::move(rows), std::move(next), std::min(top, vocab)};
}

}  // namespace

TEST_CASE("Scores are the host's within the bound - small", "[gpu][score][small]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {1, 2, 7, 31, 33, 257, 1025})
    for (const DType dtype : kDTypes) call_of(dtype, vocab, 5).check(c);
}

TEST_CASE("Scores are the host's within the bound", "[gpu][score]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {2048, 8191, 8200, 32000, 50277, 50304, 131072 + 3})
    for (const DType dtype : kDTypes) {
      call_of(dtype, vocab, 0).check(c);
      call_of(dtype, vocab, vocab == 50277 ? cuda::kMostLikely : 3).check(c);
    }
}

TEST_CASE("Scores are the host's over the largest vocabulary", "[gpu][score]") {
  Random random(3);
  std::vector<std::vector<float>> rows{row_of(0, sampling::kMostTokens, random),
                                       row_of(3, sampling::kMostTokens, random)};
  Call(DType::f32, rows, {Ids{0, 5}, Ids{std::int32_t(sampling::kMostTokens - 1)}}, 2).check(context());
}

TEST_CASE("Equal logits have equal bits wherever their row begins", "[gpu][score][small]") {
  const cuda::Context c = context();
  for (const DType dtype : kDTypes) {
    CAPTURE(to_string(dtype));
    Random random(5);
    const std::vector<float> row = row_of(1, 1027, random);
    const Call call(dtype, std::vector(17, row), std::vector(17, Ids{3, 1026}), 2);
    require_ok(call.submit(c));
    const std::vector<RowScore> scores = call.scores(call.answers());
    for (const RowScore& score : scores) {
      CHECK(score.next == scores[0].next);
      CHECK(score.top == scores[0].top);
    }
  }
}

// What the bound must not let pass: a sum that lacks an id, or has one twice.
TEST_CASE("The bound finds one id of 50304 that a sum has not", "[score]") {
  Random random(7);
  const std::vector<float> whole = row_of(3, 50304, random);
  std::vector<float> lacking = whole;
  lacking.back() = -kInfinity;
  const Ids next{0};
  const auto log_prob = [&](const std::vector<float>& row) {
    return score_row({row.data(), {std::int64_t(row.size())}, DType::f32}, next, 0).next[0].log_prob;
  };
  CHECK(std::abs(log_prob(whole) - log_prob(lacking)) > 2 * bound_of(50304, log_prob(whole)));
}

TEST_CASE("A row that has no log-probabilities says what the host says, and no other row is harmed",
          "[gpu][score][small]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {1, 7, 300, 2051})
    for (const DType dtype : kDTypes) {
      Random random(1);
      std::vector<std::vector<float>> rows;
      const auto add = [&](std::initializer_list<std::pair<std::int64_t, float>> changes) {
        std::vector<float> row = row_of(0, vocab, random);
        for (const auto& [id, x] : changes) row[std::size_t(std::min(id, vocab - 1))] = x;
        rows.push_back(row);
      };
      for (const std::int64_t id : {0, 1, 255, 1 << 20}) {
        add({{id, kNaN}});
        add({});
        add({{id, kInfinity}});
        add({{id, -kInfinity}});
        add({{id, kInfinity}, {id + 1, kNaN}});
        add({{id, kNaN}, {id / 2, kInfinity}});
      }
      rows.push_back(std::vector<float>(std::size_t(vocab), -kInfinity));
      rows.push_back(std::vector<float>(std::size_t(vocab), kNaN));
      std::vector<Ids> next(rows.size(), Ids{std::int32_t(vocab / 2)});
      Call(dtype, rows, next, std::min<std::int64_t>(2, vocab)).check(c);
    }
}

TEST_CASE("Scoring waits for the kernel that makes its logits", "[gpu][score][small][reruns]") {
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    const cuda::Context c = context(stream);
    Call call = call_of(DType::f16, 1027, 3);
    require_ok(call.submit(c));
    const std::vector<std::byte> expected = call.answers();
    const LateBytes logits(call.logits());
    for (int i = 0; i < 20; ++i) {
      call.poison();
      logits.restore(stream);
      require_ok(call.submit(c, {.early = true}));
      REQUIRE(call.answers() == expected);
    }
  }
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE("Bad arguments of scoring are refused by name", "[gpu][score][bad][small]") {
  const cuda::Context c = context();
  const Call call = call_of(DType::f16, 33, 2);
  const auto fault = [&](Code code, std::initializer_list<std::string_view> parts,
                         const std::function<void(cuda::ScoreArgs&)>& change) {
    cuda::ScoreArgs args = call.args();
    change(args);
    cuda::LaunchList launches(c);
    const std::string found = refusal_fault(cuda::prepare(args, launches), code, parts);
    CHECK(launches.empty());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    return found;
  };
  using Args = cuda::ScoreArgs;
  const auto invalid = Code::invalid_argument;
  alignas(64) static std::byte pageable[64];
  CHECK(fault(invalid, {"score: ", "'logits'", "is null"}, [](Args& a) { a.logits.data = nullptr; }) == "");
  CHECK(fault(invalid, {"score: ", "'logits'", "host memory"}, [](Args& a) { a.logits.data = pageable; }) == "");
  CHECK(fault(invalid, {"score: ", "'next_end'", "is null"}, [](Args& a) { a.next_end.data = nullptr; }) == "");
  CHECK(fault(invalid, {"score: ", "'next_end'", "shape"}, [](Args& a) { a.next_end.shape[0] -= 1; }) == "");
  CHECK(fault(invalid, {"score: ", "'next'", "is null"}, [](Args& a) { a.next.data = nullptr; }) == "");
  CHECK(fault(invalid, {"score: ", "'next_logits'", "is null"}, [](Args& a) { a.next_logits = nullptr; }) == "");
  CHECK(fault(invalid, {"score: ", "'sums'", "is null"}, [](Args& a) { a.sums = nullptr; }) == "");
  CHECK(fault(invalid, {"score: ", "'sums'", "is misaligned"},
              [](Args& a) { a.sums = reinterpret_cast<RowSum*>(reinterpret_cast<std::byte*>(a.sums) + 4); }) == "");
  CHECK(fault(invalid, {"score: ", "'likely'", "is null"}, [](Args& a) { a.likely = nullptr; }) == "");
  CHECK(fault(invalid, {"score: top must be 0 to 33, got 34"}, [](Args& a) { a.top = 34; }) == "");
  CHECK(fault(invalid, {"score: top must be 0 to 33, got -1"}, [](Args& a) { a.top = -1; }) == "");
  CHECK(fault(invalid, {"score: vocab", "1 to 2097152", "got 2097153"},
              [](Args& a) { a.logits.shape[1] = sampling::kMostTokens + 1; }) == "");
  CHECK(fault(Code::unimplemented, {"score: ", "float16, bfloat16 or float32", "got float64"}, [](Args& a) {
          a.logits.dtype = DType::f64;
          a.logits.data = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(a.logits.data) / 8 * 8);
        }) == "");
}

// --- models -----------------------------------------------------------------------------------------------------------

namespace {

constexpr std::int64_t kVocab = 333;  // rows of logits begin at addresses that are no multiple of 16 bytes

struct Small {
  ModelConfig config;
  std::shared_ptr<OwnedModelWeights> weights;

  explicit Small(DType dtype = DType::f16) {
    config = model_of(4, 64, 16, 512);
    config.name = "small";
    config.num_hidden_layers = 3;
    config.vocab_size = kVocab;
    config.max_position_embeddings = 1024;
    weights = std::make_shared<OwnedModelWeights>(procedural_model(config, dtype, 7, {}));
  }
  std::unique_ptr<Model> model(const Model::Options& o) const {
    return taken(Model::create(context(), config.name, config, weights->weights, o));
  }
};

Ids ids_of(std::int64_t count, std::uint64_t seed) {
  Random random(seed);
  Ids ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(std::int32_t(random() % kVocab));
  return ids;
}

/// The scores of a prompt's ids from `first` on, which are read in one run.
std::vector<RowScore> scores_of(Model& model, const Ids& ids, std::int64_t first, std::int64_t top,
                                std::int64_t slot = 0) {
  const std::int64_t rows = std::int64_t(ids.size()) - first;
  std::vector<Ids> next;
  for (std::size_t i = std::size_t(first); i < ids.size(); ++i) next.push_back({ids[i]});
  const Run run{.sequence = slot, .first_position = 0, .count = std::int64_t(ids.size()) - 1};
  return taken(model.score(std::span(&run, 1), std::span(ids).first(ids.size() - 1),
                           {.rows = std::span(&rows, 1), .next = next, .top = top}));
}

bool same(const RowScore& a, const RowScore& b) { return a.next == b.next && a.top == b.top; }

std::vector<PromptScore> by_scorer(std::unique_ptr<Model> model, const std::vector<ScorePrompt>& prompts,
                                   const ScoreOptions& options) {
  Scorer scorer = taken(Scorer::create(SlotLease::of_all(std::move(model)), prompts, options));
  while (!scorer.done()) require_ok(scorer.step());
  return scorer.scores();
}

/// The oracle's logits behind each id, and how far a log-probability may be from them.
struct Exact {
  Tensor logits;  // (ids, vocab)
  double allowed = 0;

  LogProbs<double> row(std::int64_t i) const {
    return taken(LogProbs<double>::of(std::span(logits.as<double>() + i * kVocab, std::size_t(kVocab))));
  }
};

Exact exact_of(const Small& small, std::span<const std::int32_t> ids) {
  const auto n = std::int64_t(ids.size());
  const auto oracle = taken(cpu_ref::Model::create(small.config, small.weights->weights, small.weights,
                                                   {.capacity = n, .chunk = n, .activation = DType::f64}));
  Condition condition{0, 0};
  oracle->measure(&condition);
  Exact exact{.logits = Tensor(DType::f64, {n, kVocab})};
  require_ok(oracle->forward(0, 0, ids, exact.logits.view<2>()));
  double largest = 0;
  for (std::int64_t i = 0; i < exact.logits.size(); ++i) largest = std::max(largest, std::abs(exact.logits.at(i)));
  // A log-probability is a logit less the log of a sum of exp, which is apart by no more than its furthest logit.
  const DType dtype = small.weights->weights.embed_in.dtype;
  exact.allowed = 2 * model_budget(small.config, dtype, condition).rel_max * largest + bound_of(kVocab, 0);
  return exact;
}

}  // namespace

TEST_CASE("model on the GPU: scores are the oracle's within the budget", "[gpu][model][score]") {
  const DType dtype = GENERATE(DType::f16, DType::bf16, DType::f32);
  CAPTURE(to_string(dtype));
  const Small small(dtype);
  const Ids ids = ids_of(301, 1);  // more rows than the device makes at a time
  const std::int64_t read = 300;
  const Exact oracle = exact_of(small, std::span(ids).first(std::size_t(read)));
  const double allowed = oracle.allowed;

  const auto model = small.model({.capacity = 512, .chunk = 128});
  const std::vector<RowScore> scores = scores_of(*model, ids, 1, 3);
  REQUIRE(std::int64_t(scores.size()) == read);
  for (std::int64_t i = 0; i < read; ++i) {
    const LogProbs<double> exact = oracle.row(i);
    const RowScore& got = scores[std::size_t(i)];
    require_ok(got.status);
    CAPTURE(i, allowed);
    const auto check = [&](double ours, std::int32_t id) { REQUIRE(std::abs(ours - exact[id]) <= allowed); };
    check(got.next.at(0).log_prob, ids[std::size_t(i + 1)]);
    REQUIRE(got.top.size() == 3);
    for (const LikelyId& likely : got.top) check(likely.log_prob, likely.id);
    REQUIRE(exact[exact.best()] - exact[got.top[0].id] <= allowed);
    REQUIRE(got.next[0].greedy == (got.top[0].id == ids[std::size_t(i + 1)]));
  }
  // The logits on the host say the same, but for the bits of a product of other rows.
  std::vector<Ids> next;
  for (std::size_t i = 1; i < ids.size(); ++i) next.push_back({ids[i]});
  const Run run{.sequence = 0, .first_position = 0, .count = read};
  const std::vector<RowScore> on_host =
      taken(model->ModelRunner::score(std::span(&run, 1), std::span(ids).first(std::size_t(read)),
                                      {.rows = std::span(&read, 1), .next = next, .top = 0}));
  for (std::size_t i = 0; i < on_host.size(); ++i)
    REQUIRE(std::abs(on_host[i].next.at(0).log_prob - scores[i].next[0].log_prob) <= 2 * allowed);
}

TEST_CASE(
    "model on the GPU: prompts of one step have the oracle's scores, whoever is beside them and however they are cut",
    "[gpu][model][score]") {
  const Small small;
  const Model::Options options{.slots = 3, .capacity = 512, .chunk = 64};
  const std::vector<ScorePrompt> prompts{{ids_of(270, 1), 1}, {ids_of(20, 2), 15}, {ids_of(2, 3), 1},
                                         {ids_of(64, 4), 63}, {ids_of(65, 5), 1},  {ids_of(130, 6), 100}};
  for (const std::int64_t piece : {300, 48}) {
    const std::vector<PromptScore> scores = by_scorer(small.model(options), prompts, {.piece = piece, .top = 2});
    const std::vector<PromptScore> again = by_scorer(small.model(options), prompts, {.piece = piece, .top = 2});
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      CAPTURE(piece, i);
      const ScorePrompt& prompt = prompts[i];
      require_ok(scores[i].status);
      REQUIRE(scores[i].ids.size() == prompt.ids.size() - std::size_t(prompt.first));
      const Exact exact = exact_of(small, std::span(prompt.ids).first(prompt.ids.size() - 1));
      for (std::size_t k = 0; k < scores[i].ids.size(); ++k) {
        const std::int64_t position = prompt.first + std::int64_t(k);
        const double theirs = exact.row(position - 1)[prompt.ids[std::size_t(position)]];
        REQUIRE(std::abs(scores[i].ids[k].log_prob - theirs) <= exact.allowed);
      }
      CHECK(scores[i].ids == again[i].ids);
      CHECK(scores[i].top == again[i].top);
    }
  }
}

TEST_CASE("model on the GPU: an invariant model gives a prompt the same scores alone and beside others, bit for bit",
          "[gpu][model][score]") {
  const DType dtype = GENERATE(DType::f16, DType::f32);
  CAPTURE(to_string(dtype));
  const Small small(dtype);
  const Model::Options options{.slots = 3, .capacity = 512, .chunk = 64, .invariant = true};
  const std::vector<ScorePrompt> prompts{{ids_of(200, 1), 1}, {ids_of(20, 2), 15}, {ids_of(2, 3), 1},
                                         {ids_of(64, 4), 63}, {ids_of(65, 5), 1},  {ids_of(130, 6), 100}};
  const std::vector<PromptScore> together = by_scorer(small.model(options), prompts, {.top = 2});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    CAPTURE(i);
    require_ok(together[i].status);
    const std::vector<PromptScore> alone = by_scorer(small.model(options), {prompts[i]}, {.top = 2});
    CHECK(together[i].ids == alone[0].ids);
    CHECK(together[i].top == alone[0].top);
  }
}

TEST_CASE("model on the GPU: a lone prompt's scores depend on neither its slot nor how many ids are asked for",
          "[gpu][model][score]") {
  const Small small;
  const Ids ids = ids_of(270, 1);
  // Fewer rows of the same run. The slot keeps the logits that it had.
  const auto model = small.model({.slots = 3, .capacity = 512, .chunk = 64});
  require_ok(model->prefill(1, 0, ids_of(9, 7)));
  const Tensor own = taken(model->logits(1));
  const std::vector<RowScore> all = scores_of(*model, ids, 1, 0), last = scores_of(*model, ids, 260, 0);
  for (std::size_t i = 0; i < last.size(); ++i) CHECK(same(last[i], all[all.size() - last.size() + i]));
  const std::vector<RowScore> elsewhere = scores_of(*model, ids, 1, 0, 2);
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(same(elsewhere[i], all[i]));
  CHECK(same_bits(taken(model->logits(1)), own));
  CHECK(model->length(0) == 269);
}

TEST_CASE("model on the GPU: scores with a visitor, of many likely ids, of no rows, and of rows that have none",
          "[gpu][model][score]") {
  const Small small;
  const auto model = small.model({.slots = 2, .capacity = 96, .chunk = 16});
  const Ids ids = ids_of(40, 8);
  const std::vector<RowScore> plain = scores_of(*model, ids, 30, cuda::kMostLikely);
  const std::vector<RowScore> more = scores_of(*model, ids, 30, cuda::kMostLikely + 1);  // by way of the host
  REQUIRE(more[0].top.size() == std::size_t(cuda::kMostLikely + 1));
  for (std::size_t i = 0; i < plain.size(); ++i)
    CHECK(more[i].next[0].log_prob == Approx(plain[i].next[0].log_prob).margin(0.05));
  std::size_t visits = 0;
  model->watch([&](const ModelSite&, std::span<const ModelRunner::SiteTensor>) {
    ++visits;
    return Status();
  });
  CHECK(scores_of(*model, ids, 30, 1).size() == 10);
  CHECK(visits > 0);
  model->watch({});

  const Run run{.sequence = 1, .first_position = 0, .count = 5};
  const std::int64_t none = 0;
  CHECK(taken(model->score(std::span(&run, 1), std::span(ids).first(5), {.rows = std::span(&none, 1), .next = {}}))
            .empty());
  CHECK(model->length(1) == 5);
  const std::int64_t rows = 2;
  const std::vector<Ids> bad{{1}, {kVocab}};
  CHECK(refusal_fault(
            model->score(std::span(&run, 1), std::span(ids).first(5), {.rows = std::span(&rows, 1), .next = bad})
                .status(),
            Code::invalid_argument, {"next[1]", "0 to 332", "333"}) == "");
  const std::int64_t too_many = 6;
  const std::vector<Ids> six(6, Ids{1});
  CHECK(refusal_fault(
            model->score(std::span(&run, 1), std::span(ids).first(5), {.rows = std::span(&too_many, 1), .next = six})
                .status(),
            Code::invalid_argument, {"expected 0 to 5 rows, got 6"}) == "");

  // An id whose row of the embedding is NaN.
  const AnyView<2> table(const_cast<void*>(small.weights->weights.embed_in.data), small.weights->weights.embed_in.shape,
                         DType::f16);
  constexpr std::uint16_t nan = 0x7e00;
  std::memcpy(static_cast<std::byte*>(table.data) + 5 * table.shape[1] * 2, &nan, sizeof nan);
  const std::vector<PromptScore> scores =
      by_scorer(small.model({.slots = 2, .capacity = 96}), {{{1, 2, 3}, 1}, {{1, 2, 5, 4}, 1}}, {});
  require_ok(scores[0].status);
  CHECK(scores[0].ids.size() == 2);
  CHECK(refusal_fault(scores[1].status, Code::invalid_argument, {"score: ids[3]: logits[0] is NaN"}) == "");
  CHECK(scores[1].ids.size() == 2);
}
