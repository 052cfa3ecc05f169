#pragma once
// Random schedules of a decoder, and what every sequence of one must be given: the ids that it has alone.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/model/decoder.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/taken.hpp"

namespace cf::test {

/// What a user does with a decoder. Numbers are taken modulo what there is, so that any part of a list is a list too.
struct Operation {
  enum Kind { add, fork, decode, prefill, drop } kind;
  std::uint32_t a = 0, b = 0;
};
inline std::string to_string(const Operation& o) {
  static constexpr const char* names[] = {"add", "fork", "decode", "prefill", "drop"};
  return std::string(names[o.kind]) + "(" + std::to_string(o.a) + ", " + std::to_string(o.b) + ")";
}

/// A decoder of one schedule. Prompts have a multiple of `scale` ids.
struct Schedule {
  std::int64_t slots = 1, chunk = 1, pages = 0, page_entries = 1, scale = 1;
  DecoderOptions decoder{};
  std::vector<Operation> operations{};
};

/// The slots of a schedule, at most, and the entries of a slot by the schedule's scale.
inline constexpr std::int64_t kScheduleSlots = 5, kScheduleCapacity = 32;
/// The ids of a prompt, at most, by the schedule's scale, and those that a sequence is given.
inline constexpr std::uint32_t kSchedulePrompt = 23;
inline constexpr std::int64_t kScheduleNewTokens = 9;

inline Schedule random_schedule(std::mt19937& random, std::int64_t scale) {
  const auto below = [&](std::uint32_t n) { return std::uint32_t(random() % n); };
  Schedule s;
  s.scale = scale;
  s.slots = 1 + below(kScheduleSlots);
  s.chunk = scale * (1 + below(20));
  if (below(4)) {
    s.page_entries = 1 + below(8);
    // From the pages of one full sequence to those of all.
    const std::int64_t one = (kScheduleCapacity + s.page_entries - 1) / s.page_entries;
    s.pages = one + below(std::uint32_t(one * 2));
  }
  if (below(3)) s.decoder.step_tokens = below(3) ? scale * (1 + below(24)) : 0;
  s.decoder.share_prefixes = below(2);
  for (std::uint32_t n = 3 + below(16); n > 0; --n) {
    const std::uint32_t kind = below(10);
    s.operations.push_back({kind < 4   ? Operation::add
                            : kind < 6 ? Operation::fork
                            : kind < 8 ? Operation::decode
                            : kind < 9 ? Operation::prefill
                                       : Operation::drop,
                            std::uint32_t(random()), std::uint32_t(random())});
  }
  return s;
}

/// How a sequence of a schedule is continued, by its id and its tokens.
using OptionsOf = std::function<SequenceOptions(std::uint64_t, std::int64_t)>;
inline SequenceOptions sampled(std::uint64_t id, std::int64_t tokens) {
  return {.sampling = {.temperature = 1.2, .seed = 5}, .id = id, .max_new_tokens = tokens};
}

/// What each sequence should be given. A decoder of one slot makes the sequence's ids, without drafts, and their log-probabilities
/// where the sequence's options ask for them. Both are compared bit by bit. Answers are kept by prompt and id.
class Alone {
 public:
  explicit Alone(Decoder decoder) : decoder_(std::move(decoder)) {}
  virtual ~Alone() = default;

  /// "" where a sequence has what it should be given, or the first of it where it has not ended.
  std::string fault(const std::vector<std::int32_t>& prompt, const SequenceOptions& o,
                    const std::vector<std::int32_t>& ids, const std::vector<TokenLogprobs>& logprobs, bool has_ended) {
    const auto& [expected, expected_logprobs] = given(prompt, o);
    const auto most = std::size_t(o.max_new_tokens);
    if (ids.size() > most || (has_ended && ids.size() != most)) return "has " + std::to_string(ids.size()) + " ids";
    const auto place = std::size_t(std::ranges::mismatch(ids, expected).in1 - ids.begin());
    if (place < ids.size()) return fault_of_other(prompt, ids, place, expected[place]);
    for (std::size_t i = 0; i < logprobs.size(); ++i)
      if (logprobs[i].logprob != expected_logprobs[i].logprob || logprobs[i].top != expected_logprobs[i].top)
        return "has another log-probability of id " + std::to_string(i);
    return "";
  }

 protected:
  /// What is wrong with a sequence whose id at `place` differs from the id that it has alone.
  virtual std::string fault_of_other(const std::vector<std::int32_t>&, const std::vector<std::int32_t>&, std::size_t,
                                     std::int32_t) {
    return "has other ids than alone";
  }

 private:
  struct Given {
    std::vector<std::int32_t> ids;
    std::vector<TokenLogprobs> logprobs;
  };
  const Given& given(const std::vector<std::int32_t>& prompt, SequenceOptions o) {
    const auto [found, is_new] = known_.try_emplace({prompt, o.id});
    if (is_new) {
      o.max_new_tokens = kScheduleNewTokens;
      o.draft = {};
      const auto s = taken(decoder_.add(prompt, o));
      while (decoder_.active()) taken(decoder_.decode());
      found->second = {taken(decoder_.ids(s)), taken(decoder_.logprobs(s))};
      REQUIRE(decoder_.drop(s));
    }
    return found->second;
  }

  Decoder decoder_;
  std::map<std::pair<std::vector<std::int32_t>, std::uint64_t>, Given> known_;
};

struct Counts {
  int forks = 0, given_up = 0, resumed = 0;
};

/// One of three prompts of n ids; those of other lengths begin with the same ids.
using PromptOf = std::function<std::vector<std::int32_t>(std::int64_t, std::uint64_t)>;

/// "" if every sequence of a schedule was given what it has alone; otherwise the first that was not.
inline std::string fault(Decoder d, const Schedule& schedule, const PromptOf& prompt_of, const OptionsOf& options_of,
                         Alone& alone, Counts& counts) {
  using Ids = std::vector<std::int32_t>;
  struct Sequence {
    Ids prompt;
    SequenceOptions options;
  };
  std::map<Decoder::Sequence, Sequence> living;
  const auto any = [&](std::uint32_t n) { return std::next(living.begin(), n % std::uint32_t(living.size())); };
  std::map<Decoder::Sequence, Ids> emitted;
  const auto take = [&](const Result<std::vector<Decoder::Emitted>>& ids) -> std::string {
    if (!ids) return ids.status().message();
    for (const auto& e : *ids) emitted[e.sequence].push_back(e.id);
    for (const auto& [s, l] : living) {
      if (d.status(s) || taken(d.finish(s)) != Finish::running) continue;
      if (d.status(s).code() != Code::out_of_memory) return d.status(s).message();
      ++counts.given_up;
      counts.resumed += !taken(d.ids(s)).empty();
    }
    return "";
  };
  const auto check = [&](Decoder::Sequence s) -> std::string {
    const auto& [prompt, options] = living.at(s);
    const Ids ids = taken(d.ids(s));
    std::string wrong = "was not told all its ids";
    if (ids == emitted[s])
      wrong = alone.fault(prompt, options, ids, taken(d.logprobs(s)), taken(d.finish(s)) != Finish::running);
    return wrong.empty() ? wrong : "sequence " + std::to_string(s) + " " + wrong;
  };
  for (const Operation& o : schedule.operations) {
    std::string wrong;
    const SequenceOptions options = options_of(o.b % 3, 1 + o.b / 3 % kScheduleNewTokens);
    switch (o.kind) {
      case Operation::add: {
        // Few prompts, some of which begin alike.
        const Ids prompt = prompt_of(schedule.scale * (1 + o.a % kSchedulePrompt), o.a / kSchedulePrompt % 3);
        living[taken(d.add(prompt, options))] = {prompt, options};
        break;
      }
      case Operation::fork: {
        if (living.empty()) break;
        const auto of = any(o.a);
        Ids tokens = of->second.prompt;
        const Ids ids = taken(d.ids(of->first));
        tokens.insert(tokens.end(), ids.begin(), ids.end());
        std::optional<std::int64_t> n;
        const auto most = std::min(tokens.size(), std::size_t(schedule.scale) * kSchedulePrompt);
        if (o.a / 64 % 2) n = 1 + std::int64_t(o.a / 128 % most);
        tokens.resize(std::size_t(n.value_or(std::int64_t(of->second.prompt.size()))));
        living[taken(d.fork(of->first, options, n))] = {tokens, options};
        ++counts.forks;
        break;
      }
      case Operation::decode: wrong = take(d.decode(1 + o.a % 6)); break;
      case Operation::prefill: wrong = take(d.prefill()); break;
      case Operation::drop: {
        if (living.empty()) break;
        const auto of = any(o.a);
        wrong = check(of->first);
        if (!d.drop(of->first)) return "drop() refuses a sequence";
        living.erase(of);
      }
    }
    if (!wrong.empty()) return wrong;
  }
  for (int turns = 0; d.active(); ++turns) {
    if (turns == 2000) return "no sequence goes on";
    if (const std::string wrong = take(d.decode()); !wrong.empty()) return wrong;
  }
  for (const auto& [s, l] : living) {
    if (taken(d.finish(s)) != Finish::length) return "sequence " + std::to_string(s) + " did not reach its length";
    if (const std::string wrong = check(s); !wrong.empty()) return wrong;
  }
  return "";
}

/// The schedule without what its fault does not need.
inline Schedule shrunk(Schedule s, const std::function<bool(const Schedule&)>& is_faulty) {
  for (std::size_t i = 0; i < s.operations.size();) {
    Schedule less = s;
    less.operations.erase(less.operations.begin() + std::ptrdiff_t(i));
    if (is_faulty(less))
      s = less;
    else
      ++i;
  }
  return s;
}

inline std::string to_string(const Schedule& s) {
  std::string text = std::to_string(s.slots) + " slots, " + std::to_string(s.pages) + " pages of " +
                     std::to_string(s.page_entries) + ", chunk " + std::to_string(s.chunk) + ", step_tokens " +
                     std::to_string(s.decoder.step_tokens.value_or(-1)) + ", share_prefixes " +
                     std::to_string(s.decoder.share_prefixes) + ":";
  for (const Operation& o : s.operations) text += " " + to_string(o);
  return text;
}

/// Runs `rounds` random schedules by decoders that make(schedule) makes, and shrinks the first that has a fault.
/// `first` is the number of the first one.
inline Counts check_schedules(int first, int rounds, std::int64_t scale,
                              const std::function<Decoder(const Schedule&)>& make, const PromptOf& prompt_of,
                              const OptionsOf& options_of, Alone& alone) {
  Counts counts;
  for (int round = first; round < first + rounds; ++round) {
    std::mt19937 random{std::uint32_t(round)};
    const Schedule s = random_schedule(random, scale);
    const std::string wrong = fault(make(s), s, prompt_of, options_of, alone, counts);
    if (wrong.empty()) continue;
    Counts ignored;
    const Schedule least = shrunk(s, [&](const Schedule& less) {
      return !fault(make(less), less, prompt_of, options_of, alone, ignored).empty();
    });
    FAIL(wrong << " in schedule " << round << ": " << to_string(least));
  }
  return counts;
}

}  // namespace cf::test
