#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>

#include "core/model/decoder.hpp"
#include "core/model/model.hpp"
#include "core/model/taps.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "cpu_ref/model.hpp"
#include "golden/checkpoint/checkpoint.hpp"
#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "python/src/bindings.hpp"
#include "python/src/device_ops.hpp"
#include "python/src/shared_model.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

using cpu_ref::Model;
using Ids = std::vector<std::int32_t>;
using Steps = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;  // slot, id, position
using Draws = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;  // slot, position, left
using Array = nb::ndarray<nb::numpy>;
using Table = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig>;

[[noreturn]] void refuse(std::string what) {
  check(Status::error(Code::invalid_argument, std::move(what)));
  throw std::logic_error("an error Status raises");
}

/// A numpy array over a tensor's memory, which the array keeps: of float32 or float64, which 16-bit values are widened
/// to.
Array array_of(Tensor tensor) {
  if (size_bytes(tensor.dtype()) == 2) tensor = tensor.converted(DType::f32);
  auto* const owned = new Tensor(std::move(tensor));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Tensor*>(p); });
  const std::vector<std::size_t> shape(owned->shape().begin(), owned->shape().end());
  return Array(owned->data(), shape.size(), shape.data(), owner, nullptr,
               owned->dtype() == DType::f64 ? nb::dtype<double>() : nb::dtype<float>());
}

/// Token ids from a list, an array or whatever numpy.asarray takes. Refuses other than integers in one dimension, and
/// ids outside the vocabulary.
Ids ids_of(const char* what, nb::handle from, std::int64_t vocab_size) {
  const nb::module_ numpy = nb::module_::import_("numpy");
  const nb::object array = numpy.attr("asarray")(from);
  const std::string name = what;
  if (nb::cast<int>(array.attr("ndim")) != 1)
    refuse(name + ": expected ids in one dimension, got " + std::to_string(nb::cast<int>(array.attr("ndim"))));
  if (nb::cast<std::size_t>(array.attr("size")) == 0) return {};
  const std::string kind = nb::cast<std::string>(array.attr("dtype").attr("kind"));
  if ((kind != "i" && kind != "u") || !nb::cast<bool>(numpy.attr("can_cast")(array.attr("dtype"), numpy.attr("int64"))))
    refuse(name + ": expected integers of at most 64 bits, got " +
           nb::cast<std::string>(array.attr("dtype").attr("name")));
  using Int64s = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<1>, nb::c_contig>;
  const auto wide = nb::cast<Int64s>(numpy.attr("ascontiguousarray")(array, "dtype"_a = "int64"));
  Ids ids;
  ids.reserve(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    const std::int64_t id = wide.data()[i];
    if (id < 0 || id >= vocab_size)
      refuse(name + "[" + std::to_string(i) + "]: expected an id of 0 to " + std::to_string(vocab_size - 1) + ", got " +
             std::to_string(id));
    ids.push_back(std::int32_t(id));
  }
  return ids;
}

/// Where weights lie: `none` after drop_values().
enum class Place { host, device, none };

/// A model's config and its weights. `owner` keeps the weights' memory: the mapped files, or a Python object.
struct Weights {
  ModelConfig config;
  ModelWeights weights;
  std::shared_ptr<const void> owner;
  std::vector<std::string> notes;
  Place place = Place::host;
  std::int64_t copied_bytes = 0;                       // of tensors that were joined when they were loaded
  bool procedural = false;                             // no checkpoint's
  std::optional<checkpoint::Checkpoint> checkpoint{};  // while the weights lie in its files

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for_each_model_weight(config.spec(), weights,
                          [&](const auto&, const auto& view, const auto&) { sum += view.bytes(); });
    for (const LayerWeights& layer : weights.layers)
      for_each_linear(config.spec(), layer, [&](const Site&, const LinearParams& l, const LinearSize&) {
        if (const auto* packed = std::get_if<PackedWeight>(&l.weight)) sum += packed->data.bytes();
      });
    return sum;
  }

  /// Gives the weights' memory back. Formats, dtypes and shapes stay.
  void drop_values() {
    const ModelSpec spec = config.spec();
    for_each_model_weight(spec, weights, [](const TensorSpec&, auto& view, const auto&) { view.data = nullptr; });
    tie_embeddings(spec, weights);
    place = Place::none;
    owner.reset();
    checkpoint.reset();
  }
};

/// Loads all weights of a checkpoint. Looks at their values where they lie on the host; those of a model that the host
/// runs must fit into its memory.
Result<Weights> load(const checkpoint::Checkpoint& checkpoint, Place place, bool runs_on_host) {
  Result<checkpoint::CheckpointModel> model = checkpoint.model();
  // What is missing inside a checkpoint is a fault of the checkpoint: not_found is kept for its files.
  if (!model && model.status().code() == Code::not_found)
    return Status::error(Code::invalid_file, model.status().message());
  CF_TRY(model.status());
  if (runs_on_host) {
    const auto needed = double(weight_bytes(checkpoint.config().spec(), model->weights));
    CF_TRY(check_total_memory(needed, checkpoint.config().name + ": the weights need " + gigabytes(needed)));
  }
  if (place == Place::host) CF_TRY(checkpoint.check_finite(*model));
  std::int64_t copied_bytes = 0;
  for (const Tensor& copy : model->storage->copies) copied_bytes += std::int64_t(copy.size_bytes());
  Weights w{.config = checkpoint.config(),
            .weights = std::move(model->weights),
            .owner = std::move(model->storage),
            .notes = std::move(model->notes),
            .place = place,
            .copied_bytes = copied_bytes};
  w.config.dtype = model->dtype;
  return w;
}

Weights open(const std::string& directory, bool for_gpu) {
  checkpoint::guard_mapped_files();
  return take([&]() -> Result<Weights> {
    const WithoutGil without_gil;
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened, checkpoint::Checkpoint::open(directory));
    CF_TRY_ASSIGN(Weights w, load(opened, Place::host, !for_gpu));
    w.checkpoint = opened;
    return w;
  }());
}

Weights preset(const std::string& name, const std::string& dtype, std::uint64_t seed, const nb::object& progress) {
  const std::optional<DType> stored = dtype_from_string(dtype);
  if (!stored || (*stored != DType::f16 && *stored != DType::bf16 && *stored != DType::f32))
    refuse("dtype: expected float16, bfloat16 or float32, got '" + dtype + "'");
  Interrupt interrupt;
  const auto tell = [&](std::int64_t made_bytes, std::int64_t all_bytes) -> Status {
    CF_TRY(interrupt.check());
    if (progress.is_none() || interpreter_ends()) return {};
    const nb::gil_scoped_acquire acquire;
    PyObject* const told = PyObject_CallFunction(progress.ptr(), "LL", static_cast<long long>(made_bytes),
                                                 static_cast<long long>(all_bytes));
    Py_XDECREF(told);
    return told ? Status() : Status::error(Code::io_error, "progress failed");
  };
  Result<Weights> made = [&]() -> Result<Weights> {
    const WithoutGil without_gil;
    CF_TRY_ASSIGN(ModelConfig config, find_preset(name));
    config.dtype = *stored;
    Weights w{.config = config,
              .weights = outline_model(config.spec(), *stored),
              .owner = nullptr,
              .notes = {name + ": procedural weights, made of random numbers and not trained"},
              .place = Place::host,
              .copied_bytes = 0,
              .procedural = true};
    const auto needed = double(w.bytes());
    CF_TRY(check_free_memory(needed, name + ": the weights need " + gigabytes(needed)));
    CF_TRY_ASSIGN(OwnedModelWeights weights, procedural_model(config.spec(), *stored, seed, {}, tell));
    auto owned = std::make_shared<OwnedModelWeights>(std::move(weights));
    w.weights = owned->weights;
    w.owner = std::move(owned);
    return w;
  }();
  if (PyErr_Occurred()) throw nb::python_error();
  return take(std::move(made));
}

checkpoint::TensorEntry entry_of(std::string name, const MemoryTensor& tensor) {
  static const std::map<std::string, std::string> stored{
      {"float16", "F16"}, {"bfloat16", "BF16"}, {"float32", "F32"}, {"int32", "I32"}};
  const auto& [address, dtype, shape] = tensor;
  const auto known = stored.find(dtype);
  std::int64_t bytes = known == stored.end() ? 1 : std::int64_t(size_bytes(*dtype_from_string(dtype)));
  bool fits = true;
  for (std::int64_t size : shape) fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  if (!fits) refuse("tensor '" + name + "': expected fewer than 2^63 bytes, got the shape " + to_string(shape));
  if (address == 0 && bytes > 0) refuse("tensor '" + name + "': expected the address of its elements, got 0");
  return {.name = std::move(name),
          .stored_dtype = known == stored.end() ? dtype : known->second,
          .shape = shape,
          .data = reinterpret_cast<const void*>(address),
          .bytes = bytes};
}

/// Keeps a Python object. The last owner may die in a thread without the GIL.
std::shared_ptr<const void> kept_object(nb::object object) {
  return {object.release().ptr(), [](PyObject* kept) {
            if (interpreter_ends()) return;
            const nb::gil_scoped_acquire acquire;
            Py_DECREF(kept);
          }};
}

Weights from_tensors(const std::string& config, const nb::dict& tensors, nb::object owner,
                     const std::optional<std::string>& gptq, bool on_device) {
  std::vector<checkpoint::TensorEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back(entry_of(nb::cast<std::string>(name), nb::cast<MemoryTensor>(tensor)));
  const std::shared_ptr<const void> kept = kept_object(std::move(owner));
  return take([&]() -> Result<Weights> {
    const WithoutGil without_gil;
    CF_TRY_ASSIGN(const checkpoint::Checkpoint opened,
                  checkpoint::Checkpoint::from_memory(config, gptq, std::move(entries), kept, "tensors"));
    CF_TRY(opened.check_names());
    if (on_device) CF_TRY(opened.check_dense_whole());
    return load(opened, on_device ? Place::device : Place::host, false);
  }());
}

/// Packs what is quantised for a model on a GPU, into memory that `allocate` gives, a function of a number of bytes
/// that makes a tensor. From then on the weights are kept by that memory and by `owner`.
void pack_weights(Weights& w, int device, std::uintptr_t stream, const nb::callable& allocate, nb::object owner) {
  if (w.place != Place::device) refuse("weights: expected them on a device, got others");
  nb::list kept;
  kept.append(owner);
  const ModelSpec spec = w.config.spec();
  for (LayerWeights& layer : w.weights.layers)
    for_each_linear(spec, layer, [&](const Site& site, LinearParams& l, const LinearSize&) {
      const auto* gptq = std::get_if<GptqWeight>(&l.weight);
      if (!gptq) return;
      cuda::Packed packed = take([&]() -> Result<cuda::Packed> {
        const WithoutGil without_gil;
        return pack_for_steps(*gptq, site, spec, {device, stream});
      }());
      const nb::object memory = allocate(packed.storage.size_bytes());
      kept.append(memory);
      check([&, address = nb::cast<std::uintptr_t>(memory.attr("data_ptr")())] {
        const WithoutGil without_gil;
        return place_on_device(packed, address, {device, stream});
      }());
      l.weight = packed.weight;
    });
  w.owner = kept_object(std::move(kept));
}

std::pair<Array, Array> rope_table_of(const Weights& w, std::int64_t rows) {
  if (rows < 1) refuse("rows: expected at least 1, got " + std::to_string(rows));
  const ModelSpec spec = w.config.spec();
  const std::int64_t pairs = spec.shape.rotary_dim / 2;
  Tensor cos(DType::f32, {rows, pairs}), sin(DType::f32, {rows, pairs});
  const auto view = [&](Tensor& t) { return View<float, 2>{static_cast<float*>(t.data()), {rows, pairs}}; };
  ops::rope_table(view(cos), view(sin), spec.traits.rope_theta, spec.traits.rope_scaling);
  return {array_of(std::move(cos)), array_of(std::move(sin))};
}

nb::dict config_of(const Weights& w) {
  return nb::cast<nb::dict>(nb::module_::import_("json").attr("loads")(checkpoint::to_hf_json(w.config)));
}

/// A model that takes memory for its cache and activations, once that memory is known to be free. While it works it
/// notices signals, and files of its weights that become shorter.
std::unique_ptr<Model> make_model(const Weights& w, std::int64_t slots, std::int64_t capacity, std::int64_t chunk,
                                  const std::string& activation, Interrupt& interrupt) {
  const std::optional<DType> dtype = dtype_from_string(activation);
  if (!dtype) refuse("activation: expected float32 or float64, got '" + activation + "'");
  if (w.place != Place::host)
    refuse(std::string("weights: expected them in the memory of the host, got ") +
           (w.place == Place::device ? "a device's" : "none: drop_values() gave it back"));
  const Model::Options options{.slots = slots, .capacity = capacity, .chunk = chunk, .activation = *dtype};
  std::unique_ptr<Model> model = take([&]() -> Result<std::unique_ptr<Model>> {
    const WithoutGil without_gil;
    CF_TRY(Model::check_memory(w.config.name, w.config, options));
    return Model::create(w.config, w.weights, w.owner, options);
  }());
  model->check_between([&interrupt, checkpoint = w.checkpoint]() -> Status {
    if (checkpoint) CF_TRY(checkpoint->check_files());
    return interrupt.check();
  });
  return model;
}

/// Slots of a model on a GPU. Python handles signals before each pass.
std::unique_ptr<LeasedRunner> lease(const std::shared_ptr<SharedModel>& shared, std::int64_t slots,
                                    Interrupt& interrupt) {
  return take(work(shared->turns(), [&] { return LeasedRunner::create(shared, slots, interrupt); }));
}

/// The turns of a runner's own model, or of one that it shares.
std::shared_ptr<Turns> turns_of(const std::shared_ptr<SharedModel>& shared) {
  return std::shared_ptr<Turns>(shared, &shared->turns());
}

/// A model that runs on the CPU, or slots of one on a GPU. A mutex lets one thread call it at a time.
class Runner {
 public:
  Runner(const Weights& w, std::int64_t slots, std::int64_t capacity, std::int64_t chunk, const std::string& activation)
      : turns_(std::make_shared<Turns>()), taps_(model_taps(w.config, w.weights)) {
    const cpu_ref::ModelBytes bytes =
        Model::bytes(w.config, {slots, capacity, chunk, dtype_from_string(activation).value_or(DType::f32)});
    std::unique_ptr<Model> model = make_model(w, slots, capacity, chunk, activation, interrupt_);
    cpu_ = model.get();
    model_ = std::move(model);
    has_logits_.resize(std::size_t(slots));
    cache_bytes_ = std::int64_t(bytes.cache);
    workspace_bytes_ = std::int64_t(bytes.workspace);
  }
  Runner(const std::shared_ptr<SharedModel>& shared, std::int64_t slots) : turns_(turns_of(shared)) {
    std::unique_ptr<LeasedRunner> leased = lease(shared, slots, interrupt_);
    leased_ = leased.get();
    taps_ = model_taps(leased->model(), outline_model(leased->model(), leased->activation()));
    model_ = std::move(leased);
    has_logits_.resize(std::size_t(slots));
    cache_bytes_ = shared->cache_bytes() / shared->slots() * slots;
    workspace_bytes_ = shared->workspace_bytes();
  }

  std::int64_t vocab_size() const { return model_->model().shape.vocab_size; }
  std::int64_t slots() const { return model_->slots(); }
  std::int64_t capacity() const { return model_->capacity(); }
  std::int64_t cache_bytes() const { return cache_bytes_; }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  std::vector<std::string> tap_names() const {
    std::vector<std::string> names;
    for (const Tap& t : taps_) names.push_back(t.name);
    return names;
  }

  void prefill(std::int64_t slot, std::int64_t first, nb::handle from) {
    const Ids ids = ids_of("ids", from, vocab_size());
    check(work(*turns_, [&]() -> Status {
      CF_TRY(model_->prefill(slot, first, ids));
      has_logits_[std::size_t(slot)] = true;
      return {};
    }));
  }

  void set_rope_table(const Table& cos, const Table& sin) {
    const auto view = [](const Table& t) {
      return View<const float, 2>{t.data(), {std::int64_t(t.shape(0)), std::int64_t(t.shape(1))}};
    };
    check(work(*turns_, [&]() -> Status {
      if (!cpu_) return unimplemented_on_device("set_rope_table: expected the library's own RoPE table");
      return cpu_->set_rope_table(view(cos), view(sin));
    }));
  }

  std::pair<Array, std::map<std::string, Array>> run(std::int64_t slot, std::int64_t first, nb::handle from,
                                                     std::int64_t rows, const std::vector<std::string>& names) {
    const Ids ids = ids_of("ids", from, vocab_size());
    Tensor logits;
    auto taps = pass(slot, ids, rows, names, rows, [&]() -> Status {
      logits = Tensor(model_->activation(), {rows, vocab_size()});
      return model_->forward(slot, first, ids, logits.view<2>());
    });
    return {array_of(std::move(logits)), std::move(taps)};
  }

  std::map<std::string, Array> forward_on_device(std::int64_t slot, std::int64_t first, nb::handle from,
                                                 const MemoryTensor& logits, std::uintptr_t stream,
                                                 const std::vector<std::string>& names) {
    const Ids ids = ids_of("ids", from, vocab_size());
    const AnyView<2> to = logits_on_device(logits);
    const Run one{.sequence = slot, .first_position = first, .count = std::int64_t(ids.size())};
    const std::int64_t rows = to.shape[0];
    return pass(slot, ids, rows, names, 0, [&] {
      return model_->run(std::span(&one, 1), ids,
                         {.own = false, .rows = std::span(&rows, 1), .to = to, .stream = stream});
    });
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
    return take(work(*turns_, [&]() -> Result<Ids> {
      std::vector<ModelRunner::Draw> draws;
      for (const auto& [slot, position, left] : from) {
        CF_TRY(check_logits(slot));
        if (position != model_->length(slot))
          return Status::error(Code::invalid_argument, "slot " + std::to_string(slot) +
                                                           ": expected a choice for position " +
                                                           std::to_string(model_->length(slot)) + ", its length, got " +
                                                           std::to_string(position));
        if (left < 0)
          return Status::error(Code::invalid_argument, "slot " + std::to_string(slot) +
                                                           ": left: expected at least 0, got " + std::to_string(left));
        draws.push_back({.slot = slot,
                         .sampling = {},
                         .sequence = 0,
                         .position = position,
                         .history = {},
                         .left = left,
                         .stop = stop});
      }
      Ids ids;
      for (const Result<std::int32_t>& id : model_->choose(draws)) {
        CF_TRY(id.status());
        ids.push_back(*id);
      }
      return ids;
    }));
  }

  Array logits(std::int64_t slot) {
    return array_of(take(work(*turns_, [&]() -> Result<Tensor> {
      CF_TRY(check_logits(slot));
      return model_->logits(slot);
    })));
  }

  std::int64_t length(std::int64_t slot) {
    return take(work(*turns_, [&]() -> Result<std::int64_t> {
      CF_TRY(check_slot(slot));
      return model_->length(slot);
    }));
  }

  /// The bound of the logits' error with activations of a dtype, for these ids: relative L2, relative maximum.
  std::pair<double, double> error_bound(nb::handle from, const std::string& activation) {
    const Ids ids = ids_of("ids", from, vocab_size());
    const std::optional<DType> dtype = dtype_from_string(activation);
    if (!dtype || *dtype == DType::i32)
      refuse("activation: expected float16, bfloat16, float32 or float64, got '" + activation + "'");
    if (!cpu_ || cpu_->activation() != DType::f64) refuse("error_bound: expected the oracle, activation float64");
    Condition condition{0, 0};
    check(work(*turns_, [&]() -> Status {
      Tensor logits(DType::f64, {std::int64_t(ids.size()), vocab_size()});
      cpu_->measure(&condition);
      const Status ran = cpu_->forward(0, 0, ids, logits.view<2>());
      cpu_->measure(nullptr);
      if (ran) has_logits_[0] = false;
      return ran;
    }));
    const Budget budget = model_budget(cpu_->model(), *dtype, condition);
    return {budget.rel_l2, budget.rel_max};
  }

  bool is_open() {
    return take(work(*turns_, [&]() -> Result<bool> { return !leased_ || leased_->is_open(); }));
  }

  void close() {
    check(work(*turns_, [&] {
      if (leased_) leased_->close();
      return Status();
    }));
  }

  void release(std::int64_t slot) {
    check(work(*turns_, [&]() -> Status {
      CF_TRY(check_slot(slot));
      model_->release(slot);
      has_logits_[std::size_t(slot)] = false;
      return {};
    }));
  }

 private:
  /// One token of each of some slots.
  struct Step {
    std::vector<Run> runs;
    Ids ids;
  };

  Step step_of(const Steps& from) const {
    Step step;
    for (const auto& [slot, id, position] : from) {
      if (id < 0 || id >= vocab_size())
        refuse("slot " + std::to_string(slot) + ": expected an id of 0 to " + std::to_string(vocab_size() - 1) +
               ", got " + std::to_string(id));
      step.runs.push_back({.sequence = slot, .first_position = position});
      step.ids.push_back(std::int32_t(id));
    }
    return step;
  }

  void run_step(const Step& step, const StepLogits& logits) {
    if (step.runs.empty()) return;
    check(work(*turns_, [&]() -> Status {
      CF_TRY(model_->run(step.runs, step.ids, logits));
      for (const Run& r : step.runs) has_logits_[std::size_t(r.sequence)] = true;
      return {};
    }));
  }

  /// Checks the memory of a device that the caller gives for logits (tokens, vocab), and returns its view.
  AnyView<2> logits_on_device(const MemoryTensor& tensor) const {
    const auto& [address, dtype, shape] = tensor;
    if (!leased_) refuse("logits: expected a model on a GPU, got one on the CPU");
    if (dtype != to_string(model_->activation()) || shape.size() != 2 || shape[0] < 0 || shape[1] != vocab_size())
      refuse("logits: expected (tokens, " + std::to_string(vocab_size()) + ") of " +
             std::string(to_string(model_->activation())) + ", got " + to_string(shape) + " of " + dtype);
    if (address == 0 && shape[0] > 0) refuse("logits: expected the address of their elements, got 0");
    return {reinterpret_cast<void*>(address), {shape[0], shape[1]}, model_->activation()};
  }

  /// Runs forward(), which makes the last `rows` logits of a slot's new ids, and returns the taps. The host has room
  /// for `host_rows` of the logits.
  template <class Forward>
  std::map<std::string, Array> pass(std::int64_t slot, const Ids& ids, std::int64_t rows,
                                    const std::vector<std::string>& names, std::int64_t host_rows, Forward&& forward) {
    const auto tokens = std::int64_t(ids.size());
    if (rows < 0 || rows > tokens)
      refuse("rows: expected 0 to " + std::to_string(tokens) + ", the number of ids, got " + std::to_string(rows));
    std::map<std::string, Shape> shapes;
    double elements = double(host_rows) * double(vocab_size());
    const ModelNames& modules = names_of(model_->model());
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
    check(work(*turns_, [&]() -> Status {
      const double bytes = elements * double(size_bytes(model_->activation()));
      CF_TRY(check_free_memory(bytes, "the logits and taps need " + gigabytes(bytes)));
      for (const auto& [name, shape] : shapes) made[name].rows = Tensor(model_->activation(), shape);
      if (!made.empty())
        model_->watch([&](const ModelSite& site, std::span<const ModelRunner::SiteTensor> tensors) -> Status {
          return append_taps(*model_, site, tensors, made);
        });
      const Status ran = forward();
      if (ran) has_logits_[std::size_t(slot)] = false;
      if (!made.empty()) model_->watch({});
      return ran;
    }));
    std::map<std::string, Array> taps;
    for (auto& [name, tap] : made) taps.emplace(name, array_of(std::move(tap.rows)));
    return taps;
  }

  Status check_slot(std::int64_t slot) const {
    if (slot >= 0 && slot < slots()) return {};
    return Status::error(Code::invalid_argument,
                         "slot: expected 0 to " + std::to_string(slots() - 1) + ", got " + std::to_string(slot));
  }

  /// Refuses a slot without logits of its own.
  Status check_logits(std::int64_t slot) const {
    CF_TRY(check_slot(slot));
    if (has_logits_[std::size_t(slot)]) return {};
    return Status::error(Code::invalid_argument,
                         "slot " + std::to_string(slot) + ": expected a prefill() or step() to make its logits");
  }

  static Status unimplemented_on_device(const std::string& what) {
    return Status::error(Code::unimplemented, what + " on a GPU; device='cpu' has it");
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
           std::to_string(model_->model().shape.num_layers - 1));
  }

  std::shared_ptr<Turns> turns_;
  Interrupt interrupt_;
  std::int64_t cache_bytes_ = 0, workspace_bytes_ = 0;
  std::vector<Tap> taps_;
  std::unique_ptr<ModelRunner> model_;
  Model* cpu_ = nullptr;            // the model, if it runs on the CPU
  LeasedRunner* leased_ = nullptr;  // and else
  std::vector<bool> has_logits_;    // by slot: whether the last call that changed the slot made its logits
};

/// A decoder whose model runs on the CPU or on a GPU. A mutex lets one thread call it at a time.
class PythonDecoder {
 public:
  PythonDecoder(const Weights& w, std::int64_t slots, std::int64_t capacity, std::int64_t chunk,
                const std::string& activation)
      : turns_(std::make_shared<Turns>()), decoder_(make_model(w, slots, capacity, chunk, activation, interrupt_)) {}
  PythonDecoder(const std::shared_ptr<SharedModel>& shared, std::int64_t slots)
      : turns_(turns_of(shared)), decoder_(hold(lease(shared, slots, interrupt_))) {}

  std::int64_t add(nb::handle prompt, const Sampling& sampling, std::uint64_t id, nb::handle stop,
                   std::optional<std::int64_t> max_new_tokens) {
    const std::int64_t vocab_size = decoder_.runner().model().shape.vocab_size;
    const Ids ids = ids_of("prompt", prompt, vocab_size);
    SequenceOptions options{.sampling = sampling, .id = id, .stop = ids_of("stop", stop, vocab_size)};
    options.max_new_tokens = max_new_tokens.value_or(options.max_new_tokens);
    return take(work(*turns_, [&] { return decoder_.add(ids, std::move(options)); }));
  }
  std::vector<std::pair<std::int64_t, std::int32_t>> prefill() {
    return pairs(take(work(*turns_, [&] { return decoder_.prefill(); })));
  }
  std::vector<std::pair<std::int64_t, std::int32_t>> decode(std::int64_t steps) {
    return pairs(take(work(*turns_, [&] { return decoder_.decode(steps); })));
  }
  void drop(std::int64_t sequence) {
    check(work(*turns_, [&] { return decoder_.drop(sequence); }));
  }
  Ids ids(std::int64_t sequence) {
    return take(work(*turns_, [&] { return decoder_.ids(sequence); }));
  }
  std::string finish(std::int64_t sequence) {
    return std::string(to_string(take(work(*turns_, [&] { return decoder_.finish(sequence); }))));
  }
  std::optional<std::string> status(std::int64_t sequence) {
    return take(work(*turns_, [&]() -> Result<std::optional<std::string>> {
      CF_TRY(decoder_.finish(sequence).status());  // refuses an unknown sequence
      const Status status = decoder_.status(sequence);
      return status ? std::nullopt : std::optional(status.message());
    }));
  }
  Array logits(std::int64_t sequence) {
    return array_of(take(work(*turns_, [&] { return decoder_.logits(sequence); })));
  }
  void close() {
    check(work(*turns_, [&] {
      if (leased_) leased_->close();
      return Status();
    }));
  }
  bool active() {
    return take(work(*turns_, [&]() -> Result<bool> { return decoder_.active(); }));
  }
  std::int64_t free_slots() {
    return take(work(*turns_, [&]() -> Result<std::int64_t> { return decoder_.free_slots(); }));
  }

 private:
  static std::vector<std::pair<std::int64_t, std::int32_t>> pairs(const std::vector<Decoder::Emitted>& emitted) {
    std::vector<std::pair<std::int64_t, std::int32_t>> pairs;
    for (const Decoder::Emitted& e : emitted) pairs.emplace_back(e.sequence, e.id);
    return pairs;
  }

  std::unique_ptr<LeasedRunner> hold(std::unique_ptr<LeasedRunner> leased) {
    leased_ = leased.get();
    return leased;
  }

  std::shared_ptr<Turns> turns_;
  Interrupt interrupt_;
  LeasedRunner* leased_ = nullptr;  // the decoder's runner, where its model runs on a GPU
  Decoder decoder_;
};

/// Copies a model to a GPU, or reads the weights that lie there in place.
std::shared_ptr<SharedModel> make_shared_model(const Weights& w, int device, std::int64_t slots, std::int64_t capacity,
                                               std::int64_t chunk, const std::string& impl) {
  if (w.place == Place::none) refuse("weights: expected their values, got none: drop_values() gave them back");
  const bool in_place = w.place == Place::device;
  DeviceModel made = take([&]() -> Result<DeviceModel> {
    const WithoutGil without_gil;
    return make_device_model(w.config.name, w.config.spec(), w.weights,
                             {device, slots, capacity, chunk, impl, in_place});
  }());
  return std::make_shared<SharedModel>(std::move(made), device, in_place ? w.owner : nullptr);
}

void bind_device(nb::module_& m) {
  m.def("has_cuda", &has_cuda, "Whether this build has the CUDA backend.");
  m.attr("WEIGHT_ALIGNMENT") = kWeightAlignment;
  m.def(
      "cuda_versions", [] { return take(cuda_versions()); },
      "The newest CUDA that the driver runs, \"0.0\" without a driver, and the CUDA that this build links.");
  m.def("cublaslt", &cublaslt, "The cuBLASLt that was found, or why there is none.");
  m.def(
      "check_cuda_device", [](int device) { check(check_device(device)); }, "device"_a = 0,
      "Raises CfError for a GPU that is not there or that this build has no kernels for, and NotImplementedError where "
      "the build has no CUDA backend. Takes no memory of the device.");
  m.def(
      "cuda_device",
      [](int device) {
        const DeviceInfo d = take([&] {
          const WithoutGil without_gil;
          return device_info(device);
        }());
        return std::tuple(d.name, d.compute_capability, std::int64_t(d.memory_bytes), std::int64_t(d.free_bytes));
      },
      "device"_a = 0,
      "A GPU's name, its compute capability (90 for 9.0), the bytes of its memory and those that are free. Raises what "
      "check_cuda_device() raises.");
  nb::class_<SharedModel>(m, "DeviceModel",
                          "A model in the memory of a GPU. Runners and decoders share it, each with slots of its own; "
                          "threads take turns.")
      .def(nb::new_(&make_shared_model), "weights"_a, nb::kw_only(), "device"_a = 0, "slots"_a = 1, "capacity"_a = 2048,
           "chunk"_a = 512, "impl"_a = "auto",
           "Copies the weights to the device, or reads in place those that lie there, and takes memory for a cache of "
           "`slots` sequences of `capacity` entries. Raises ValueError for sizes below 1 and an unknown `impl`, "
           "NotImplementedError for what the impl "
           "or the backend does not take, MemoryError where the device's memory is not free, and CfError where there "
           "is no such device.")
      .def_prop_ro("device", &SharedModel::device, "The number of the GPU.")
      .def_prop_ro("slots", &SharedModel::slots, "Sequences that the cache holds.")
      .def_prop_ro("free_slots", &SharedModel::free_slots, "Slots that no runner and no decoder has.")
      .def_prop_ro("capacity", &SharedModel::capacity, "Entries that a slot has room for.")
      .def_prop_ro("impl", &SharedModel::impl, "How a step is launched.")
      .def_prop_ro(
          "activation", [](const SharedModel& s) { return std::string(to_string(s.activation())); },
          "The dtype of activations, cache and logits.")
      .def_prop_ro("weight_bytes", &SharedModel::weights_bytes,
                   "The bytes of the model's own weights on the device: 0 where it reads them in place.")
      .def_prop_ro("cache_bytes", &SharedModel::cache_bytes, "The bytes of the cache.")
      .def_prop_ro("workspace_bytes", &SharedModel::workspace_bytes, "The bytes of the activations.")
      .def(
          "close",
          [](SharedModel& s) {
            check(work(s.turns(), [&] {
              s.close();
              return Status();
            }));
          },
          "Gives the device's memory back. What its runners are asked from now on raises CfError.");
}

constexpr const char* kClose =
    "Gives the slots of a model on a GPU back; every other call is refused then. Does nothing on the CPU.";
constexpr const char* kSharedInit =
    "Takes `slots` of a model on a GPU until it ends. Raises ValueError where fewer are free.";
constexpr const char* kRunnerInit =
    "Takes memory for a cache of `slots` sequences of `capacity` entries and for activations of dtype `activation`; "
    "`chunk` tokens of a prompt go through the model at once. Raises ValueError for sizes below 1 or another dtype, "
    "and MemoryError where the memory is not free.";

void bind_weights(nb::module_& m) {
  m.def(
      "presets",
      [] {
        std::vector<std::string> names;
        for (const ModelConfig& preset : presets()) names.push_back(preset.name);
        return names;
      },
      "The names of the models whose shapes the library has: Pythia, Llama, Qwen and others.");
  m.def(
      "check_config",
      [](const std::string& config) { check(checkpoint::parse_hf_config(config, "tensors: config").status()); },
      "config"_a, "Raises ValueError for a config.json's text of a model that the library does not have.");
  nb::class_<Weights>(m, "Weights", "A model's weights, shared by all that step them and never copied.")
      .def_static(
          "open", &open, "directory"_a, nb::kw_only(), "for_gpu"_a = false,
          "Maps a checkpoint directory, dense or GPTQ. Raises FileNotFoundError for a directory that is missing "
          "or holds no checkpoint, ValueError for one that is damaged or has a weight that is not finite, and, but for "
          "a GPU, MemoryError for one that is larger than this machine's memory.")
      .def_static("preset", &preset, "name"_a, "dtype"_a = "float16", "seed"_a = 0, "progress"_a = nb::none(),
                  nb::sig("def preset(name: str, dtype: str = 'float16', seed: int = 0, "
                          "progress: collections.abc.Callable[[int, int], object] | None = None) -> Weights"),
                  "A preset, such as \"pythia-70m\", with procedural weights of a dtype. `progress` is "
                  "told the bytes that are made and those of all weights, after each tensor. Raises "
                  "FileNotFoundError for another name, with the names that there are, and MemoryError.")
      .def_static(
          "from_tensors", &from_tensors, "config"_a, "tensors"_a, "owner"_a.none(), "gptq"_a = nb::none(),
          "on_device"_a = false,
          nb::sig("def from_tensors(config: str, tensors: dict[str, tuple[int, str, tuple[int, ...]]], "
                  "owner: object, gptq: str | None = None, on_device: bool = False) -> Weights"),
          "Takes weights that lie in memory. `config` is config.json's text. `tensors` has each tensor's address, "
          "dtype name and shape by Hugging Face's name; what the library joins, such as q_proj, k_proj and v_proj, is "
          "copied unless it is given whole, by the joined Linear's name. `owner` keeps the memory and must not lead "
          "back to these "
          "weights. `gptq` is quantize_config.json's text. Addresses `on_device` are a GPU's, but for those of what "
          "is quantised, which pack() brings there: dense values are not looked at, and only a DeviceModel takes the "
          "weights, which it reads where they lie. Raises ValueError for a tensor "
          "that is missing, unknown, of "
          "another shape or dtype, or not finite.")
      .def_prop_ro("config", &config_of, nb::sig("def config(self) -> dict[str, typing.Any]"),
                   "The model's config in the names of transformers 4.x.")
      .def_ro("notes", &Weights::notes,
              "What the files do not say: contradictions in the checkpoint and how they were resolved, or that the "
              "weights are "
              "a preset's; a line each.")
      .def_prop_ro(
          "dtype", [](const Weights& w) { return std::string(to_string(w.config.dtype)); },
          "The dtype of every weight that is not quantised.")
      .def_prop_ro("bytes", &Weights::bytes, "The bytes of all weights.")
      .def_ro("procedural", &Weights::procedural, "Whether they are a preset's: random numbers and no checkpoint's.")
      .def_ro("copied_bytes", &Weights::copied_bytes, "Those of them that were copied, to be joined.")
      .def("pack", &pack_weights, "device"_a, "stream"_a, "allocate"_a, "owner"_a,
           nb::sig("def pack(self, device: int, stream: int, allocate: collections.abc.Callable[[int], object], "
                   "owner: object) -> None"),
           "Packs what is quantised for a GPU's kernels. `allocate` makes a tensor of so many bytes there. `owner` "
           "keeps "
           "the memory of the dense tensors, and nothing else is kept then. Raises NotImplementedError in a build "
           "without the CUDA backend, and ValueError for weights that are not on a device.")
      .def("rope_table", &rope_table_of, "rows"_a,
           nb::sig("def rope_table(self, rows: int) -> tuple[numpy.typing.NDArray[numpy.float32], "
                   "numpy.typing.NDArray[numpy.float32]]"),
           "The cosines and sines of positions 0 to rows - 1 by the model's config, (rows, rotary_dim / 2) each.")
      .def("drop_values", &Weights::drop_values,
           "Gives the memory of the weights back once a DeviceModel has its copy. No model can be made of them then.");
  m.def(
      "eos_token_ids",
      [](const std::string& directory) { return take(checkpoint::read_generation_config(directory)).eos_token_ids; },
      "directory"_a, "The ids that end a sequence, from generation_config.json or else config.json.");
}

/// The taps in the order of their names in the call.
nb::dict dict_of(const std::vector<std::string>& names, const std::map<std::string, Array>& taps) {
  nb::dict dict;
  for (const std::string& name : names) dict[name.c_str()] = taps.at(name);
  return dict;
}

void bind_runner(nb::module_& m) {
  nb::class_<Runner>(m, "Runner", "A model with a KV cache. Threads take turns.")
      .def(nb::init<const Weights&, std::int64_t, std::int64_t, std::int64_t, const std::string&>(), "weights"_a,
           nb::kw_only(), "slots"_a = 1, "capacity"_a = 2048, "chunk"_a = 512, "activation"_a = "float32", kRunnerInit)
      .def(nb::init<const std::shared_ptr<SharedModel>&, std::int64_t>(), "model"_a, nb::kw_only(), "slots"_a = 1,
           kSharedInit)
      .def_prop_ro("slots", &Runner::slots, "Sequences that the cache holds.")
      .def_prop_ro("capacity", &Runner::capacity, "Entries that a slot has room for.")
      .def_prop_ro("taps", &Runner::tap_names, "The names that run() takes, in the order of the model.")
      .def_prop_ro(
          "cache_bytes", [](const Runner& r) { return r.cache_bytes(); }, "The bytes of the cache.")
      .def_prop_ro(
          "workspace_bytes", [](const Runner& r) { return r.workspace_bytes(); }, "The bytes of the activations.")
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
          "Takes a slot for a sequence and returns its number. Random numbers depend on seed, id and position alone. "
          "Raises ValueError for a prompt that is empty, longer than the capacity or outside the vocabulary, for "
          "settings that have no meaning, and where no slot is free.")
      .def("prefill", &PythonDecoder::prefill,
           "Reads the prompts of the sequences added since; returns (sequence, id) of each one's first id.")
      .def("decode", &PythonDecoder::decode, "steps"_a = 1,
           "Gives each running sequence up to `steps` ids; returns them as (sequence, id).")
      .def("drop", &PythonDecoder::drop, "sequence"_a, "Ends a sequence and forgets it.")
      .def("ids", &PythonDecoder::ids, "sequence"_a, "A sequence's ids behind its prompt.")
      .def("finish", &PythonDecoder::finish, "sequence"_a,
           "Why a sequence has ended: \"running\", \"stop\", \"length\" or \"failed\".")
      .def("status", &PythonDecoder::status, "sequence"_a, "How a sequence failed, or None.")
      .def("logits", &PythonDecoder::logits, "sequence"_a,
           nb::sig("def logits(self, sequence: int) -> numpy.typing.NDArray[typing.Any]"),
           "The logits (vocab) that a running sequence's last id was chosen from.")
      .def("close", &PythonDecoder::close, kClose)
      .def_prop_ro("active", &PythonDecoder::active, "Whether any sequence is running.")
      .def_prop_ro("free_slots", &PythonDecoder::free_slots, "Slots that no sequence holds.");
}

}  // namespace

void bind_model(nb::module_& m) {
  bind_threads(m);
  bind_weights(m);
  bind_device(m);
  bind_runner(m);
  bind_decoder(m);
}

}  // namespace cf::python
