// One function runs every op of ops.def on the CPU: it finds the op by its name, and the op's tensors by the names that
// the contract lists. One class runs every op on a GPU: it does that once for tensors of the same dtypes and shapes. An
// op needs no line here.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/model/examples.hpp"
#include "cpu_ref/cpu_ref.hpp"
#include "golden/checkpoint/hf_config.hpp"
#include "python/src/bindings.hpp"
#include "python/src/bound_op.hpp"
#include "python/src/known_calls.hpp"
#include "python/src/port/port_layer.hpp"
#include "python/src/work.hpp"

namespace nb = nanobind;

namespace cf::python {
namespace {

/// A call's tensors by the contract's names.
using Tensors = std::map<std::string, MemoryTensor>;

/// A call of an op by its name, before its arguments are checked and bound to the op's Args.
struct Call {
  std::string op;
  Tensors tensors;
  nb::dict scalars;
};

std::string quoted(std::string_view name) { return std::string("'").append(name).append("'"); }

/// Refuses a key that is not in `known`.
Status refuse_unknown(const std::string& op, std::string_view kind, const std::vector<std::string>& keys,
                      const std::vector<std::string>& known) {
  for (const std::string& key : keys) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    return bad_argument(op, quoted(key) + " is none of its " + std::string(kind) + ", expected " + names);
  }
  return {};
}

/// Calls f(prefix, linear) for each Linear of an op's arguments. The names of its tensors begin with the prefix.
template <class Args, class F>
void for_each_linear_of(Args& a, F&& f) {
  if constexpr (requires { a.linear; }) f(std::string(), a.linear);
  if constexpr (requires { a.weights; })
    for_each_linear(a.model, a.weights, [&](const Site& site, auto& linear, const LinearSize&) {
      f(std::string(site.name) + ".", linear);
    });
}

/// Calls f(name, scalar) for each scalar of an op's arguments, except those of its weights.
template <class Args, class F>
void for_each_scalar(Args& a, F&& f) {
  if constexpr (requires { a.model; }) f(std::string("config"), a.model);
  if constexpr (requires { a.epilogue; }) f(std::string("epilogue"), a.epilogue);
  if constexpr (requires { a.layout; }) f(std::string("layout"), a.layout);
  if constexpr (requires { a.kv_heads; }) f(std::string("kv_heads"), a.kv_heads);
  if constexpr (requires { a.eps; }) f(std::string("eps"), a.eps);
  if constexpr (requires { a.scale; }) f(std::string("scale"), a.scale);
  if constexpr (requires { a.max_kv_len; }) f(std::string("max_kv_len"), a.max_kv_len);
  if constexpr (requires { a.t.max_kv_len; }) f(std::string("max_kv_len"), a.t.max_kv_len);
  if constexpr (requires { a.runs; }) f(std::string("runs"), a.runs);
  if constexpr (requires { a.t.runs; }) f(std::string("runs"), a.t.runs);
  if constexpr (requires { a.window; }) f(std::string("window"), a.window);
}

/// Calls f(name, scalar) for each scalar of an op's quantised weights.
template <class Args, class F>
void for_each_gptq_scalar(Args& a, F&& f) {
  for_each_linear_of(a, [&](const std::string& prefix, LinearParams& linear) {
    auto* gptq = std::get_if<GptqWeight>(&linear.weight);
    if (!gptq) return;
    f(prefix + "bits", gptq->bits);
    f(prefix + "group_size", gptq->group_size);
    f(prefix + "zero_offset", gptq->zero_offset);
  });
}

constexpr std::array kEpilogues{std::pair{"none", ops::Epilogue::none}, std::pair{"gelu_erf", ops::Epilogue::gelu_erf},
                                std::pair{"gelu_tanh", ops::Epilogue::gelu_tanh},
                                std::pair{"residual", ops::Epilogue::residual},
                                std::pair{"swiglu", ops::Epilogue::swiglu}};
constexpr std::array kLayouts{std::pair{"interleaved_by_head", ops::QkvLayout::interleaved_by_head},
                              std::pair{"separate", ops::QkvLayout::separate}};

template <class Names, class T>
const char* name_in(const Names& choices, T value) {
  return std::find_if(choices.begin(), choices.end(), [&](const auto& c) { return c.second == value; })->first;
}

/// Reads scalars by name. One that is not given keeps its value. The first fault stays in status(). The runs of a call
/// are read into `runs`, which the arguments then refer to.
class ScalarReader {
 public:
  ScalarReader(std::string_view op, const nb::dict& scalars, std::vector<RowRun>& runs)
      : op_(op), scalars_(scalars), runs_(runs) {}

  template <class T>
  void operator()(const std::string& name, T& value) {
    known_.push_back(name);
    if (!status_ || !scalars_.contains(name.c_str())) return;
    const nb::handle given = scalars_[name.c_str()];
    if constexpr (std::is_same_v<T, ops::Epilogue>) {
      choose(kEpilogues, name, given, value);
    } else if constexpr (std::is_same_v<T, ops::QkvLayout>) {
      choose(kLayouts, name, given, value);
    } else if constexpr (std::is_same_v<T, RowRuns>) {
      std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> table;
      if (!nb::try_cast(given, table) || table.empty())
        return refuse(name, "a list of (sequence, first_row, count) with one at least", given);
      for (const auto& [sequence, first_row, count] : table) runs_.push_back({sequence, first_row, count});
      value = runs_;
    } else if constexpr (std::is_same_v<T, KeyWindow>) {
      std::pair<std::int64_t, std::int64_t> window;
      if (!nb::try_cast(given, window)) return refuse(name, "(keys, sinks)", given);
      value = {window.first, window.second};
    } else if constexpr (std::is_same_v<T, ModelSpec>) {
      std::string text;
      if (!nb::try_cast(given, text)) return refuse(name, "the text of a config.json", given);
      const Result<ModelConfig> config = checkpoint::parse_hf_config(text, std::string(op_) + ": config");
      if (config)
        value = config->spec();
      else
        status_ = config.status();
    } else if (!nb::try_cast(given, value)) {
      refuse(name, std::is_integral_v<T> ? "an integer" : "a number", given);
    }
  }
  const std::vector<std::string>& known() const { return known_; }
  const Status& status() const { return status_; }

 private:
  /// Reads one of several names.
  template <class Names, class T>
  void choose(const Names& choices, const std::string& name, nb::handle given, T& value) {
    std::string text, names;
    const bool is_text = nb::try_cast(given, text);
    for (const auto& [choice, meant] : choices) {
      if (is_text && text == choice) return void(value = meant);
      names += (names.empty() ? "" : ", ") + std::string(choice);
    }
    refuse(name, "one of " + names, given);
  }
  void refuse(const std::string& name, const std::string& expected, nb::handle given) {
    status_ = bad_argument(op_, quoted(name) + " must be " + expected + ", got " + nb::repr(given).c_str());
  }

  std::string_view op_;
  const nb::dict& scalars_;
  std::vector<RowRun>& runs_;
  std::vector<std::string> known_;
  Status status_;
};

/// Sets scalars to numbers of their names and kinds. One that is not given keeps its value.
class NumberReader {
 public:
  explicit NumberReader(std::span<const Number> numbers) : numbers_(numbers) {}

  template <class T>
  void operator()(std::string_view name, T& value) {
    if constexpr (std::is_arithmetic_v<T>)
      for (const Number& number : numbers_)
        if (number.name == name && number.is_integer == std::is_integral_v<T>)
          value = number.is_integer ? T(number.integer) : T(number.real);
  }
  Status status() const { return {}; }

 private:
  std::span<const Number> numbers_;
};

/// Points a view at a given tensor. Refuses another number of dimensions, and a dtype that the view cannot have: the
/// contract's check knows views alone.
template <class View>
Status bind_tensor(const std::string& op, std::string_view name, View& view, const MemoryTensor& given) {
  const auto& [address, dtype_name, shape] = given;
  if (shape.size() != std::size_t(View::rank))
    return bad_argument(op, quoted(name) + " has shape " + to_string(shape) + ", expected " +
                                std::to_string(View::rank) + " dimensions");
  // Checked here, since torch's tensors without elements have no address: the contract would take such a tensor for a
  // missing one.
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 1; }))
    return bad_argument(op, quoted(name) + " has shape " + to_string(shape) + ", expected sizes of at least 1");
  const std::optional<DType> dtype = dtype_from_string(dtype_name);
  constexpr bool is_any = std::is_void_v<std::remove_const_t<typename View::element>>;
  const DType fixed = dtype_of_view<View>(dtype.value_or(DType::i32));
  if (!dtype || *dtype != fixed)
    return bad_argument(op, quoted(name) + " has dtype " + dtype_name + ", expected " +
                                (is_any ? "float16, bfloat16, float32 or float64" : std::string(to_string(fixed))));
  std::array<std::int64_t, View::rank> extents{};
  std::copy(shape.begin(), shape.end(), extents.begin());
  point(view, reinterpret_cast<void*>(address), extents, *dtype);
  return {};
}

/// Calls f(spec, view) for each tensor of an op's arguments. A linear's residual, RoPE's table, learned positions and a
/// table of pages are among them, given or not: the contract's check says best what is wrong with one.
template <class Op, class F>
void for_each_tensor(typename Op::Args& args, F&& f) {
  auto dims = Op::dims(args);
  if constexpr (requires { dims.residual; }) dims.residual = true;
  if constexpr (requires { dims.rotary_dim; }) dims.rotary_dim = std::max<std::int64_t>(dims.rotary_dim, 2);
  if constexpr (requires { dims.position_rows; }) dims.position_rows = std::max<std::int64_t>(dims.position_rows, 1);
  constexpr PageSizes kOne{.pages = 1, .page_entries = 1};
  if constexpr (requires { dims.pool; }) dims.pool = kOne;
  if constexpr (requires { dims.step.pool; }) dims.step.pool = kOne;
  Op::tensors(dims, args, [&](const TensorSpec& spec, auto& view, const auto&) { f(spec, view); });
}

/// An op's arguments, and the runs that they refer to: moved, never copied.
template <class Op>
struct Bound {
  std::vector<RowRun> runs;
  typename Op::Args args{};

  Bound() = default;
  Bound(Bound&&) = default;
  Bound& operator=(Bound&&) = default;
};

/// An op's arguments from those of a call. What the contract itself refuses is left to its check().
template <class Op>
Result<Bound<Op>> bind(const Call& call) {
  Bound<Op> bound;
  typename Op::Args& args = bound.args;
  ScalarReader read(call.op, call.scalars, bound.runs);
  for_each_scalar(args, read);
  for_each_linear_of(args, [&](const std::string& prefix, LinearParams& linear) {
    if (call.tensors.count(prefix + "qweight")) linear.weight = GptqWeight{};
  });

  std::vector<std::string> known;
  Status status;
  for_each_tensor<Op>(args, [&](const TensorSpec& spec, auto& view) {
    known.emplace_back(spec.name);
    const auto given = call.tensors.find(known.back());
    if (status && given != call.tensors.end()) status = bind_tensor(call.op, spec.name, view, given->second);
  });
  // Read after the list of tensors, which divides by them: the contract's check has not seen them yet.
  for_each_gptq_scalar(args, read);
  CF_TRY(read.status());
  CF_TRY(status);

  std::vector<std::string> tensors, scalars;
  for (const auto& [name, tensor] : call.tensors) tensors.push_back(name);
  for (const auto& [name, value] : call.scalars) scalars.push_back(nb::str(name).c_str());
  CF_TRY(refuse_unknown(call.op, "tensors", tensors, known));
  CF_TRY(refuse_unknown(call.op, "scalars", scalars, read.known()));
  return bound;
}

/// A tensor's name and shape.
using NamedShape = std::pair<std::string, Shape>;

template <class Op>
Result<std::vector<NamedShape>> outputs(const Call& call) {
  CF_TRY_ASSIGN(Bound<Op> bound, bind<Op>(call));
  typename Op::Args& args = bound.args;
  // No output's shape depends on how a weight is stored. Fields of quantised weights are not checked yet.
  for_each_linear_of(args, [](const std::string&, LinearParams& linear) { linear.weight = DenseWeight{}; });
  std::vector<NamedShape> shapes;
  Op::tensors(Op::dims(args), args, [&](const TensorSpec& spec, auto&, const auto& shape) {
    if (spec.role == Role::output) shapes.emplace_back(spec.name, Shape(shape.begin(), shape.end()));
  });
  return shapes;
}

template <class Op>
Status run(const Call& call) {
  CF_TRY_ASSIGN(const Bound<Op> bound, bind<Op>(call));
  const WithoutGil without_gil;
  return cpu_ref::run(bound.args);
}

template <class Op>
Result<Budget> budget(const Call& call, Precision precision) {
  CF_TRY_ASSIGN(const Bound<Op> bound, bind<Op>(call));
  const WithoutGil without_gil;
  CF_TRY_ASSIGN(const Condition condition, cpu_ref::condition(bound.args));
  return Op::budget(Op::dims(bound.args), precision, condition);
}

std::uintptr_t address_of(const nb::object& tensor) { return nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()); }

template <class Op>
class BoundTo final : public BoundOp {
 public:
  BoundTo(std::vector<std::string> names, Bound<Op> bound)
      : names_(std::move(names)), runs_(std::move(bound.runs)), args_(std::move(bound.args)) {
    for_each_linear_of(args_, [&](const std::string& prefix, LinearParams& linear) {
      const auto* const weight = std::get_if<GptqWeight>(&linear.weight);
      if (!weight) return;
      gptq_.push_back({prefix, *weight});
      linear.weight = PackedWeight{};
    });
    for_each_tensor<Op>(args_, [&](const TensorSpec& spec, auto&) { places_.push_back(place(spec.name)); });
  }

  std::vector<std::string> gptq() const override {
    std::vector<std::string> prefixes;
    for (const auto& [prefix, weight] : gptq_) prefixes.push_back(prefix);
    return prefixes;
  }
  std::pair<std::int64_t, std::int64_t> row_order() const override {
    const cuda::RopePairs& pairs = cuda::pack_hint(args_).pairs;
    return {pairs.head_dim, pairs.rotary_dim};
  }

  DeviceWeight pack(std::size_t number, const DeviceStream& at, const Addresses& addresses,
                    const nb::callable& allocate) const override {
    check_count("addresses", addresses.size(), names_.size());
    auto [prefix, weight] = gptq_.at(number);
    const auto bring = [&, &prefix = prefix](auto& view, const char* part) {
      using Element = typename std::remove_reference_t<decltype(view)>::element;
      const int from = place(prefix + part);
      if (from >= 0) view.data = reinterpret_cast<Element*>(addresses[std::size_t(from)]);
    };
    bring(weight.qweight, "qweight");
    bring(weight.qzeros, "qzeros");
    bring(weight.scales, "scales");
    bring(weight.g_idx, "g_idx");
    const auto named = [&, &prefix = prefix](const Status& status) {
      if (!status)
        check(Status::error(status.code(),
                            std::string(Op::name) + ": " + quoted(prefix + "weight") + ": " + status.message()));
    };
    Result<cuda::Packed> packed = [&, &weight = weight] {
      const WithoutGil without_gil;
      return pack_on_device(weight, cuda::pack_hint(args_), at);
    }();
    named(packed.status());
    nb::object memory = allocate(packed->storage.size_bytes());
    named([&, address = address_of(memory)] {
      const WithoutGil without_gil;
      return place_on_device(*packed, address, at);
    }());
    return {std::move(*packed), std::move(memory)};
  }

  void run(const DeviceStream& at, const Addresses& addresses, const nb::dict& scalars,
           const std::vector<const DeviceWeight*>& packed, const nb::callable& allocate) const override {
    std::vector<RowRun> runs;
    ScalarReader read(Op::name, scalars, runs);
    run(at, addresses, read, packed, allocate);
  }
  void run(const DeviceStream& at, const Addresses& addresses, std::span<const Number> numbers,
           const std::vector<const DeviceWeight*>& packed, const nb::callable& allocate) const override {
    NumberReader read(numbers);
    run(at, addresses, read, packed, allocate);
  }

 private:
  template <class Reader>
  void run(const DeviceStream& at, const Addresses& addresses, Reader& read,
           const std::vector<const DeviceWeight*>& packed, const nb::callable& allocate) const {
    check_count("addresses", addresses.size(), names_.size());
    check_count("packed weights", packed.size(), gptq_.size());
    typename Op::Args args = args_;
    for_each_scalar(args, read);
    check(read.status());
    auto weight = packed.begin();
    for_each_linear_of(args, [&](const std::string&, LinearParams& linear) {
      if (std::holds_alternative<PackedWeight>(linear.weight)) linear.weight = (*weight++)->packed.weight;
    });
    auto from = places_.begin();
    for_each_tensor<Op>(args, [&](const TensorSpec&, auto& view) {
      using Element = typename std::remove_reference_t<decltype(view)>::element;
      if (const int i = *from++; i >= 0) view.data = reinterpret_cast<Element*>(addresses[std::size_t(i)]);
    });
    // The tensor may be freed once the op is launched: its memory is used again in the stream's order.
    nb::object memory;
    DeviceScratch scratch{.address = 0, .bytes = device_scratch_bytes(args)};
    if (scratch.bytes) {
      memory = allocate(scratch.bytes);
      scratch.address = address_of(memory);
    }
    check([&] {
      const WithoutGil without_gil;
      return run_on_device(args, at, scratch);
    }());
  }

  /// Where a tensor's address stands among a call's; -1 for a tensor that is not given.
  int place(std::string_view name) const {
    const auto found = std::find(names_.begin(), names_.end(), name);
    return found == names_.end() ? -1 : int(found - names_.begin());
  }
  static void check_count(const char* what, std::size_t got, std::size_t expected) {
    if (got != expected)
      check(bad_argument(
          Op::name, std::string("expected ") + std::to_string(expected) + " " + what + ", got " + std::to_string(got)));
  }

  struct Gptq {
    std::string prefix;
    GptqWeight weight;
  };
  std::vector<std::string> names_;
  std::vector<RowRun> runs_;
  typename Op::Args args_;   // GPTQ weights are empty PackedWeights
  std::vector<Gptq> gptq_;   // in the order of for_each_linear_of()
  std::vector<int> places_;  // of each tensor of for_each_tensor()
};

template <class Op>
std::unique_ptr<BoundOp> bound(std::vector<std::string> names, const Call& call) {
  return std::make_unique<BoundTo<Op>>(std::move(names), take(bind<Op>(call)));
}

/// The example that describes an op: a small model, two sequences of two new tokens each.
ModelConfig example_model() {
  ModelConfig m;
  m.hidden_size = 96;
  m.num_hidden_layers = 1;
  m.num_attention_heads = 4;
  m.intermediate_size = 160;
  m.vocab_size = 50;
  m.max_position_embeddings = 32;
  m.rotary_dim = 6;
  return m;
}
constexpr Workload kExampleLoad{.batch = 2, .q_len = 2, .kv_len = 11, .capacity = 13};
constexpr std::int64_t kExampleGroupSize = 32;

constexpr const char* to_string(Role role) {
  switch (role) {
    case Role::input: return "input";
    case Role::output: return "output";
    case Role::state: return "state";
    case Role::cache: return "cache";
    case Role::weight: return "weight";
    case Role::gain: return "gain";
    case Role::gptq: return "gptq";
    case Role::cosine: return "cosine";
    case Role::sine: return "sine";
    case Role::length: return "length";
    case Role::position: return "position";
    case Role::token_id: return "token_id";
    case Role::page_table: return "page_table";
  }
  return "?";
}

/// A tensor of an example: its name, its role, its dtype where the contract fixes it, its shape, whether it may be left
/// out.
using ExampleTensor = std::tuple<std::string, std::string, std::optional<std::string>, Shape, bool>;

template <class Op>
std::pair<std::vector<ExampleTensor>, nb::dict> example(int bits) {
  const ModelConfig model = example_model();
  auto [dims, args] = ops::example<Op>(model, kExampleLoad);
  if (bits)
    for_each_linear_of(args, [&](const std::string&, LinearParams& linear) {
      linear.weight = GptqWeight{.bits = bits, .group_size = kExampleGroupSize, .zero_offset = 1};
    });
  std::vector<ExampleTensor> tensors;
  Op::tensors(dims, args, [&]<class View>(const TensorSpec& spec, View&, const auto& shape) {
    std::optional<std::string> dtype;
    if constexpr (!std::is_void_v<std::remove_const_t<typename View::element>>) dtype = cf::to_string(View::dtype);
    tensors.emplace_back(spec.name, to_string(spec.role), dtype, Shape(shape.begin(), shape.end()), spec.optional);
  });
  nb::dict scalars;
  const auto add = [&]<class T>(const std::string& name, const T& value) {
    if constexpr (std::is_same_v<T, ModelSpec>)
      scalars[name.c_str()] = checkpoint::to_hf_json(model);
    else if constexpr (std::is_same_v<T, ops::Epilogue>)
      scalars[name.c_str()] = name_in(kEpilogues, value);
    else if constexpr (std::is_same_v<T, ops::QkvLayout>)
      scalars[name.c_str()] = name_in(kLayouts, value);
    else if constexpr (std::is_same_v<T, RowRuns> || std::is_same_v<T, KeyWindow>)
      return;  // an example has none
    else
      scalars[name.c_str()] = value;
  };
  for_each_scalar(args, add);
  for_each_gptq_scalar(args, add);
  return {std::move(tensors), std::move(scalars)};
}

/// An op by its name.
struct Entry {
  std::string_view name;
  Result<std::vector<NamedShape>> (*outputs)(const Call&);
  Status (*run)(const Call&);
  Result<Budget> (*budget)(const Call&, Precision);
  std::pair<std::vector<ExampleTensor>, nb::dict> (*example)(int bits);
  std::unique_ptr<BoundOp> (*bind)(std::vector<std::string> names, const Call&);
};

constexpr std::array kEntries{
#define CF_OP(Op) \
  Entry{ops::Op::name, outputs<ops::Op>, run<ops::Op>, budget<ops::Op>, example<ops::Op>, bound<ops::Op>},
#include "core/ops/ops.def"
#undef CF_OP
};

const Entry& entry(const std::string& op) {
  std::string names;
  for (const Entry& e : kEntries) {
    if (e.name == op) return e;
    names += (names.empty() ? "" : ", ") + std::string(e.name);
  }
  check(Status::error(Code::invalid_argument, quoted(op) + " is no op, expected one of " + names));
  return kEntries[0];  // not reached: check() throws
}

DType dtype_named(const std::string& name) {
  const std::optional<DType> dtype = dtype_from_string(name);
  if (!dtype)
    check(Status::error(Code::invalid_argument,
                        "dtype must be float16, bfloat16, float32 or float64, got " + quoted(name)));
  return *dtype;
}

void bind_device_ops(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<DeviceWeight>(m, "DeviceWeight", "A GPTQ weight on a GPU, in the layout of its kernels.")
      .def_prop_ro(
          "memory", [](const DeviceWeight& w) { return w.memory; }, nb::sig("def memory(self) -> typing.Any"),
          "The tensor that the weight lies in.");
  nb::class_<DeviceBlock>(m, "DeviceBlock", "A block of a GPU's memory, for whom torch is not there.")
      .def(nb::new_([](int device, std::size_t bytes) { return take(DeviceBlock::create(device, bytes)); }), "device"_a,
           "bytes"_a, "Raises MemoryError where so much is not free, and what check_cuda_device() raises.")
      .def("data_ptr", &DeviceBlock::address, "The address in the GPU's memory, a multiple of 256.")
      .def_prop_ro("bytes", &DeviceBlock::bytes, "How many bytes it has.")
      .def(
          "write",
          [](DeviceBlock& b, std::uintptr_t from) {
            check([&] {
              const WithoutGil without_gil;
              return b.write(reinterpret_cast<const void*>(from));
            }());
          },
          "from_address"_a,
          "Copies all its bytes from this address of the host's memory, after the default stream's work, and waits.")
      .def(
          "read",
          [](const DeviceBlock& b, std::uintptr_t to) {
            check([&] {
              const WithoutGil without_gil;
              return b.read(reinterpret_cast<void*>(to));
            }());
          },
          "to_address"_a, "Copies all its bytes to this address, as write() does from one.");
  nb::class_<BoundOp>(m, "BoundOp",
                      "An op on a GPU with the dtypes and shapes of its tensors, all but their addresses. A call takes "
                      "addresses in the order in which the tensors were described, and the handle of a CUDA stream.")
      .def_prop_ro("gptq", &BoundOp::gptq,
                   "What stands before the names of the tensors of each GPTQ weight, in the op's order.")
      .def_prop_ro("row_order", &BoundOp::row_order,
                   "The order of rows in which the op's GPTQ weights are packed: equal orders may share a packed "
                   "weight.")
      .def(
          "pack",
          [](const BoundOp& op, std::size_t number, int device, std::uintptr_t stream,
             const BoundOp::Addresses& addresses, const nb::callable& allocate) {
            return op.pack(number, {device, stream}, addresses, allocate);
          },
          "number"_a, "device"_a, "stream"_a, "addresses"_a, "allocate"_a,
          nb::sig("def pack(self, number: int, device: int, stream: int, addresses: collections.abc.Sequence[int], "
                  "allocate: collections.abc.Callable[[int], typing.Any]) -> DeviceWeight"),
          "Packs the GPTQ weight of that number into memory of the device: `allocate` makes a tensor of so many bytes. "
          "Waits for the device. Raises CfError while the stream is captured, and ValueError for tensors that do not "
          "fit each other.")
      .def(
          "run",
          [](const BoundOp& op, int device, std::uintptr_t stream, const BoundOp::Addresses& addresses,
             const nb::dict& scalars, const std::vector<const DeviceWeight*>& packed, const nb::callable& allocate) {
            op.run({device, stream}, addresses, scalars, packed, allocate);
          },
          "device"_a, "stream"_a, "addresses"_a, "scalars"_a, "packed"_a, "allocate"_a,
          nb::sig("def run(self, device: int, stream: int, addresses: collections.abc.Sequence[int], scalars: "
                  "dict[str, object], packed: collections.abc.Sequence[DeviceWeight], allocate: "
                  "collections.abc.Callable[[int], typing.Any]) -> None"),
          "Launches the op and does not wait for it. Addresses are trusted to be of the device. `allocate` makes a "
          "tensor of so many bytes for the launches to use, where they want any.");
  m.def(
      "bind_op",
      [](std::string op, nb::dict tensors, nb::dict scalars) {
        const Entry& e = entry(op);
        std::vector<std::string> names;
        for (const auto& [name, tensor] : tensors) names.push_back(nb::cast<std::string>(name));
        return e.bind(std::move(names), {std::move(op), nb::cast<Tensors>(tensors), std::move(scalars)});
      },
      "op"_a, "tensors"_a, "scalars"_a,
      nb::sig("def bind_op(op: str, tensors: dict[str, tuple[int, str, tuple[int, ...]]], scalars: dict[str, object]) "
              "-> BoundOp"),
      "An op on a GPU with the dtypes and shapes of all its tensors. Their addresses are not looked at. Refuses what "
      "op_outputs() refuses.");
}

}  // namespace

void bind_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "ops",
      [] {
        std::vector<std::string> names;
        for (const Entry& e : kEntries) names.emplace_back(e.name);
        return names;
      },
      "The names of all ops.");
  m.def(
      "op_example", [](const std::string& op, int bits) { return entry(op).example(bits); }, "op"_a, "bits"_a = 0,
      nb::sig("def op_example(op: str, bits: int = 0) -> "
              "tuple[list[tuple[str, str, str | None, list[int], bool]], dict[str, object]]"),
      "A small example of an op's arguments: its tensors in the contract's order as (name, role, dtype where it is "
      "fixed, shape, whether it may be left out), and its scalars. With bits = 4 or 8 every Linear is quantised.");
  m.def(
      "op_outputs",
      [](std::string op, Tensors tensors, nb::dict scalars) {
        const Entry& e = entry(op);
        return take(e.outputs({std::move(op), std::move(tensors), std::move(scalars)}));
      },
      "op"_a, "tensors"_a, "scalars"_a,
      nb::sig("def op_outputs(op: str, tensors: dict[str, tuple[int, str, tuple[int, ...]]], scalars: dict[str, "
              "object]) -> list[tuple[str, list[int]]]"),
      "An op's outputs with their shapes, as far as the other tensors say them. Refuses names that the op does not "
      "have, and dtypes and numbers of dimensions that its tensors cannot have.");
  m.def(
      "run_op",
      [](std::string op, Tensors tensors, nb::dict scalars) {
        const Entry& e = entry(op);
        check(e.run({std::move(op), std::move(tensors), std::move(scalars)}));
      },
      "op"_a, "tensors"_a, "scalars"_a,
      nb::sig("def run_op(op: str, tensors: dict[str, tuple[int, str, tuple[int, ...]]], scalars: dict[str, object]) "
              "-> None"),
      "Runs an op on tensors that are given as (address, name of the dtype, shape) by the contract's names.");
  m.def(
      "op_budget",
      [](std::string op, Tensors tensors, nb::dict scalars, const std::string& compute, const std::string& output) {
        const Entry& e = entry(op);
        const Precision precision{dtype_named(compute), dtype_named(output)};
        const Budget b = take(e.budget({std::move(op), std::move(tensors), std::move(scalars)}, precision));
        return std::pair(b.rel_l2, b.rel_max);
      },
      "op"_a, "tensors"_a, "scalars"_a, "compute"_a, "output"_a,
      nb::sig("def op_budget(op: str, tensors: dict[str, tuple[int, str, tuple[int, ...]]], scalars: dict[str, "
              "object], compute: str, output: str) -> tuple[float, float]"),
      "The error bound (relative L2, relative max) of an op that has run on these tensors.");
  m.def(
      "rope_table",
      [](std::uintptr_t cos, std::uintptr_t sin, std::int64_t rows, std::int64_t half, double theta) {
        const auto table = [&](std::uintptr_t to) {
          return View<float, 2>{reinterpret_cast<float*>(to), {rows, half}};
        };
        ops::rope_table(table(cos), table(sin), theta);
      },
      "cos"_a, "sin"_a, "rows"_a, "half"_a, "theta"_a, nb::call_guard<WithoutGil>(),
      "Fills two float32 tables (rows, half) at these addresses with RoPE's cosines and sines.");
  bind_device_ops(m);
  bind_known_calls(m);
  bind_port_layer(m);
}

}  // namespace cf::python
