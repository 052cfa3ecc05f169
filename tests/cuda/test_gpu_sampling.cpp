// The sampler on the GPU chooses what the CPU's chooses, always: its arithmetic bit by bit, its choices over random and
// hostile logits, what it refuses, and the ids that it remembers.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <random>

#include "cpu_ref/sample.hpp"
#include "cuda/ops/sample/sample.hpp"
#include "tests/cuda/device_tensors.hpp"
#include "tests/cuda/late_bytes.hpp"
#include "tests/cuda/sampling_bits.hpp"
#include "tests/support/refusal.hpp"

using namespace cf;
using namespace cf::test;
using cuda::kNoToken;
using cuda::SlotSampling;

namespace {

using Ids = std::vector<std::int32_t>;
using Random = std::mt19937_64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int32_t kUntouched = -77;
constexpr std::uint32_t kSeenByNobody = 0xdeadbeef;
constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}

template <class T>
const T& pick(const std::vector<T>& from, Random& random) {
  return from[random() % from.size()];
}

struct Slot {
  std::vector<float> logits;  // before they are rounded to the call's dtype
  Sampling settings;
  Ids history;
  std::uint64_t sequence = 0;
  std::int32_t position = 0;
  bool chooses = true;
};

std::string describe(const Slot& s) {
  return to_string(s.settings) + ", " + std::to_string(s.logits.size()) + " logits, history of " +
         std::to_string(s.history.size()) + ", sequence " + std::to_string(s.sequence) + ", position " +
         std::to_string(s.position);
}

/// One call of the sampler on the device, over slots with logits of one size. NaN lies before and behind the logits,
/// and guard words before and behind what the kernel writes.
class Call {
 public:
  Call(DType dtype, std::vector<Slot> slots) : dtype_(dtype), slots_(std::move(slots)) {
    vocab_ = std::int64_t(slots_.at(0).logits.size());
    for (Slot& s : slots_) require_vocab(s);
    for (const Slot& s : slots_) {
      std::vector<std::uint32_t> row(words_of_slot(), s.chooses && penalises(s) ? 0 : kSeenByNobody);
      if (s.chooses && penalises(s))
        for (const auto id : s.history) row[std::size_t(id) / 32] |= 1u << id % 32;
      seen_.insert(seen_.end(), row.begin(), row.end());
    }
    bring_logits();
    bring_seen();
    bring_settings();
  }

  std::vector<Slot>& slots() { return slots_; }
  cuda::SampleArgs args() const {
    return {.logits = {logits_->data() + logits_offset(), {std::int64_t(slots_.size()), vocab_}, dtype_},
            .settings = reinterpret_cast<const SlotSampling*>(settings_->data()),
            .positions = reinterpret_cast<const std::int32_t*>(positions_->data()),
            .seen = reinterpret_cast<std::uint32_t*>(device_seen_->data()) + kGuard,
            .chosen = reinterpret_cast<std::int32_t*>(chosen_->data()) + kGuard};
  }
  const DeviceBytes& logits() const { return *logits_; }

  /// Takes over new logits of the slots.
  void bring_logits() {
    // One element more than a multiple of 16 bytes, so that rows begin at any address.
    std::vector<std::byte> bytes(logits_offset() + slots_.size() * std::size_t(vocab_) * size_bytes(dtype_) + 64);
    dispatch_float(dtype_, [&](auto zero) {
      using T = decltype(zero);
      auto* const all = reinterpret_cast<T*>(bytes.data());
      std::fill_n(all, bytes.size() / sizeof(T), narrow<T>(double(kNaN)));
      T* next = all + logits_offset() / sizeof(T);
      for (Slot& s : slots_)
        for (float& x : s.logits) {
          *next = narrow<T>(double(x));
          x = widen<float>(*next++);
        }
    });
    bring(logits_, bytes);
  }
  /// Takes over new settings, sequences and positions of the slots.
  void bring_settings() {
    std::vector<SlotSampling> settings;
    Ids positions;
    for (const Slot& s : slots_) {
      settings.push_back(
          {.rule = s.settings.rule(), .sequence = s.sequence, .chooses = s.chooses, .penalises = penalises(s)});
      positions.push_back(s.position);
    }
    bring(settings_, bytes_of(settings));
    bring(positions_, bytes_of(positions));
    bring(chosen_, bytes_of(Ids(slots_.size() + 2 * kGuard, kUntouched)));
  }

  Status submit(const cuda::Context& c, const cuda::Submission& how = {}) const {
    cuda::LaunchList launches(c);
    CF_TRY(cuda::prepare(args(), launches));
    return launches.submit(c.stream(), how);
  }
  /// The chosen ids, once all of the device's work is done.
  Ids chosen() const {
    require_cuda(cudaDeviceSynchronize());
    Ids all(slots_.size() + 2 * kGuard);
    chosen_->fetch(all.data());
    const auto untouched = [](std::int32_t id) { return id == kUntouched; };
    CHECK(std::all_of(all.begin(), all.begin() + kGuard, untouched));
    CHECK(std::all_of(all.end() - kGuard, all.end(), untouched));
    return {all.begin() + kGuard, all.end() - kGuard};
  }
  /// Runs the call and compares what it chose, and what it remembers, with the CPU. Chosen ids join the histories.
  Ids check(const cuda::Context& c) {
    require_ok(submit(c));
    const Ids got = chosen();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& s = slots_[i];
      const std::int32_t expected = expected_of(s);
      if (got[i] != expected) {
        INFO("slot " << i << ", " << to_string(dtype_) << ": " << describe(s));
        REQUIRE(got[i] == expected);
      }
      if (!s.chooses || expected == kNoToken) continue;
      s.history.push_back(expected);
      if (penalises(s)) seen_[i * words_of_slot() + std::size_t(expected) / 32] |= 1u << expected % 32;
    }
    check_seen();
    return got;
  }
  void check_seen() const {
    std::vector<std::uint32_t> all(seen_.size() + 2 * kGuard);
    device_seen_->fetch(all.data());
    REQUIRE(all == with_guards());
  }

  static std::int32_t penalises(const Slot& s) { return s.settings.repetition_penalty != 1; }
  /// The CPU's choice.
  static std::int32_t expected_of(const Slot& s) {
    if (!s.chooses) return kUntouched;
    const auto id = cpu_ref::sample(std::span<const float>(s.logits), s.settings, s.history, s.sequence, s.position);
    return id ? *id : kNoToken;
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 16;

  std::size_t words_of_slot() const { return std::size_t(cuda::seen_words(vocab_)); }
  std::size_t logits_offset() const { return 64 + size_bytes(dtype_); }
  void require_vocab(const Slot& s) const { REQUIRE(std::int64_t(s.logits.size()) == vocab_); }
  static void bring(std::optional<DeviceBytes>& to, std::span<const std::byte> from) {
    if (to)
      to->bring(from);
    else
      to.emplace(from);
    require_cuda(cudaDeviceSynchronize());
  }
  std::vector<std::uint32_t> with_guards() const {
    std::vector<std::uint32_t> all(seen_.size() + 2 * kGuard, kSeenByNobody);
    std::copy(seen_.begin(), seen_.end(), all.begin() + kGuard);
    return all;
  }
  void bring_seen() { bring(device_seen_, bytes_of(with_guards())); }

  DType dtype_;
  std::vector<Slot> slots_;
  std::int64_t vocab_ = 0;
  std::vector<std::uint32_t> seen_;  // as it must be on the device
  std::optional<DeviceBytes> logits_, settings_, positions_, device_seen_, chosen_;
};

// Logits of all kinds. They stay below float16's largest number.

using MakeRow = std::function<float(Random&, std::int64_t id)>;

float normal(Random& random, float mean, float deviation) {
  return std::normal_distribution<float>(mean, deviation)(random);
}

const std::vector<MakeRow>& kinds() {
  static const std::vector<MakeRow> all{
      [](Random& r, std::int64_t) { return normal(r, 0, 2); },
      [](Random& r, std::int64_t) { return normal(r, -20, 6); },
      [](Random& r, std::int64_t) { return std::round(normal(r, 0, 2)); },  // ties
      [](Random& r, std::int64_t) { return r() % 5 ? 1.5f : 1.25f; },       // ties at nearly every cut-off
      [](Random&, std::int64_t) { return -2.5f; },
      [](Random& r, std::int64_t id) { return id % 3 == 1 ? normal(r, 0, 3) : -kInfinity; },
      [](Random& r, std::int64_t id) { return id == 0 || r() % 7 == 0 ? -1.0f : -kInfinity; },
      [](Random& r, std::int64_t) { return normal(r, 0, 12000); },  // few weights above 0
      [](Random& r, std::int64_t id) { return normal(r, 0, 2) + 20 * (id % 61 == 3); },
      [](Random& r, std::int64_t) { return r() % 2 ? 0.0f : -0.0f; },
      [](Random& r, std::int64_t) { return std::bit_cast<float>(std::uint32_t(r() & 0x80000fff)); },  // subnormal
      [](Random& r, std::int64_t) { return float(double(r() % 400) * (std::log(2.0) / 8)); },
      [](Random&, std::int64_t id) { return float(id % 4096) * 0x1p-7f; },
      [](Random&, std::int64_t id) { return float(id) * -0x1p-9f; },
      [](Random& r, std::int64_t) { return 1 + float(r() % 256) * 0x1p-23f; },  // float32 alone tells them apart
  };
  return all;
}

std::vector<float> row_of(const MakeRow& make, std::int64_t vocab, Random& random) {
  std::vector<float> row;
  for (std::int64_t id = 0; id < vocab; ++id) row.push_back(std::clamp(make(random, id), -kInfinity, 60000.0f));
  if (std::all_of(row.begin(), row.end(), [](float x) { return x == -kInfinity; })) row.back() = 1;
  return row;
}
/// One finite logit.
std::vector<float> lonely_row(std::int64_t vocab, Random& random) {
  std::vector<float> row(std::size_t(vocab), -kInfinity);
  row[random() % row.size()] = normal(random, 0, 5);
  return row;
}

/// The settings that do anything, each with each.
const std::vector<Sampling>& all_settings() {
  static const std::vector<Sampling> all = [] {
    std::vector<Sampling> made;
    for (const double penalty : {1.0, 1.3, 0.8}) {
      made.push_back({.repetition_penalty = penalty});
      for (const double temperature : {1.0, 0.3, 1.9})
        for (const int top_k : {0, 1, 5, 50})
          for (const double top_p : {1.0, 0.93, 0.3})
            for (const double min_p : {0.0, 0.02, 1.0})
              made.push_back({.temperature = temperature,
                              .top_k = top_k,
                              .top_p = top_p,
                              .min_p = min_p,
                              .repetition_penalty = penalty});
    }
    for (const double top_p : {1e-300, 1e-9, 0.5, 0.999999, 1 - 1e-16})
      made.push_back({.temperature = 1, .top_p = top_p});
    for (const int top_k : {2, 30, 31, 32, 33, 1000, 1 << 30}) made.push_back({.temperature = 1, .top_k = top_k});
    for (const double temperature : {1e-3, 1e-30, 1e4, 1e38}) made.push_back({.temperature = temperature});
    return made;
  }();
  return all;
}

Slot slot_of(std::vector<float> logits, const Sampling& settings, Random& random) {
  Slot s{.logits = std::move(logits),
         .settings = settings,
         .history = {},
         .sequence = random() >> random() % 64,
         .position = std::int32_t(random() >> (33 + random() % 31))};
  s.settings.seed = random() >> random() % 64;
  if (settings.repetition_penalty != 1)
    for (std::uint64_t n = random() % 40; n > 0; --n) s.history.push_back(std::int32_t(random() % s.logits.size()));
  return s;
}

/// `draws` slots of each kind of logits, each with settings(i, random) of their own. Some hold no sequence.
std::vector<Slot> slots_of(std::int64_t vocab, std::size_t draws, Random& random,
                           const std::function<const Sampling&(std::size_t, Random&)>& settings) {
  std::vector<Slot> slots;
  const auto add = [&](std::vector<float> row, std::size_t i) {
    slots.push_back(slot_of(std::move(row), settings(i, random), random));
    slots.back().chooses = slots.size() % 11 != 0;
  };
  for (std::size_t i = 0; i < draws; ++i) {
    for (const MakeRow& make : kinds()) add(row_of(make, vocab, random), i);
    add(lonely_row(vocab, random), i);
  }
  return slots;
}

}  // namespace

namespace {

std::vector<SamplingInput> arithmetic_inputs(std::size_t n) {
  Random random(1);
  const auto any_float = [&] {
    for (;;)
      if (const auto x = std::bit_cast<float>(std::uint32_t(random())); !std::isnan(x)) return x;
  };
  const auto any_normal = [&] {
    for (;;)
      if (const float x = std::abs(any_float()); std::isnormal(x)) return x;
  };
  constexpr float least = std::numeric_limits<float>::min(), most = std::numeric_limits<float>::max(),
                  subnormal = std::numeric_limits<float>::denorm_min();
  const std::vector<float> edges{0.0f,
                                 -0.0f,
                                 kInfinity,
                                 -kInfinity,
                                 subnormal,
                                 -subnormal,
                                 least,
                                 -least,
                                 most,
                                 -most,
                                 std::nextafter(least, 0.0f),
                                 1.0f,
                                 -1.0f,
                                 std::nextafter(1.0f, 2.0f),
                                 32.0f,
                                 -32.0f},
      scales{1.0f, 1.3f, 0.7f, 0.8f, 100.0f, 1e-3f, least, most, std::nextafter(1.0f, 0.0f)};
  const std::uint64_t most_weight = std::uint64_t(1) << sampling::kWeightBits;
  const std::vector<std::uint64_t> words{
      0,     1,           most_weight,   most_weight - 1, most_weight * sampling::kMostTokens,
      ~0ull, ~0ull << 32, 0xffffffffull, 1ull << 63};
  const auto any_word = [&] { return random() % 4 ? random() >> random() % 64 : pick(words, random); };
  std::vector<SamplingInput> all;
  while (all.size() < n) {
    SamplingInput in{.logit = normal(random, 0, 8),
                     .highest = normal(random, 10, 8),
                     .repetition_penalty = random() % 4 ? pick(scales, random) : any_normal(),
                     .temperature = random() % 4 ? pick(scales, random) : any_normal(),
                     .id = std::int32_t(random() >> (33 + random() % 31)),
                     .seen = std::int32_t(random() % 2),
                     .a = any_word(),
                     .b = any_word(),
                     .top_p_rest = any_word(),
                     .seed = any_word(),
                     .sequence = any_word(),
                     .position = any_word()};
    switch (random() % 6) {
      case 0: in.logit = any_float(); break;
      case 1: in.logit = pick(edges, random); break;
      case 2: in.highest = in.logit = pick(edges, random); break;
      case 3:  // where one halving of the weight passes into the next
        in.highest = random() % 2 ? 0.0f : std::round(in.highest);
        in.logit = in.highest - float(double(random() % 46) * std::log(2.0));
        for (std::uint64_t steps = random() % 40; steps > 0; --steps)
          in.logit = std::nextafter(in.logit, random() % 2 ? -100.0f : 100.0f);
        in.temperature = 1;
        break;
      default: break;
    }
    if (in.highest == kInfinity) in.highest = most;
    all.push_back(in);
  }
  return all;
}

void check_arithmetic(std::size_t n) {
  const std::vector<SamplingInput> in = arithmetic_inputs(n);
  std::vector<SamplingBits> expected(n), got(n);
  for (std::size_t i = 0; i < n; ++i) expected[i] = sampling_bits(in[i]);
  const DeviceBytes device_in(bytes_of(in)), device_bits(bytes_of(got));
  sampling_bits_on_device(reinterpret_cast<const SamplingInput*>(device_in.data()),
                          reinterpret_cast<SamplingBits*>(device_bits.data()), int(n), nullptr);
  require_cuda(cudaGetLastError());
  require_cuda(cudaDeviceSynchronize());
  device_bits.fetch(got.data());
  std::array<std::size_t, std::size(SamplingBits{}.word)> different{};
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t w = 0; w < different.size(); ++w) different[w] += got[i].word[w] != expected[i].word[w];
  for (std::size_t w = 0; w < different.size(); ++w) {
    INFO("result " << w << " of sampling_bits()");
    CHECK(different[w] == 0);
  }
}

/// Compares the choices of all settings, a slot each in one launch, with the CPU's, for each vocabulary and dtype.
void check_settings(const std::vector<Sampling>& settings, std::initializer_list<std::int64_t> vocabs) {
  const cuda::Context c = context();
  for (const std::int64_t vocab : vocabs)
    for (const DType dtype : kDTypes) {
      CAPTURE(vocab, to_string(dtype));
      Random random(std::uint64_t(vocab) * 8 + std::uint64_t(dtype));
      Call call(dtype, slots_of(vocab, settings.size(), random,
                                [&](std::size_t i, Random&) -> const Sampling& { return settings[i]; }));
      call.check(c);
    }
}

}  // namespace

TEST_CASE("The arithmetic of sampling has the same bits on the device - small", "[gpu][sampling][small]") {
  check_arithmetic(4096);
}
TEST_CASE("The arithmetic of sampling has the same bits on the device", "[gpu][sampling]") {
  check_arithmetic(std::size_t(1) << 20);
}

TEST_CASE("Choices are the CPU's over small vocabularies and all settings", "[gpu][sampling]") {
  check_settings(all_settings(), {1, 2, 31, 33, 257, 2048});
}

TEST_CASE("Choices are the CPU's over large vocabularies", "[gpu][sampling]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {50304, 50280, 50277, 131072 + 3})
    for (const DType dtype : kDTypes) {
      CAPTURE(vocab, to_string(dtype));
      Random random(std::uint64_t(vocab) * 8 + std::uint64_t(dtype));
      Call call(dtype, slots_of(vocab, 16, random, [](std::size_t i, Random& r) -> const Sampling& {
                  return i == 0 ? all_settings()[0] : pick(all_settings(), r);
                }));
      call.check(c);
    }
}

TEST_CASE("Choices are the CPU's over the largest vocabulary", "[gpu][sampling]") {
  const cuda::Context c = context();
  Random random(1);
  std::vector<Slot> slots;
  const auto add = [&](std::size_t kind, const Sampling& settings) {
    slots.push_back(slot_of(row_of(kinds()[kind], sampling::kMostTokens, random), settings, random));
  };
  add(0, {});
  add(0, {.temperature = 1});
  add(4, {.temperature = 1});  // all equal: the largest sum of weights
  add(4, {.temperature = 1, .top_k = 1'500'000, .top_p = 0.7});
  add(2, {.temperature = 1.2, .top_k = 100, .top_p = 0.9, .min_p = 0.01, .repetition_penalty = 1.3});
  Call(DType::f32, std::move(slots)).check(c);
}

TEST_CASE("Choices are the CPU's over thousands of seeds, sequences and positions", "[gpu][sampling]") {
  const cuda::Context c = context();
  Random random(1);
  for (const std::int64_t vocab : {31, 257, 2048}) {
    std::vector<Slot> slots;
    for (const Sampling& settings :
         {Sampling{.temperature = 1}, Sampling{.temperature = 0.7, .top_k = 20},
          Sampling{.temperature = 1.5, .top_p = 0.8}, Sampling{.temperature = 1, .min_p = 0.1},
          Sampling{.temperature = 0.9, .top_k = 40, .top_p = 0.95, .min_p = 0.02}, Sampling{}})
      for (const std::size_t kind : {0, 2, 3, 4, 11})
        slots.push_back(slot_of(row_of(kinds()[kind], vocab, random), settings, random));
    Call call(DType::f32, std::move(slots));
    Ids first;
    bool all_same = true;
    for (int draw = 0; draw < 100; ++draw) {
      for (Slot& s : call.slots()) {
        const std::uint64_t which = random() % 3;
        if (which == 0) ++s.position;
        if (which == 1) s.sequence = random();
        if (which == 2) s.settings.seed = random();
        s.history.clear();  // no slot penalises
      }
      call.bring_settings();
      const Ids got = call.check(c);
      if (draw == 0) first = got;
      all_same &= got == first;
    }
    CHECK_FALSE(all_same);
  }
}

TEST_CASE("A draw meets its target exactly", "[gpu][sampling][small]") {
  // With seed 0 the random bits of these are 2^63 and 2^63 - 1: Philox is a bijection of its counter. Of n equal tokens
  // the target of the one is what the first n / 2 weights sum to, and that of the other is 1 less.
  constexpr std::uint64_t half = std::uint64_t(1) << 63, sequence = 0xf415967308659af7,
                          sequence_less = 0x1ee72378a0e174f7;
  constexpr std::int32_t position = 1830957059, position_less = 1267825289;
  STATIC_REQUIRE(sampling::random_bits(0, sequence, position) == half);
  STATIC_REQUIRE(sampling::random_bits(0, sequence_less, position_less) == half - 1);
  const cuda::Context c = context();
  for (const std::int32_t vocab : {2, 62, 64, 66, 2048, 5030}) {
    const std::vector<float> row(std::size_t(vocab), 0.5f);
    const Sampling settings{.temperature = 1};
    Call call(DType::f32, {{row, settings, {}, sequence, position}, {row, settings, {}, sequence_less, position_less}});
    CHECK(call.check(c) == Ids{vocab / 2, vocab / 2 - 1});
  }
}

TEST_CASE("Choices are the CPU's - small", "[gpu][sampling][small]") {
  const std::vector<Sampling> settings{{},
                                       {.repetition_penalty = 1.3},
                                       {.temperature = 1},
                                       {.temperature = 0.7, .top_k = 5, .repetition_penalty = 0.8},
                                       {.temperature = 1.3, .top_p = 0.7},
                                       {.temperature = 1, .top_k = 40, .top_p = 0.9, .min_p = 0.02}};
  check_settings(settings, {1, 33, 1027});
}

TEST_CASE("The sampler waits for the kernel that makes its logits, and chooses the same again",
          "[gpu][sampling][small][reruns]") {
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    const cuda::Context c = context(stream);
    Random random(1);
    Call call(DType::f16, slots_of(1027, 2, random, [](std::size_t i, Random&) -> const Sampling& {
                static const Sampling settings[] = {{}, {.temperature = 1, .top_k = 40, .top_p = 0.9}};
                return settings[i];
              }));
    const Ids expected = call.check(c);
    const LateBytes logits(call.logits());
    for (int i = 0; i < 20; ++i) {
      call.bring_settings();
      logits.restore(stream);
      require_ok(call.submit(c, {.early = true}));
      REQUIRE(call.chosen() == expected);
    }
  }
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE("What the CPU refuses chooses no token, and no other slot is harmed", "[gpu][sampling][small]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {1, 7, 300, 2051})
    for (const DType dtype : kDTypes) {
      CAPTURE(vocab, to_string(dtype));
      Random random(1);
      std::vector<Slot> slots;
      std::vector<bool> refused;
      const auto add = [&](bool is_refused, const Sampling& settings, const std::function<void(Slot&)>& change) {
        Slot s = slot_of(row_of(kinds()[0], vocab, random), settings, random);
        change(s);
        slots.push_back(std::move(s));
        refused.push_back(is_refused);
      };
      const auto put = [](std::size_t id, float x) {
        return [=](Slot& s) { s.logits[std::min(id, s.logits.size() - 1)] = x; };
      };
      const auto fill = [](float x) { return [=](Slot& s) { std::fill(s.logits.begin(), s.logits.end(), x); }; };
      const auto nothing = [](Slot&) {};
      for (const Sampling& settings :
           {Sampling{}, Sampling{.temperature = 1}, Sampling{.temperature = 1, .top_k = 3, .top_p = 0.5},
            Sampling{.temperature = 0.5, .repetition_penalty = 1.2}}) {
        for (const std::size_t id : {0, 1, 255, 256, 1 << 20}) {
          add(true, settings, put(id, kNaN));
          add(false, settings, nothing);
          add(true, settings, put(id, -kNaN));
          add(true, settings, put(id, kInfinity));
          add(vocab == 1, settings, put(id, -kInfinity));
        }
        add(true, settings, fill(-kInfinity));
        add(true, settings, fill(kInfinity));
        add(true, settings, fill(kNaN));
        add(true, settings, [](Slot& s) { s.position = -1; });
        add(false, settings, [](Slot& s) { s.position = 0; });
        add(false, settings, [](Slot& s) { s.position = std::numeric_limits<std::int32_t>::max(); });
      }
      // A score beyond float32: above it refused, below it never chosen.
      add(true, {.temperature = 1e-36}, put(3, 60000));
      add(vocab == 1, {.temperature = 1e-36}, [&](Slot& s) {
        fill(0.001f)(s);
        put(3, -60000)(s);
      });
      add(true, {.repetition_penalty = 1e-36}, [&](Slot& s) {
        put(3, 60000)(s);
        s.history = {std::int32_t(std::min<std::int64_t>(3, vocab - 1))};
      });
      add(false, {.repetition_penalty = 1e-36}, [&](Slot& s) {
        put(3, 60000)(s);
        s.history.clear();
      });
      Call call(dtype, std::move(slots));
      const Ids got = call.check(c);
      for (std::size_t i = 0; i < got.size(); ++i) {
        INFO("slot " << i << ": " << describe(call.slots()[i]));
        REQUIRE((got[i] == kNoToken) == refused[i]);
      }
    }
}

TEST_CASE("The repetition penalty follows the ids that the kernel remembers", "[gpu][sampling][small]") {
  const cuda::Context c = context();
  for (const std::int64_t vocab : {40, 3003})
    for (const DType dtype : kDTypes) {
      CAPTURE(vocab, to_string(dtype));
      Random random(1);
      std::vector<Slot> slots;
      for (const Sampling& settings :
           {Sampling{.repetition_penalty = 1.3}, Sampling{.repetition_penalty = 0.7}, Sampling{},
            Sampling{.temperature = 0.8, .repetition_penalty = 1.5},
            Sampling{.temperature = 1, .top_k = 7, .repetition_penalty = 1.2},
            Sampling{.temperature = 1.2, .top_p = 0.6, .min_p = 0.05, .repetition_penalty = 0.9}})
        for (const std::size_t kind : {0, 2})
          slots.push_back(slot_of(row_of(kinds()[kind], vocab, random), settings, random));
      Call call(dtype, std::move(slots));
      // The logits stay the same half of the time, so that chosen ids come again.
      for (int token = 0; token < 20; ++token) {
        CAPTURE(token);
        for (Slot& s : call.slots()) {
          ++s.position;
          if (token % 2)
            for (float& x : s.logits) x += normal(random, 0, 0.5f);
        }
        call.bring_logits();
        call.bring_settings();
        call.check(c);
      }
    }
}

TEST_CASE("Bad arguments of the sampler are refused by name", "[gpu][sampling][bad][small]") {
  const cuda::Context c = context();
  Random random(1);
  const Call call(DType::f16,
                  slots_of(33, 1, random, [](std::size_t, Random&) -> const Sampling& { return all_settings()[0]; }));
  const auto fault = [&](Code code, std::initializer_list<std::string_view> parts,
                         const std::function<void(cuda::SampleArgs&)>& change) {
    cuda::SampleArgs args = call.args();
    change(args);
    cuda::LaunchList launches(c);
    const std::string found = refusal_fault(cuda::prepare(args, launches), code, parts);
    CHECK(launches.empty());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    return found;
  };
  alignas(64) static std::byte pageable[64];
  const auto change_each = [&](std::string_view name, auto member, std::size_t alignment) {
    INFO(name);
    const std::string quoted = "'" + std::string(name) + "'";
    const auto set = [&](std::byte* (*to)(std::byte*, std::size_t)) {
      return [=](cuda::SampleArgs& a) {
        auto& pointer = member(a);
        using Pointer = std::remove_reference_t<decltype(pointer)>;
        auto* const old = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(pointer));
        pointer = reinterpret_cast<Pointer>(to(old, alignment));
      };
    };
    CHECK(fault(Code::invalid_argument, {"sample: ", quoted, "is null"},
                set([](std::byte*, std::size_t) -> std::byte* { return nullptr; })) == "");
    CHECK(fault(Code::invalid_argument, {"sample: ", quoted, "is misaligned"},
                set([](std::byte* p, std::size_t bytes) { return p + bytes / 2; })) == "");
    CHECK(fault(Code::invalid_argument, {"sample: ", quoted, "points to host memory"},
                set([](std::byte*, std::size_t) -> std::byte* { return pageable; })) == "");
  };
  change_each(
      "logits", [](cuda::SampleArgs& a) -> const void*& { return a.logits.data; }, 2);
  change_each(
      "settings", [](cuda::SampleArgs& a) -> const SlotSampling*& { return a.settings; }, alignof(SlotSampling));
  change_each(
      "positions", [](cuda::SampleArgs& a) -> const std::int32_t*& { return a.positions; }, 4);
  change_each(
      "seen", [](cuda::SampleArgs& a) -> std::uint32_t*& { return a.seen; }, 4);
  change_each(
      "chosen", [](cuda::SampleArgs& a) -> std::int32_t*& { return a.chosen; }, 4);

  const auto with_vocab = [](std::int64_t vocab) { return [=](cuda::SampleArgs& a) { a.logits.shape[1] = vocab; }; };
  CHECK(fault(Code::invalid_argument, {"sample: vocab", "1 to 2097152", "got 2097153"},
              with_vocab(sampling::kMostTokens + 1)) == "");
  CHECK(fault(Code::invalid_argument, {"sample: 'logits'", "at least 1"}, with_vocab(0)) == "");
  CHECK(fault(Code::invalid_argument, {"sample: 'logits'", "at least 1"},
              [](cuda::SampleArgs& a) { a.logits.shape[0] = 0; }) == "");
  CHECK(
      fault(Code::unimplemented, {"sample: ", "float16, bfloat16 or float32", "got float64"}, [](cuda::SampleArgs& a) {
        a.logits.dtype = DType::f64;
        a.logits.data = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(a.logits.data) / 8 * 8);
      }) == "");
  CHECK(fault(Code::invalid_argument, {"sample: 'logits'", "dtype int32"}, [](cuda::SampleArgs& a) {
          a.logits.dtype = DType::i32;
          a.logits.data = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(a.logits.data) / 8 * 8);
        }) == "");
}
