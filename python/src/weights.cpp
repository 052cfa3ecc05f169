#include "python/src/weights.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <map>
#include <utility>

#include "core/model/model.hpp"
#include "core/model/runner.hpp"
#include "core/procedural.hpp"
#include "core/resources.hpp"
#include "golden/checkpoint/generation_config.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/device_ops.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace cf::python {
namespace {

/// Loads all weights of a checkpoint. Looks at their values where they lie on the host; those of a model that the host
/// runs must fit into its memory.
Result<Weights> load(const checkpoint::ModelSource& source, Memory memory, bool runs_on_host,
                     const WeightsProgress& progress = {}) {
  CF_TRY_ASSIGN(checkpoint::LoadedModel loaded, source.outline());
  if (runs_on_host) {
    const auto needed = double(loaded.bytes());
    CF_TRY(check_total_memory(needed, loaded.config.name + ": the weights need " + gigabytes(needed)));
  }
  if (memory == Memory::host) CF_TRY(source.fill(loaded, progress));
  return Weights{std::move(loaded), memory};
}

/// Tells a Python function of how far weights have come, and lets Python handle signals. Work without the GIL calls it.
class Teller {
 public:
  explicit Teller(const nb::object& progress) : progress_(progress) {}
  Status operator()(std::int64_t done_bytes, std::int64_t all_bytes) {
    CF_TRY(interrupt_.check());
    if (progress_.is_none() || interpreter_ends()) return {};
    const nb::gil_scoped_acquire acquire;
    PyObject* const told = PyObject_CallFunction(progress_.ptr(), "LL", static_cast<long long>(done_bytes),
                                                 static_cast<long long>(all_bytes));
    Py_XDECREF(told);
    return told ? Status() : Status::error(Code::io_error, "progress failed");
  }

 private:
  Interrupt interrupt_;
  const nb::object& progress_;
};

/// The value of a Result, unless the Teller's function or a signal's handler has raised an exception.
template <class T>
T take_told(Result<T> made) {
  if (PyErr_Occurred()) throw nb::python_error();
  return take(std::move(made));
}

Weights open(const std::string& directory, bool for_gpu, const nb::object& progress) {
  checkpoint::guard_mapped_files();
  Teller tell(progress);
  return take_told([&]() -> Result<Weights> {
    const WithoutGil without_gil;
    CF_TRY_ASSIGN(const checkpoint::ModelSource source, checkpoint::ModelSource::open({.directory = directory}));
    return load(source, Memory::host, !for_gpu, std::ref(tell));
  }());
}

Weights preset(const std::string& name, const std::string& dtype, std::uint64_t seed, const nb::object& progress) {
  const std::optional<DType> stored = dtype_from_string(dtype);
  if (!stored || (*stored != DType::f16 && *stored != DType::bf16 && *stored != DType::f32))
    refuse("dtype: expected float16, bfloat16 or float32, got '" + dtype + "'");
  Teller tell(progress);
  return take_told([&]() -> Result<Weights> {
    const WithoutGil without_gil;
    CF_TRY_ASSIGN(const checkpoint::ModelSource source,
                  checkpoint::ModelSource::open({.preset = name, .dtype = *stored, .seed = seed}));
    CF_TRY_ASSIGN(checkpoint::LoadedModel loaded, source.load(std::ref(tell)));
    loaded.notes = {name + ": procedural weights, made of random numbers and not trained"};
    return Weights{std::move(loaded), Memory::host, true};
  }());
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
    CF_TRY_ASSIGN(checkpoint::Checkpoint opened,
                  checkpoint::Checkpoint::from_memory(config, gptq, std::move(entries), kept, "tensors"));
    CF_TRY(opened.check_names());
    if (on_device) CF_TRY(opened.check_dense_whole());
    return load(checkpoint::ModelSource(std::move(opened)), on_device ? Memory::device : Memory::host, false);
  }());
}

/// Packs what is quantised for a model on a GPU, into memory that `allocate` gives, a function of a number of bytes
/// that makes a tensor. From then on the weights are kept by that memory and by `owner`.
void pack_weights(Weights& w, int device, std::uintptr_t stream, const nb::callable& allocate, nb::object owner) {
  if (w.memory != Memory::device) refuse("weights: expected them on a device, got others");
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

/// The model that ends behind its first layers; the weights are those of `w`.
Weights first_layers(const Weights& w, std::int64_t count) {
  const std::int64_t all = w.config.num_hidden_layers;
  if (count < 1 || count > all)
    refuse("layers: expected 1 to " + std::to_string(all) + ", those of the model, got " + std::to_string(count));
  Weights first = w;
  first.config.num_hidden_layers = count;
  if (!first.config.full_layers.empty()) first.config.full_layers.resize(std::size_t(count));
  first.layers_left_out += all - count;
  if (count < all)
    first.notes.push_back(w.config.name + ": the first " + std::to_string(count) + " of " + std::to_string(all) +
                          " layers alone, before the last norm and the head");
  first.weights.layers.resize(std::size_t(count));
  return first;
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

}  // namespace

void bind_weights(nb::module_& m) {
  m.def("presets", &checkpoint::preset_names,
        "The names of the models whose shapes the library has: Pythia, Llama, Qwen and others.");
  m.def(
      "check_config",
      [](const std::string& config) { check(checkpoint::parse_hf_config(config, "tensors: config").status()); },
      "config"_a, "Raises ValueError for a config.json's text of a model that the library does not have.");
  nb::class_<Weights>(m, "Weights", "A model's weights, shared by all that step them and never copied.")
      .def_static(
          "open", &open, "directory"_a, nb::kw_only(), "for_gpu"_a = false, "progress"_a = nb::none(),
          nb::sig("def open(directory: str, *, for_gpu: bool = False, "
                  "progress: collections.abc.Callable[[int, int], object] | None = None) -> Weights"),
          "Maps a checkpoint directory, dense, GPTQ or fp8, and looks at all values. `progress` is told the bytes that "
          "were "
          "looked at and those of all weights, after each tensor. Raises FileNotFoundError for a directory that is "
          "missing "
          "or holds no checkpoint, ValueError for one that is damaged or has a weight that is not finite, "
          "and, but for a GPU, MemoryError for one that is larger than this machine's memory.")
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
      .def("first_layers", &first_layers, "count"_a,
           "The weights of the model that ends behind its first `count` layers, its last norm and its head. Nothing is "
           "copied. Raises ValueError for fewer than 1 and more than the model has.")
      .def_prop_ro(
          "layers", [](const Weights& w) { return w.config.num_hidden_layers; }, "How many layers there are.")
      .def(
          "check_swap",
          [](const Weights& w, const Weights& other) {
            check(check_swap(w.config.spec(), w.weights, other.config.spec(), other.weights));
          },
          "other"_a,
          "Raises ValueError for weights that cannot take the place of these in a model: of another config, shape, "
          "dtype "
          "or format.")
      .def_ro("layers_left_out", &Weights::layers_left_out,
              "How many of the checkpoint's last layers first_layers() has left out.")
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

}  // namespace cf::python
