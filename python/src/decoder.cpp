#include "core/model/decoder.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/model_slots.hpp"
#include "python/src/slots_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using Pairs = std::vector<std::pair<std::int64_t, std::int32_t>>;  // sequence, id
using Biases = std::vector<std::pair<std::int64_t, double>>;       // id, what is added to its logit
// By id: log p, and those of the likeliest ids.
using Logprobs = std::vector<std::pair<double, std::vector<std::pair<std::int32_t, double>>>>;

template <class T>
nb::object array_of_values(std::span<const T> values) {
  auto* const owned = new std::vector<T>(values.begin(), values.end());
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

/// Calls a Python function with a row of logits and the ids so far, and takes the row that it returns. An exception,
/// which may be the function's own, is Python's current one afterwards.
void call_processor(const nb::object& function, std::span<float> logits, std::span<const std::int32_t> ids) {
  const nb::object made = function(array_of_values<float>(logits), array_of_values(ids));
  const nb::module_ numpy = nb::module_::import_("numpy");
  const nb::object array = numpy.attr("asarray")(made), shape = array.attr("shape");
  const auto kind = nb::cast<std::string>(array.attr("dtype").attr("kind"));
  if (kind != "f" && kind != "i" && kind != "u") {
    const auto got = nb::cast<std::string>(made.type().attr("__name__"));
    throw nb::type_error(("logits_processor: expected the row of logits in return, got " + got).c_str());
  }
  if (const std::string expected = "(" + std::to_string(logits.size()) + ",)", got = nb::str(shape).c_str();
      got != expected)
    throw nb::value_error(
        ("logits_processor: expected a row of the shape " + expected + " in return, got " + got).c_str());
  using Row = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig>;
  const nb::object floats = numpy.attr("ascontiguousarray")(array, "dtype"_a = "float32");
  const auto row = nb::cast<Row>(floats);
  std::copy_n(row.data(), row.size(), logits.data());
}

/// A Python function that a decoder calls without the GIL. A call takes the GIL, and so does the end of the last copy.
class Held {
 public:
  /// `name` is what messages call it.
  Held(std::string name, nb::handle function)
      : name_(std::move(name)), function_(new nb::object(nb::borrow(function)), [](nb::object* object) {
          if (interpreter_ends()) return;
          const nb::gil_scoped_acquire acquire;
          delete object;
        }) {}

  /// call(function) with the GIL. What it raises is Python's current exception afterwards.
  template <class F>
  Status operator()(F&& call) const {
    const Status failed = Status::error(Code::io_error, name_ + ": an exception");
    if (interpreter_ends()) return failed;
    const nb::gil_scoped_acquire acquire;
    if (PyErr_Occurred()) return failed;  // of another sequence's function, or of a signal's handler
    try {
      call(*function_);
      return {};
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const nb::builtin_exception& error) {
      PyErr_SetString(error.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError,
                      error.what());
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failed;
  }

 private:
  std::string name_;
  std::shared_ptr<nb::object> function_;
};

LogitsChanges::Processor processor_of(nb::handle function) {
  if (function.is_none()) return {};
  return [held = Held("logits_processor", function)](std::span<float> logits, std::span<const std::int32_t> ids) {
    return held([&](const nb::object& process) { call_processor(process, logits, ids); });
  };
}

/// None, "lookup", or a function of the ids so far and of how many are asked for, which returns ids.
Drafter drafter_of(nb::handle draft, std::int64_t vocab_size) {
  if (draft.is_none()) return {};
  if (nb::isinstance<nb::str>(draft)) {
    const auto name = nb::cast<std::string>(draft);
    if (name != "lookup") refuse("draft: expected \"lookup\" or a function, got \"" + name + "\"");
    return lookup_drafter();
  }
  return [held = Held("draft", draft), vocab_size](std::span<const std::int32_t> tokens,
                                                   std::int64_t most) -> Result<Ids> {
    Ids ids;
    CF_TRY(
        held([&](const nb::object& make) { ids = ids_of("draft", make(array_of_values(tokens), most), vocab_size); }));
    return ids;
  };
}

/// A Decoder, and the slots that it has.
class PythonDecoder {
 public:
  PythonDecoder(const Weights& w, const cpu_ref::Model::Options& options, std::optional<std::int64_t> step_tokens,
                bool share_prefixes)
      : slots_(w, options), decoder_(made({step_tokens, share_prefixes})) {}
  PythonDecoder(const std::shared_ptr<SharedModel>& shared, std::int64_t slots, std::optional<std::int64_t> step_tokens,
                bool share_prefixes)
      : slots_(shared, slots), decoder_(made({step_tokens, share_prefixes})) {}

  /// The options' stop ids, biases and drafts come from `stop`, `logit_bias` and `draft`.
  std::int64_t add(nb::handle prompt, SequenceOptions options, nb::handle stop, const Biases& logit_bias,
                   nb::handle draft, std::optional<std::int64_t> same_prompt) {
    const std::int64_t vocab_size = slots_.vocab_size();
    const Ids ids = ids_of("prompt", prompt, vocab_size);
    options.stop = ids_of("stop", stop, vocab_size);
    options.draft = drafter_of(draft, vocab_size);
    for (const auto& [id, bias] : logit_bias) {
      if (id < 0 || id >= vocab_size)
        refuse("logit_bias: expected ids of 0 to " + std::to_string(vocab_size - 1) + ", got " + std::to_string(id));
      options.changes.logit_bias.push_back({std::int32_t(id), float(bias)});
    }
    const auto take_sequence = [&] {
      return same_prompt ? decoder_.fork(*same_prompt, std::move(options)) : decoder_.add(ids, std::move(options));
    };
    // A fork may copy entries.
    return take(same_prompt ? slots_.use([&](ModelRunner&) { return take_sequence(); }) : slots_.look(take_sequence));
  }
  Pairs prefill() {
    return pairs(take(slots_.use([&](ModelRunner&) { return decoder_.prefill(); })));
  }
  Pairs decode(std::int64_t steps) {
    return pairs(take(slots_.use([&](ModelRunner&) { return decoder_.decode(steps); })));
  }
  std::vector<std::int64_t> ended() {
    return take(slots_.look([&]() -> Result<std::vector<std::int64_t>> { return decoder_.ended(); }));
  }
  void drop(std::int64_t sequence) {
    check(slots_.look([&] { return decoder_.drop(sequence); }));
  }
  Ids ids(std::int64_t sequence) {
    return take(slots_.look([&] { return decoder_.ids(sequence); }));
  }
  Logprobs logprobs(std::int64_t sequence, std::int64_t first) {
    Logprobs found;
    for (const TokenLogprobs& t : take(slots_.look([&] { return decoder_.logprobs(sequence, first); }))) {
      auto& [logprob, top] = found.emplace_back(t.logprob, Logprobs::value_type::second_type());
      for (const LikelyId& p : t.top) top.emplace_back(p.id, p.log_prob);
    }
    return found;
  }
  std::tuple<std::int64_t, std::int64_t, std::int64_t> drafts(std::int64_t sequence) {
    const DraftCounts counts = take(slots_.look([&] { return decoder_.drafts(sequence); }));
    return {counts.steps, counts.drafted, counts.accepted};
  }
  std::string finish(std::int64_t sequence) {
    return std::string(to_string(take(slots_.look([&] { return decoder_.finish(sequence); }))));
  }
  std::optional<std::string> status(std::int64_t sequence) {
    return take(slots_.look([&]() -> Result<std::optional<std::string>> {
      CF_TRY(decoder_.finish(sequence).status());  // refuses an unknown sequence
      const Status status = decoder_.status(sequence);
      return status ? std::nullopt : std::optional(status.message());
    }));
  }
  Array logits(std::int64_t sequence) {
    return array_of(take(slots_.use([&](ModelRunner&) { return decoder_.logits(sequence); })));
  }
  void close() { slots_.close(); }
  bool active() {
    return take(slots_.look([&]() -> Result<bool> { return decoder_.active(); }));
  }
  std::int64_t free_slots() {
    return take(slots_.look([&]() -> Result<std::int64_t> { return decoder_.free_slots(); }));
  }
  std::optional<std::int64_t> free_pages() {
    return take(slots_.look([&]() -> Result<std::optional<std::int64_t>> {
      CF_TRY_ASSIGN(const ModelRunner* const runner, slots_.lease()->runner());
      if (runner->page_entries() == 0) return std::optional<std::int64_t>();
      return std::optional(runner->free_pages());
    }));
  }

 private:
  Decoder made(const DecoderOptions& options) {
    if (options.step_tokens.value_or(0) < 0)
      refuse("step_tokens: expected at least 0, got " + std::to_string(*options.step_tokens));
    return take(slots_.use([&](ModelRunner&) -> Result<Decoder> { return Decoder(slots_.lease(), options); }));
  }
  static Pairs pairs(const std::vector<Decoder::Emitted>& emitted) {
    Pairs pairs;
    for (const Decoder::Emitted& e : emitted) pairs.emplace_back(e.sequence, e.id);
    return pairs;
  }

  ModelSlots slots_;
  Decoder decoder_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  m.def(
      "lookup_draft",
      [](const std::vector<std::int32_t>& tokens, std::int64_t most, std::int64_t longest, std::int64_t shortest) {
        return lookup_draft(tokens, most, {longest, shortest});
      },
      "tokens"_a, "most"_a, "longest"_a, "shortest"_a,
      "Up to `most` ids that followed the latest occurrence of the last ids: core/model/draft.hpp.");
  nb::class_<DraftLength>(m, "DraftLength",
                          "How long the next draft of a sequence may be, by what became of those before: "
                          "core/model/draft.hpp.")
      .def(nb::init<std::int64_t>(), "most"_a)
      .def("next", &DraftLength::next, "The most ids of the next step's draft; 0 where it has none.")
      .def("verified", &DraftLength::verified, "drafted"_a, "accepted"_a, "What became of a draft.");
  nb::class_<PythonDecoder> bound(m, "Decoder",
                                  "Continues several sequences at once, each in a slot. Threads take turns. A step has "
                                  "at most `step_tokens` tokens, those of all running sequences and pieces of prompts; "
                                  "0: each prompt is read whole; None: what the model prefers. With `share_prefixes` a "
                                  "prompt that begins as another one shares its pages, where the cache has pages.");
  bind_constructors<std::optional<std::int64_t>, bool>(bound, "step_tokens"_a = nb::none(), "share_prefixes"_a = false);
  bound
      .def(
          "add",
          [](PythonDecoder& d, nb::handle prompt, double temperature, int top_k, double top_p, double min_p,
             double repetition_penalty, std::uint64_t seed, std::uint64_t id, nb::handle stop,
             std::optional<std::int64_t> max_new_tokens, std::int64_t min_new_tokens, const Biases& logit_bias,
             double frequency_penalty, double presence_penalty, nb::handle logits_processor,
             std::optional<std::int64_t> logprobs, nb::handle draft, std::int64_t draft_len,
             std::optional<std::int64_t> same_prompt) {
            SequenceOptions options{.sampling = {temperature, top_k, top_p, min_p, repetition_penalty, seed},
                                    .id = id,
                                    .changes = {.frequency_penalty = frequency_penalty,
                                                .presence_penalty = presence_penalty,
                                                .min_new_tokens = min_new_tokens,
                                                .processor = processor_of(logits_processor)},
                                    .logprobs = logprobs,
                                    .draft_tokens = draft_len};
            options.max_new_tokens = max_new_tokens.value_or(options.max_new_tokens);
            return d.add(prompt, std::move(options), stop, logit_bias, draft, same_prompt);
          },
          "prompt"_a, nb::kw_only(), "temperature"_a = 0.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0,
          "repetition_penalty"_a = 1.0, "seed"_a = 0, "id"_a = 0, "stop"_a = nb::tuple(),
          "max_new_tokens"_a = nb::none(), "min_new_tokens"_a = 0, "logit_bias"_a = Biases(),
          "frequency_penalty"_a = 0.0, "presence_penalty"_a = 0.0, "logits_processor"_a = nb::none(),
          "logprobs"_a = nb::none(), "draft"_a = nb::none(), "draft_len"_a = kMostDraft, "same_prompt"_a = nb::none(),
          "Takes a sequence and returns its number. Where no slot is free it waits for one. Random numbers depend on "
          "seed, id and position alone. core/model/choice.hpp says what min_new_tokens, logit_bias (pairs of an id and "
          "its bias), the penalties, logits_processor (called with the logits, float32, and the ids of prompt and "
          "output; returns the logits) and logprobs (how many alternatives) are. draft: \"lookup\", or a function of "
          "the "
          "ids so far and of how many are asked for, which returns ids that may follow; draft_len: how many at most, 1 "
          "to "
          "7. The ids are the same with drafts and without. same_prompt: a sequence of the same "
          "prompt, which is read once for both where the cache has pages. Raises ValueError for a prompt that is "
          "empty, "
          "longer than the capacity or outside the vocabulary, and for settings that have no meaning.")
      .def("prefill", &PythonDecoder::prefill,
           "Reads the prompts of the sequences added since; returns (sequence, id) of each one's first id.")
      .def(
          "decode", &PythonDecoder::decode, "steps"_a = 1,
          "Gives each running sequence up to `steps` ids, or more where it has drafts; returns them as (sequence, id).")
      .def("ended", &PythonDecoder::ended, "The sequences that have ended and were not dropped.")
      .def("drop", &PythonDecoder::drop, "sequence"_a, "Ends a sequence and forgets it.")
      .def("ids", &PythonDecoder::ids, "sequence"_a, "A sequence's ids behind its prompt.")
      .def("logprobs", &PythonDecoder::logprobs, "sequence"_a, "first"_a = 0,
           "Of each of a sequence's new ids from the one numbered `first` on: log p, and (id, log p) of the likeliest.")
      .def("drafts", &PythonDecoder::drafts, "sequence"_a,
           "Of a sequence's drafts: the steps that verified one, their ids, and how many of these it was given.")
      .def("finish", &PythonDecoder::finish, "sequence"_a,
           "Why a sequence has ended: \"running\", \"stop\", \"length\" or \"failed\".")
      .def("status", &PythonDecoder::status, "sequence"_a, "How a sequence failed, or None.")
      .def("logits", &PythonDecoder::logits, "sequence"_a,
           nb::sig("def logits(self, sequence: int) -> numpy.typing.NDArray[typing.Any]"),
           "The logits (vocab) that a running sequence's last id was chosen from.")
      .def("close", &PythonDecoder::close, kClose)
      .def_prop_ro("active", &PythonDecoder::active, "Whether any sequence is running or waits.")
      .def_prop_ro("free_slots", &PythonDecoder::free_slots, "Slots that no sequence holds.")
      .def_prop_ro("free_pages", &PythonDecoder::free_pages,
                   "Pages of the cache that no sequence holds. None where the cache has no pages.");
}

}  // namespace cf::python
