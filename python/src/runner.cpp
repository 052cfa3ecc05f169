#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <span>

#include "core/model/draft.hpp"
#include "core/model/model.hpp"
#include "core/model/taps.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/model_slots.hpp"
#include "python/src/slots_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using Steps = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;  // slot, id, position
using Draws = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;  // slot, position, left
using Table = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig>;

/// A model with a KV cache. Its slots are numbered from 0 on, wherever they lie in the model.
class Runner {
 public:
  Runner(const Weights& w, const cpu_ref::Model::Options& options)
      : slots_(w, options), taps_(model_taps(w.config, w.weights)), has_logits_(std::size_t(options.slots)) {}
  Runner(const std::shared_ptr<SharedModel>& shared, std::int64_t slots)
      : slots_(shared, slots),
        taps_(model_taps(slots_.spec(), outline_model(slots_.spec(), slots_.activation()))),
        has_logits_(std::size_t(slots)) {}

  const ModelSlots& slots() const { return slots_; }
  std::vector<std::string> tap_names() const {
    std::vector<std::string> names;
    for (const Tap& t : taps_) names.push_back(t.name);
    return names;
  }

  void prefill(std::int64_t slot, std::int64_t first, nb::handle from) {
    const Ids ids = ids_of("ids", from, slots_.vocab_size());
    run_step({{{.sequence = slot, .first_position = first, .count = std::int64_t(ids.size())}}, ids}, {});
  }

  void set_rope_table(const Table& cos, const Table& sin) {
    const auto view = [](const Table& t) {
      return View<const float, 2>{t.data(), {std::int64_t(t.shape(0)), std::int64_t(t.shape(1))}};
    };
    check(slots_.look([&]() -> Status {
      if (slots_.on_cpu()) return slots_.on_cpu()->set_rope_table(view(cos), view(sin));
      return Status::error(Code::unimplemented,
                           "set_rope_table: expected the library's own RoPE table on a GPU; device='cpu' has it");
    }));
  }

  std::pair<Array, std::map<std::string, Array>> run(std::int64_t slot, std::int64_t first, nb::handle from,
                                                     std::int64_t rows, const std::vector<std::string>& names) {
    const Ids ids = ids_of("ids", from, slots_.vocab_size());
    Tensor logits;
    auto taps = pass(slot, first, ids, rows, names, rows, [&]() -> StepLogits {
      logits = Tensor(slots_.activation(), {rows, slots_.vocab_size()});
      return {.own = false, .to = logits.view<2>()};
    });
    return {array_of(std::move(logits)), std::move(taps)};
  }

  std::map<std::string, Array> forward_on_device(std::int64_t slot, std::int64_t first, nb::handle from,
                                                 const MemoryTensor& logits, std::uintptr_t stream,
                                                 const std::vector<std::string>& names) {
    const Ids ids = ids_of("ids", from, slots_.vocab_size());
    const AnyView<2> to = logits_on_device(logits);
    return pass(slot, first, ids, to.shape[0], names, 0,
                [&] { return StepLogits{.own = false, .to = to, .stream = stream}; });
  }

  void step_on_device(const Steps& from, const MemoryTensor& logits, std::uintptr_t stream) {
    const Step step = step_of(from);
    const AnyView<2> to = logits_on_device(logits);
    if (to.shape[0] != std::int64_t(step.runs.size()))
      refuse("logits: expected a row for each of " + std::to_string(step.runs.size()) + " tokens, got " +
             std::to_string(to.shape[0]));
    const std::vector<std::int64_t> rows(step.runs.size(), 1);
    run_step(step, {.rows = rows, .to = to, .stream = stream});
  }

  void step(const Steps& from) { run_step(step_of(from), {}); }

  Ids choose(const Draws& from, const Ids& stop) {
    return take(slots_.use([&](ModelRunner& runner) -> Result<Ids> {
      std::vector<ModelRunner::Draw> draws;
      for (const auto& [slot, position, left] : from) {
        CF_TRY(check_logits(slot));
        const std::int64_t length = runner.length(slots_[slot]);
        if (position != length)
          return Status::error(Code::invalid_argument,
                               "slot " + std::to_string(slot) + ": expected a choice for position " +
                                   std::to_string(length) + ", its length, got " + std::to_string(position));
        if (left < 0)
          return Status::error(Code::invalid_argument, "slot " + std::to_string(slot) +
                                                           ": left: expected at least 0, got " + std::to_string(left));
        draws.push_back({.slot = slots_[slot],
                         .sampling = {},
                         .sequence = 0,
                         .position = position,
                         .history = {},
                         .left = left,
                         .stop = stop});
      }
      Ids ids;
      for (const Result<std::int32_t>& id : runner.choose(draws)) {
        CF_TRY(id.status());
        ids.push_back(*id);
      }
      return ids;
    }));
  }

  Array logits(std::int64_t slot) {
    return array_of(take(slots_.use([&](ModelRunner& runner) -> Result<Tensor> {
      CF_TRY(check_logits(slot));
      return runner.logits(slots_[slot]);
    })));
  }

  std::int64_t length(std::int64_t slot) {
    return take(slots_.use([&](ModelRunner& runner) -> Result<std::int64_t> {
      CF_TRY(check_slot(slot));
      return runner.length(slots_[slot]);
    }));
  }

  /// The bound of the logits' error with activations of a dtype, for these ids: relative L2, relative maximum.
  std::pair<double, double> error_bound(nb::handle from, const std::string& activation) {
    const Ids ids = ids_of("ids", from, slots_.vocab_size());
    const std::optional<DType> dtype = dtype_from_string(activation);
    if (!dtype || *dtype == DType::i32)
      refuse("activation: expected float16, bfloat16, float32 or float64, got '" + activation + "'");
    cpu_ref::Model* const oracle = slots_.on_cpu();
    if (!oracle || oracle->activation() != DType::f64) refuse("error_bound: expected the oracle, activation float64");
    Condition condition{0, 0};
    check(slots_.use([&](ModelRunner& runner) -> Status {
      Tensor logits(DType::f64, {std::int64_t(ids.size()), slots_.vocab_size()});
      oracle->measure(&condition);
      const Status ran = runner.forward(0, 0, ids, logits.view<2>());
      oracle->measure(nullptr);
      if (ran) has_logits_[0] = false;
      return ran;
    }));
    const Budget budget = model_budget(slots_.spec(), *dtype, condition);
    return {budget.rel_l2, budget.rel_max};
  }

  std::int64_t exact_tokens() {
    return take(slots_.use([](ModelRunner& runner) -> Result<std::int64_t> { return cf::exact_run_tokens(runner); }));
  }
  bool is_open() { return slots_.is_open(); }
  void close() { slots_.close(); }

  void release(std::int64_t slot) {
    check(slots_.use([&](ModelRunner& runner) -> Status {
      CF_TRY(check_slot(slot));
      runner.release(slots_[slot]);
      has_logits_[std::size_t(slot)] = false;
      return {};
    }));
  }

 private:
  /// Runs of this runner's slots, with their ids.
  struct Step {
    std::vector<Run> runs;
    Ids ids;
  };

  Step step_of(const Steps& from) const {
    Step step;
    for (const auto& [slot, id, position] : from) {
      if (id < 0 || id >= slots_.vocab_size())
        refuse("slot " + std::to_string(slot) + ": expected an id of 0 to " + std::to_string(slots_.vocab_size() - 1) +
               ", got " + std::to_string(id));
      step.runs.push_back({.sequence = slot, .first_position = position});
      step.ids.push_back(std::int32_t(id));
    }
    return step;
  }

  /// Runs a step that makes its slots' own logits.
  void run_step(const Step& step, const StepLogits& logits) {
    if (step.runs.empty()) return;
    check(slots_.use([&](ModelRunner& runner) -> Status {
      CF_TRY_ASSIGN(const std::vector<Run> runs, slots_.runs_of(runner, step.runs));
      CF_TRY(runner.run(runs, step.ids, logits));
      for (const Run& r : step.runs) has_logits_[std::size_t(r.sequence)] = true;
      return {};
    }));
  }

  /// Checks the memory of a device that the caller gives for logits (tokens, vocab), and returns its view.
  AnyView<2> logits_on_device(const MemoryTensor& tensor) const {
    const auto& [address, dtype, shape] = tensor;
    if (slots_.on_cpu()) refuse("logits: expected a model on a GPU, got one on the CPU");
    if (dtype != to_string(slots_.activation()) || shape.size() != 2 || shape[0] < 0 || shape[1] != slots_.vocab_size())
      refuse("logits: expected (tokens, " + std::to_string(slots_.vocab_size()) + ") of " +
             std::string(to_string(slots_.activation())) + ", got " + to_string(shape) + " of " + dtype);
    if (address == 0 && shape[0] > 0) refuse("logits: expected the address of their elements, got 0");
    return {reinterpret_cast<void*>(address), {shape[0], shape[1]}, slots_.activation()};
  }

  /// Runs a prompt's ids, whose last `rows` logits go where logits() says, and returns the taps. The host has room for
  /// `host_rows` of the logits.
  template <class Logits>
  std::map<std::string, Array> pass(std::int64_t slot, std::int64_t first, const Ids& ids, std::int64_t rows,
                                    const std::vector<std::string>& names, std::int64_t host_rows, Logits&& logits) {
    const auto tokens = std::int64_t(ids.size());
    if (rows < 0 || rows > tokens)
      refuse("rows: expected 0 to " + std::to_string(tokens) + ", the number of ids, got " + std::to_string(rows));
    std::map<std::string, Shape> shapes;
    double elements = double(host_rows) * double(slots_.vocab_size());
    const ModelNames& modules = names_of(slots_.spec());
    for (const std::string& name : names) {
      Shape shape = shape_of(name);
      const bool by_row = name == modules.final_layer_norm.tap || name == modules.embed_out.tap;
      shape.insert(shape.begin(), by_row ? rows : tokens);
      double size = 1;
      for (std::int64_t n : shape) size *= double(n);
      elements += size;
      shapes[name] = std::move(shape);
    }
    std::map<std::string, TapRows> made;
    check(slots_.use([&](ModelRunner& runner) -> Status {
      const double bytes = elements * double(size_bytes(slots_.activation()));
      CF_TRY(check_free_memory(bytes, "the logits and taps need " + gigabytes(bytes)));
      for (const auto& [name, shape] : shapes) made[name].rows = Tensor(slots_.activation(), shape);
      const Run one{.sequence = slot, .first_position = first, .count = tokens};
      CF_TRY_ASSIGN(const std::vector<Run> runs, slots_.runs_of(runner, std::span(&one, 1)));
      StepLogits wanted = logits();
      wanted.rows = std::span(&rows, 1);
      if (!made.empty())
        runner.watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) -> Status {
          return append_taps(runner, site, tensors, made);
        });
      const Status ran = runner.run(runs, ids, wanted);
      if (ran) has_logits_[std::size_t(slot)] = false;
      if (!made.empty()) runner.watch({});
      return ran;
    }));
    std::map<std::string, Array> taps;
    for (auto& [name, tap] : made) taps.emplace(name, array_of(std::move(tap.rows)));
    return taps;
  }

  Status check_slot(std::int64_t slot) const {
    if (slot >= 0 && slot < slots_.slots()) return {};
    return Status::error(Code::invalid_argument,
                         "slot: expected 0 to " + std::to_string(slots_.slots() - 1) + ", got " + std::to_string(slot));
  }

  /// Refuses a slot without logits of its own.
  Status check_logits(std::int64_t slot) const {
    CF_TRY(check_slot(slot));
    if (has_logits_[std::size_t(slot)]) return {};
    return Status::error(Code::invalid_argument,
                         "slot " + std::to_string(slot) + ": expected a prefill() or step() to make its logits");
  }

  /// A tap's shape for one token.
  Shape shape_of(const std::string& name) const {
    for (const Tap& t : taps_)
      if (t.name == name) return t.shape;
    // The layers have the same taps.
    const std::string first = "layers.0.", any = "layers.N.";
    std::string names;
    for (const Tap& t : taps_) {
      const bool in_first = t.name.starts_with(first);
      if (!in_first && t.name.starts_with("layers.")) continue;
      names += (names.empty() ? "" : ", ") + (in_first ? any + t.name.substr(first.size()) : t.name);
    }
    refuse("tap '" + name + "' is unknown; there are " + names + ", with N from 0 to " +
           std::to_string(slots_.spec().shape.num_layers - 1));
  }

  ModelSlots slots_;
  std::vector<Tap> taps_;
  std::vector<bool> has_logits_;  // by slot: whether the last call that changed the slot made its logits
};

/// The taps in the order of their names in the call.
nb::dict dict_of(const std::vector<std::string>& names, const std::map<std::string, Array>& taps) {
  nb::dict dict;
  for (const std::string& name : names) dict[name.c_str()] = taps.at(name);
  return dict;
}

}  // namespace

void bind_runner(nb::module_& m) {
  nb::class_<Runner> bound(m, "Runner", "A model with a KV cache. Threads take turns.");
  bind_constructors(bound);
  bound
      .def_prop_ro(
          "slots", [](const Runner& r) { return r.slots().slots(); }, "Sequences that the cache holds.")
      .def_prop_ro(
          "capacity", [](const Runner& r) { return r.slots().capacity(); }, "Entries that a slot has room for.")
      .def_prop_ro("taps", &Runner::tap_names, "The names that run() takes, in the order of the model.")
      .def_prop_ro(
          "cache_bytes", [](const Runner& r) { return r.slots().cache_bytes(); }, "The bytes of the cache.")
      .def_prop_ro(
          "workspace_bytes", [](const Runner& r) { return r.slots().workspace_bytes(); },
          "The bytes of the activations.")
      .def_prop_ro("exact_run_tokens", &Runner::exact_tokens,
                   "The most ids in a call of forward() whose logits have the bits of step(); below 2 where there are "
                   "none.")
      .def("prefill", &Runner::prefill, "slot"_a, "first"_a, "ids"_a,
           "Gives a slot the entries of `ids` at the positions from `first` on, and makes the logits of the last id.")
      .def("set_rope_table", &Runner::set_rope_table, "cos"_a, "sin"_a,
           "Takes the first rows of another RoPE table, float32 (rows, rotary_dim / 2) each, in place of the library's "
           "own.")
      .def(
          "forward",
          [](Runner& r, std::int64_t slot, std::int64_t first, nb::handle ids, std::int64_t rows) {
            return r.run(slot, first, ids, rows, {}).first;
          },
          "slot"_a, "first"_a, "ids"_a, "rows"_a,
          nb::sig(
              "def forward(self, slot: int, first: int, ids: object, rows: int) -> numpy.typing.NDArray[typing.Any]"),
          "Gives a slot the entries of `ids` as prefill() does, and returns the logits (rows, vocab) of the last "
          "`rows` "
          "ids. logits() has none until the next prefill() or step().")
      .def(
          "run",
          [](Runner& r, std::int64_t slot, std::int64_t first, nb::handle ids, std::int64_t rows,
             const std::vector<std::string>& taps) {
            auto [logits, made] = r.run(slot, first, ids, rows, taps);
            return nb::make_tuple(std::move(logits), dict_of(taps, made));
          },
          "slot"_a, "first"_a, "ids"_a, "rows"_a, "taps"_a,
          nb::sig("def run(self, slot: int, first: int, ids: object, rows: int, taps: collections.abc.Sequence[str]) "
                  "-> tuple[numpy.typing.NDArray[typing.Any], dict[str, numpy.typing.NDArray[typing.Any]]]"),
          "Does what forward() does, and returns the taps (ids, ...) besides; \"final_layer_norm\" and \"logits\" are "
          "of "
          "the last `rows` ids alone.")
      .def("step", &Runner::step, "tokens"_a,
           "Appends the tokens (slot, id, position), at most one a slot, and makes their logits. A position is at most "
           "the slot's length.")
      .def(
          "forward_on_device",
          [](Runner& r, std::int64_t slot, std::int64_t first, nb::handle ids, const MemoryTensor& logits,
             std::uintptr_t stream, const std::vector<std::string>& taps) {
            return dict_of(taps, r.forward_on_device(slot, first, ids, logits, stream, taps));
          },
          "slot"_a, "first"_a, "ids"_a, "logits"_a, "stream"_a, "taps"_a = std::vector<std::string>(),
          nb::sig("def forward_on_device(self, slot: int, first: int, ids: object, "
                  "logits: tuple[int, str, tuple[int, ...]], stream: int, "
                  "taps: collections.abc.Sequence[str] = ()) -> dict[str, numpy.typing.NDArray[typing.Any]]"),
          "Does what run() does on a GPU, and returns the taps. `logits` are the address, the dtype's name and the "
          "shape (rows, vocab) of memory there, which gets the logits in the model's own dtype. The work comes after "
          "all that is on the stream with this handle, and before all that is put there later; the call does not wait "
          "for it.")
      .def("step_on_device", &Runner::step_on_device, "tokens"_a, "logits"_a, "stream"_a,
           nb::sig("def step_on_device(self, tokens: collections.abc.Sequence[tuple[int, int, int]], "
                   "logits: tuple[int, str, tuple[int, ...]], stream: int) -> None"),
           "Does what step() does on a GPU, and gives memory there the logits, a row for each token, as "
           "forward_on_device() does.")
      .def(
          "choose", &Runner::choose, "draws"_a, "stop"_a = Ids{},
          "Returns the ids of the highest logits, of equal ones the lowest, for draws (slot, position, left): "
          "`position` is that of the chosen id, the slot's length, and `left` how many ids may follow it. None follows "
          "an id of `stop`. Where a step with these ids may follow, a GPU begins it, and more, before it is asked for. "
          "Raises CfError or ValueError where no id can be chosen, such as among logits that are NaN.")
      .def("logits", &Runner::logits, "slot"_a,
           nb::sig("def logits(self, slot: int) -> numpy.typing.NDArray[typing.Any]"),
           "The logits (vocab) of the slot's last prefill() or step().")
      .def("length", &Runner::length, "slot"_a, "The slot's valid cache entries.")
      .def("error_bound", &Runner::error_bound, "ids"_a, "activation"_a,
           "The bound of the logits' error of a model with activations of a dtype, for these ids: relative L2 and the "
           "largest error relative to the largest logit. A runner in float64 derives it from its own tensors, and puts "
           "the ids into slot 0.")
      .def("release", &Runner::release, "slot"_a, "Forgets the slot's entries.")
      .def_prop_ro("is_open", &Runner::is_open, "Whether the runner has its slots still; always on the CPU.")
      .def("close", &Runner::close, kClose);
}

}  // namespace cf::python
