#pragma once
// Random schedules of a decoder, and what every sequence of one must be given: the ids that it has alone.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
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

/// A decoder of one schedule.
struct Schedule {
  std::int64_t slots = 1, chunk = 1, pages = 0, page_entries = 1;
  DecoderOptions decoder{};
  std::vector<Operation> operations{};
};

/// The entries of a slot in all schedules.
inline constexpr std::int64_t kScheduleCapacity = 32;
/// The ids of a prompt, at most.
inline constexpr std::uint32_t kSchedulePrompt = 23;

inline Schedule random_schedule(std::mt19937& random) {
  const auto below = [&](std::uint32_t n) { return std::uint32_t(random() % n); };
  Schedule s;
  s.slots = 1 + below(5);
  s.chunk = 1 + below(20);
  if (below(4)) {
    s.page_entries = 1 + below(8);
    // From what one sequence needs to what all need.
    const std::int64_t one = (kScheduleCapacity + s.page_entries - 1) / s.page_entries;
    s.pages = one + below(std::uint32_t(one * 2));
  }
  if (below(3)) s.decoder.step_tokens = below(3) ? 1 + below(24) : 0;
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

/// How a sequence of a schedule is continued.
inline SequenceOptions sampled(std::uint64_t id, std::int64_t tokens) {
  return {.sampling = {.temperature = 1.2, .seed = 5}, .id = id, .max_new_tokens = tokens};
}

/// What each sequence should be given: its ids, alone in a decoder of one slot. By prompt and id.
class Alone {
 public:
  explicit Alone(Decoder decoder) : decoder_(std::move(decoder)) {}
  const std::vector<std::int32_t>& operator()(const std::vector<std::int32_t>& prompt, const SequenceOptions& o) {
    const auto [found, is_new] = known_.try_emplace({prompt, o.id, o.max_new_tokens});
    if (is_new) {
      const auto s = taken(decoder_.add(prompt, o));
      while (decoder_.active()) taken(decoder_.decode());
      found->second = taken(decoder_.ids(s));
      REQUIRE(decoder_.drop(s));
    }
    return found->second;
  }

 private:
  Decoder decoder_;
  std::map<std::tuple<std::vector<std::int32_t>, std::uint64_t, std::int64_t>, std::vector<std::int32_t>> known_;
};

struct Counts {
  int forks = 0, given_up = 0, resumed = 0;
};

/// "" if every sequence of a schedule got the ids that it has alone; otherwise the first that did not. prompt(n, which)
/// is one of three prompts of n ids; those of other lengths begin with the same ids.
inline std::string fault(Decoder d, const Schedule& schedule,
                         const std::function<std::vector<std::int32_t>(std::int64_t, std::uint64_t)>& prompt_of,
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
    const Ids& expected = alone(living.at(s).prompt, living.at(s).options);
    const Ids ids = taken(d.ids(s));
    const bool ended = taken(d.finish(s)) != Finish::running;
    if (ids != emitted[s]) return "sequence " + std::to_string(s) + " was not told all its ids";
    if (ids.size() > expected.size() || !std::equal(ids.begin(), ids.end(), expected.begin()) ||
        (ended && ids.size() != expected.size()))
      return "sequence " + std::to_string(s) + " has other ids than alone";
    return "";
  };
  for (const Operation& o : schedule.operations) {
    std::string wrong;
    const SequenceOptions options = sampled(o.b % 3, 1 + o.b / 3 % 9);
    switch (o.kind) {
      case Operation::add: {
        // Few prompts, some of which begin alike.
        const Ids prompt = prompt_of(1 + o.a % kSchedulePrompt, o.a / kSchedulePrompt % 3);
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
        if (o.a / 64 % 2) n = 1 + std::int64_t(o.a / 128 % std::min<std::size_t>(tokens.size(), kSchedulePrompt));
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

/// Runs `rounds` random schedules by decoders that make(schedule) makes, and shrinks the first that has a fault.
inline Counts check_schedules(int rounds, const std::function<Decoder(const Schedule&)>& make,
                              const std::function<std::vector<std::int32_t>(std::int64_t, std::uint64_t)>& prompt_of,
                              Alone& alone) {
  std::mt19937 random(11);
  Counts counts;
  for (int round = 0; round < rounds; ++round) {
    const Schedule s = random_schedule(random);
    const std::string wrong = fault(make(s), s, prompt_of, alone, counts);
    if (wrong.empty()) continue;
    Counts ignored;
    const Schedule least =
        shrunk(s, [&](const Schedule& less) { return !fault(make(less), less, prompt_of, alone, ignored).empty(); });
    std::string text;
    for (const Operation& o : least.operations) text += to_string(o) + " ";
    FAIL(wrong << " in schedule " << round << ": " << s.slots << " slots, " << s.pages << " pages of " << s.page_entries
               << ", chunk " << s.chunk << ", step_tokens " << s.decoder.step_tokens.value_or(-1) << ", share_prefixes "
               << s.decoder.share_prefixes << ": " << text);
  }
  return counts;
}

}  // namespace cf::test
