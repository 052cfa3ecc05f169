#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/model/score.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/model_slots.hpp"
#include "python/src/slots_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

/// Log-probabilities, greedy flags, the most likely ids and their log-probabilities, and how the prompt failed.
using Score = std::tuple<Array, Array, Array, Array, std::optional<std::string>>;

/// A numpy array with a copy of the values.
template <class T>
Array array_with(const std::vector<T>& values, std::vector<std::size_t> shape, nb::dlpack::dtype dtype) {
  T* const data = new T[values.size()];
  std::copy(values.begin(), values.end(), data);
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Array(data, shape.size(), shape.data(), owner, nullptr, dtype);
}

/// `top` is the number of likely ids that each scored one has.
Score arrays_of(const PromptScore& score, std::size_t top) {
  const std::size_t count = score.ids.size();
  std::vector<double> log_probs, top_log_probs;
  std::vector<std::uint8_t> greedy;
  std::vector<std::int32_t> top_ids;
  for (const IdScore& id : score.ids) {
    log_probs.push_back(id.log_prob);
    greedy.push_back(id.greedy);
  }
  for (const LikelyId& likely : score.top) {
    top_ids.push_back(likely.id);
    top_log_probs.push_back(likely.log_prob);
  }
  return {array_with(log_probs, {count}, nb::dtype<double>()), array_with(greedy, {count}, nb::dtype<bool>()),
          array_with(top_ids, {count, top}, nb::dtype<std::int32_t>()),
          array_with(top_log_probs, {count, top}, nb::dtype<double>()),
          score.status ? std::nullopt : std::optional(score.status.message())};
}

/// A Scorer for one list of prompts after the other, and the slots that it has.
class PythonScorer {
 public:
  PythonScorer(const Weights& w, const cpu_ref::Model::Options& options) : slots_(w, options) {}
  PythonScorer(const std::shared_ptr<SharedModel>& shared, std::int64_t slots) : slots_(shared, slots) {}

  void begin(const std::vector<std::pair<nb::object, std::int64_t>>& from, std::int64_t piece, std::int64_t top) {
    std::vector<ScorePrompt> prompts;
    for (const auto& [ids, first] : from) {
      const std::string name = "prompt " + std::to_string(prompts.size());
      prompts.push_back({ids_of(name.c_str(), ids, slots_.vocab_size()), first});
    }
    check(slots_.use([&](ModelRunner&) -> Status {
      CF_TRY_ASSIGN(Scorer scorer, Scorer::create(slots_.lease(), std::move(prompts), {.piece = piece, .top = top}));
      scorer_ = std::move(scorer);
      top_ = top;
      return {};
    }));
  }
  void step() {
    check(slots_.use([&](ModelRunner&) { return scorer_ ? scorer_->step() : Status(); }));
  }
  using Progress = std::pair<std::int64_t, std::int64_t>;
  Progress progress() {
    return take(slots_.look([&]() -> Result<Progress> {
      return scorer_ ? Progress(scorer_->ids_read(), scorer_->ids()) : Progress(0, 0);
    }));
  }
  bool done() {
    return take(slots_.look([&]() -> Result<bool> { return !scorer_ || scorer_->done(); }));
  }
  std::vector<Score> scores() {
    std::int64_t top = 0;
    const std::vector<PromptScore> scores = take(slots_.look([&]() -> Result<std::vector<PromptScore>> {
      top = top_;
      return scorer_ ? scorer_->scores() : std::vector<PromptScore>();
    }));
    std::vector<Score> made;
    for (const PromptScore& score : scores) made.push_back(arrays_of(score, std::size_t(top)));
    return made;
  }
  void close() { slots_.close(); }

 private:
  ModelSlots slots_;
  std::optional<Scorer> scorer_;
  std::int64_t top_ = 0;
};

}  // namespace

void bind_scorer(nb::module_& m) {
  nb::class_<PythonScorer> bound(m, "Scorer", "Scores the ids of prompts. Threads take turns.");
  bind_constructors(bound);
  bound
      .def("begin", &PythonScorer::begin, "prompts"_a, nb::kw_only(), "piece"_a = 0, "top"_a = 0,
           nb::sig("def begin(self, prompts: collections.abc.Sequence[tuple[object, int]], *, piece: int = 0, "
                   "top: int = 0) -> None"),
           "Takes prompts (ids, first), whose ids from the position `first` on are scored, in place of those before. "
           "A step reads up to `piece` ids of a prompt; with 0, 128 on the CPU, on a GPU 2048 over the slots, but 512 "
           "at least. Raises ValueError for "
           "fewer than two ids, ids outside the vocabulary, more than the capacity and one more, and `first` outside "
           "1 .. ids - 1.")
      .def("step", &PythonScorer::step, "Makes one step of the model.")
      .def_prop_ro("progress", &PythonScorer::progress, "How many ids were read, and how many are to be read in all.")
      .def_prop_ro("done", &PythonScorer::done, "Whether all prompts have their scores.")
      .def("scores", &PythonScorer::scores,
           nb::sig("def scores(self) -> list[tuple[numpy.typing.NDArray[numpy.float64], "
                   "numpy.typing.NDArray[numpy.bool], numpy.typing.NDArray[numpy.int32], "
                   "numpy.typing.NDArray[numpy.float64], str | None]]"),
           "Of each prompt: log p(id | the ids before it) of the scored ids (n), in nats; whether each is the most "
           "likely one, of equal ones the lowest; the most likely ids (n, top) and their log p; and None, or why the "
           "prompt has no more: a row of logits has a NaN.")
      .def("close", &PythonScorer::close, kClose);
}

}  // namespace cf::python
