#include "core/model/decoder.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <utility>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/bindings_text.hpp"
#include "python/src/model_slots.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using Pairs = std::vector<std::pair<std::int64_t, std::int32_t>>;  // sequence, id

/// A Decoder, and the slots that it has.
class PythonDecoder {
 public:
  PythonDecoder(const Weights& w, std::int64_t slots, std::int64_t capacity, std::int64_t chunk,
                const std::string& activation)
      : slots_(w, slots, capacity, chunk, activation), decoder_(made()) {}
  PythonDecoder(const std::shared_ptr<SharedModel>& shared, std::int64_t slots)
      : slots_(shared, slots), decoder_(made()) {}

  std::int64_t add(nb::handle prompt, const Sampling& sampling, std::uint64_t id, nb::handle stop,
                   std::optional<std::int64_t> max_new_tokens) {
    const std::int64_t vocab_size = slots_.vocab_size();
    const Ids ids = ids_of("prompt", prompt, vocab_size);
    SequenceOptions options{.sampling = sampling, .id = id, .stop = ids_of("stop", stop, vocab_size)};
    options.max_new_tokens = max_new_tokens.value_or(options.max_new_tokens);
    return take(slots_.look([&] { return decoder_.add(ids, std::move(options)); }));
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

 private:
  Decoder made() {
    return take(slots_.use([&](ModelRunner&) -> Result<Decoder> { return Decoder(slots_.lease()); }));
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
  nb::class_<PythonDecoder>(m, "Decoder", "Continues several sequences at once, each in a slot. Threads take turns.")
      .def(nb::init<const Weights&, std::int64_t, std::int64_t, std::int64_t, const std::string&>(), "weights"_a,
           nb::kw_only(), "slots"_a = 1, "capacity"_a = 2048, "chunk"_a = 512, "activation"_a = "float32", kRunnerInit)
      .def(nb::init<const std::shared_ptr<SharedModel>&, std::int64_t>(), "model"_a, nb::kw_only(), "slots"_a = 1,
           kSharedInit)
      .def(
          "add",
          [](PythonDecoder& d, nb::handle prompt, double temperature, int top_k, double top_p, double min_p,
             double repetition_penalty, std::uint64_t seed, std::uint64_t id, nb::handle stop,
             std::optional<std::int64_t> max_new_tokens) {
            return d.add(prompt, {temperature, top_k, top_p, min_p, repetition_penalty, seed}, id, stop,
                         max_new_tokens);
          },
          "prompt"_a, nb::kw_only(), "temperature"_a = 0.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0,
          "repetition_penalty"_a = 1.0, "seed"_a = 0, "id"_a = 0, "stop"_a = nb::tuple(),
          "max_new_tokens"_a = nb::none(),
          "Takes a sequence and returns its number. Where no slot is free it waits for one. Random numbers depend on "
          "seed, id and position alone. Raises ValueError for a prompt that is empty, longer than the capacity or "
          "outside the vocabulary, and for settings that have no meaning.")
      .def("prefill", &PythonDecoder::prefill,
           "Reads the prompts of the sequences added since; returns (sequence, id) of each one's first id.")
      .def("decode", &PythonDecoder::decode, "steps"_a = 1,
           "Gives each running sequence up to `steps` ids; returns them as (sequence, id).")
      .def("ended", &PythonDecoder::ended, "The sequences that have ended and were not dropped.")
      .def("drop", &PythonDecoder::drop, "sequence"_a, "Ends a sequence and forgets it.")
      .def("ids", &PythonDecoder::ids, "sequence"_a, "A sequence's ids behind its prompt.")
      .def("finish", &PythonDecoder::finish, "sequence"_a,
           "Why a sequence has ended: \"running\", \"stop\", \"length\" or \"failed\".")
      .def("status", &PythonDecoder::status, "sequence"_a, "How a sequence failed, or None.")
      .def("logits", &PythonDecoder::logits, "sequence"_a,
           nb::sig("def logits(self, sequence: int) -> numpy.typing.NDArray[typing.Any]"),
           "The logits (vocab) that a running sequence's last id was chosen from.")
      .def("close", &PythonDecoder::close, kClose)
      .def_prop_ro("active", &PythonDecoder::active, "Whether any sequence is running or waits.")
      .def_prop_ro("free_slots", &PythonDecoder::free_slots, "Slots that no sequence holds.");
}

}  // namespace cf::python
