#include "python/src/known_calls.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace nb = nanobind;

namespace cf::python {
namespace {

/// The first number of a call's description where no tensor stands.
enum Kind : std::int64_t { kNothing = -1, kWeight = -2, kDict = -3, kLeftOut = -4, kGiven = -5 };

/// How many budgets are measured: these look at every call.
std::atomic<int> measured = 0;

/// The class GptqWeight, and the names of its attributes.
struct WeightClass {
  nb::handle type;  // borrowed: an owned one would keep its module alive
  std::array<nb::handle, 4> parts;
  std::array<nb::handle, 3> scalars;
  nb::handle forms, version;
};
WeightClass weight_class;

nb::handle interned(const char* name) { return PyUnicode_InternFromString(name); }

/// An int that is no bool and fits 64 bits.
std::optional<std::int64_t> integer_of(nb::handle value) {
  if (!PyLong_CheckExact(value.ptr())) return {};
  int overflow = 0;
  const long long integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow) return {};
  return integer;
}

/// A Python attribute, nothing where reading it raises.
nb::object attribute(nb::handle object, nb::handle name) {
  PyObject* const found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!found) PyErr_Clear();
  return nb::steal(found);
}

/// Whether two values that a BoundOp depends on are equal: two texts, or two tuples of numbers that were checked.
bool is_equal(nb::handle a, nb::handle b) {
  if (a.is(b)) return true;
  if (!a.type().is(b.type()) || !(PyUnicode_CheckExact(a.ptr()) || PyTuple_CheckExact(a.ptr()))) return false;
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

/// The packed form of a GptqWeight for launches on a stream, as cf_ops._gptq.PackedForms keeps it: null where it has
/// none, where a tensor has changed since it was packed, and where it was packed on another stream. `addresses` are
/// those of its parts.
const DeviceWeight* packed_form(nb::handle weight, const nb::tuple& key, std::uintptr_t stream,
                                const std::uintptr_t* addresses) {
  const nb::object forms = attribute(weight, weight_class.forms);
  if (!forms.is_valid() || !PyDict_CheckExact(forms.ptr())) return nullptr;
  PyObject* const found = PyDict_GetItemWithError(forms.ptr(), key.ptr());  // borrowed
  if (!found) {
    PyErr_Clear();
    return nullptr;
  }
  if (!PyTuple_CheckExact(found) || PyTuple_Size(found) != 3) return nullptr;
  PyObject* const state = PyTuple_GetItem(found, 0);
  const DeviceWeight* form = nullptr;
  std::uintptr_t home = 0;
  if (!PyList_CheckExact(state) || std::size_t(PyList_Size(state)) != weight_class.parts.size() ||
      !nb::try_cast(nb::handle(PyTuple_GetItem(found, 1)), home) || home != stream ||
      !nb::try_cast(nb::handle(PyTuple_GetItem(found, 2)), form))
    return nullptr;
  for (std::size_t i = 0; i < weight_class.parts.size(); ++i) {
    std::pair<std::uintptr_t, std::int64_t> known;
    if (!nb::try_cast(nb::handle(PyList_GetItem(state, Py_ssize_t(i))), known)) return nullptr;
    const nb::object part = attribute(weight, weight_class.parts[i]);
    if (!part.is_valid()) return nullptr;
    const nb::object version = attribute(part, weight_class.version);  // an inference tensor has none
    const std::optional<std::int64_t> number = version.is_valid() ? integer_of(version) : std::nullopt;
    if (known != std::pair(addresses[i], number.value_or(-1))) return nullptr;
  }
  return form;
}

}  // namespace

bool KnownCalls::read_tensor(const Torch& torch, nb::handle item, Given& found) const {
  const std::optional<TorchTensor> t = torch.read(item);
  if (!t || (found.device >= 0 && t->device != found.device)) return false;
  if (found.device < 0) {
    found.device = t->device;
    found.like = item;
    if (!found.add(t->device)) return false;
  }
  if (!found.add(std::int64_t(t->dtype) << 8 | t->rank)) return false;
  for (int i = 0; i < t->rank; ++i)
    if (!found.add(t->shape[i])) return false;
  found.addresses.push_back(t->address);
  return true;
}

bool KnownCalls::read_one(const Torch& torch, nb::handle item, Given& found) const {
  if (item.is_none()) return found.add(kNothing);
  if (!item.type().is(weight_class.type)) return read_tensor(torch, item, found);
  if (!found.add(kWeight)) return false;
  found.weights.emplace_back(item, found.addresses.size());
  for (const nb::handle name : weight_class.parts) {
    const nb::object part = attribute(item, name);
    if (!part.is_valid() || !read_tensor(torch, part, found)) return false;
  }
  for (const nb::handle name : weight_class.scalars) {
    const nb::object scalar = attribute(item, name);
    const std::optional<std::int64_t> number = scalar.is_valid() ? integer_of(scalar) : std::nullopt;
    if (!number || !found.add(*number)) return false;
  }
  return true;
}

bool KnownCalls::read_number(std::size_t i, nb::handle value, Number& number) const {
  number.name = numbers_[i].first;
  number.is_integer = numbers_[i].second;
  if (!number.is_integer) {
    if (!PyFloat_CheckExact(value.ptr())) return false;
    number.real = PyFloat_AsDouble(value.ptr());
    return true;
  }
  const std::optional<std::int64_t> integer = integer_of(value);
  number.integer = integer.value_or(0);
  return integer.has_value();
}

bool KnownCalls::read(const nb::tuple& given, const nb::tuple& numbers, Given& found) const {
  const Torch* const torch = Torch::find();
  if (!torch || measured || numbers.size() != numbers_.size() || numbers_.size() > kMostNumbers) return false;
  found.addresses.reserve(32);
  for (const nb::handle item : given) {
    if (!PyDict_CheckExact(item.ptr())) {
      if (!read_one(*torch, item, found)) return false;
      continue;
    }
    if (!found.names.empty() || !found.add(kDict)) return false;
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(item.ptr(), &at, &name, &value);) {
      found.names.push_back(name);
      if (!read_one(*torch, value, found)) return false;
    }
    if (!found.add(kDict)) return false;
  }
  for (const std::size_t place : states_)
    if (place >= given.size() || Torch::may_require_grad(given[place])) return false;
  for (std::size_t i = 0; i < numbers_.size(); ++i) {
    const bool is_left_out = nb::handle(numbers[i]).is_none();
    if (!found.add(is_left_out ? kLeftOut : kGiven)) return false;
    if (!is_left_out && !read_number(i, numbers[i], found.numbers[i])) return false;
  }
  if (found.device < 0) return false;
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::size_t i = 0; i < found.word_count; ++i) {
    hash = (hash ^ std::uint64_t(found.words[i])) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  found.hash = hash;
  return true;
}

std::shared_ptr<const KnownCalls::Call> KnownCalls::find(const Given& given, nb::handle fixed) const {
  const auto is_it = [&](const std::shared_ptr<const Call>& call) {
    return call->hash == given.hash && call->words.size() == given.word_count &&
           std::equal(call->words.begin(), call->words.end(), given.words.begin()) && is_equal(call->fixed, fixed) &&
           std::equal(call->names.begin(), call->names.end(), given.names.begin(), given.names.end(),
                      [](const nb::object& a, nb::handle b) { return is_equal(a, b); });
  };
  const auto found = std::find_if(calls_.begin(), calls_.end(), is_it);
  return found == calls_.end() ? nullptr : *found;
}

nb::object KnownCalls::run(const nb::tuple& given, nb::handle fixed, const nb::tuple& numbers) {
  Given g;
  if (!read(given, numbers, g)) return nb::none();
  const std::shared_ptr<const Call> call = find(g, fixed);
  if (!call) return nb::none();
  const Torch& torch = *Torch::find();
  const std::optional<std::uintptr_t> stream = torch.stream(g.device);
  if (!stream) return nb::none();
  for (std::size_t i = 0; i < numbers_.size(); ++i)
    if (nb::handle(numbers[i]).is_none()) g.numbers[i] = call->numbers[i];
  std::vector<const DeviceWeight*> packed;
  for (const std::size_t i : call->weights) {
    const auto& [weight, first] = g.weights[i];
    packed.push_back(packed_form(weight, call->form, *stream, &g.addresses[first]));
    if (!packed.back()) return nb::none();
  }
  std::array<nb::object, kMostOutputs> made;
  for (std::size_t i = 0; i < call->outputs.size(); ++i) {
    const auto& [sizes, strides] = call->outputs[i];
    TorchTensor tensor;
    made[i] = torch.empty(sizes, strides, call->dtype, g.like, g.device, tensor);
    if (!made[i].is_valid()) return nb::none();
    g.addresses.push_back(tensor.address);
  }
  call->op->run({g.device, *stream}, g.addresses, std::span(g.numbers.data(), numbers_.size()), packed, call->allocate);
  if (call->outputs.size() == 1) return made[0];
  PyObject* const outputs = PyTuple_New(Py_ssize_t(call->outputs.size()));
  if (!outputs) throw nb::python_error();
  for (std::size_t i = 0; i < call->outputs.size(); ++i)
    PyTuple_SetItem(outputs, Py_ssize_t(i), made[i].release().ptr());
  return nb::steal(outputs);
}

void KnownCalls::remember(const nb::tuple& given, nb::handle fixed, const nb::tuple& numbers, const nb::tuple& values,
                          nb::object bound, std::vector<std::size_t> weights, const nb::list& outputs, nb::object dtype,
                          nb::callable allocate) {
  Given g;
  if (!read(given, numbers, g) || outputs.size() > kMostOutputs || values.size() != numbers_.size()) return;
  for (const std::size_t i : weights)
    if (i >= g.weights.size()) return;
  const auto call = std::make_shared<Call>();
  for (std::size_t i = 0; i < numbers_.size(); ++i)
    if (!read_number(i, values[i], call->numbers[i])) return;
  call->hash = g.hash;
  call->words.assign(g.words.begin(), g.words.begin() + std::ptrdiff_t(g.word_count));
  call->fixed = nb::borrow(fixed);
  for (const nb::handle name : g.names) call->names.push_back(nb::borrow(name));
  call->op = nb::cast<const BoundOp*>(bound);
  call->bound = std::move(bound);
  call->weights = std::move(weights);
  call->form = nb::make_tuple(g.device, call->op->row_order());
  for (const nb::handle output : outputs) call->outputs.push_back(nb::cast<std::pair<nb::tuple, nb::tuple>>(output));
  call->dtype = std::move(dtype);
  call->allocate = std::move(allocate);
  if (find(g, fixed)) return;
  if (calls_.size() < kMostCalls) {
    calls_.push_back(call);
  } else {
    calls_[next_] = call;
    next_ = (next_ + 1) % kMostCalls;
  }
}

void bind_known_calls(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<KnownCalls>(m, "KnownCalls",
                         "Calls of one op on torch tensors of a GPU, known by what a check of them looks at: types, "
                         "devices, dtypes, shapes, strides, which tensors are there, and the scalars that a BoundOp "
                         "depends on. Refuses nothing.")
      .def(
          nb::init<std::vector<std::pair<std::string, bool>>, std::vector<std::size_t>>(), "numbers"_a, "states"_a,
          nb::sig("def __init__(self, numbers: collections.abc.Sequence[tuple[str, bool]], states: "
                  "collections.abc.Sequence[int]) -> None"),
          "The scalars that each call is given anew, by name, and whether they are integers; the places of the tensors "
          "that the op writes.")
      .def("run", &KnownCalls::run, "given"_a, "fixed"_a.none(), "numbers"_a,
           nb::sig("def run(self, given: tuple[object, ...], fixed: object, numbers: tuple[object, ...]) -> "
                   "typing.Any"),
           "Launches a call like one that is known on torch's current stream, and returns its outputs: a tensor, or a "
           "tuple of another number of them. None for any other call, of which nothing is launched.")
      .def("remember", &KnownCalls::remember, "given"_a, "fixed"_a.none(), "numbers"_a, "values"_a, "bound"_a,
           "weights"_a, "outputs"_a, "dtype"_a.none(), "allocate"_a,
           nb::sig("def remember(self, given: tuple[object, ...], fixed: object, numbers: tuple[object, ...], values: "
                   "tuple[object, ...], bound: BoundOp, weights: collections.abc.Sequence[int], outputs: "
                   "list[tuple[tuple[int, ...], tuple[int, ...]]], dtype: "
                   "object, allocate: collections.abc.Callable[[int], typing.Any]) -> None"),
           "What a call that was checked and has run is like: the values of its numbers, the op that it was bound to, "
           "which of the given weights each of the op's GPTQ weights is, the sizes and the strides of its outputs, "
           "their torch.dtype.")
      .def_prop_ro("numbers", &KnownCalls::numbers, "The names of the scalars that each call is given anew.")
      .def("__len__", &KnownCalls::size, "How many calls are known.");
  m.def(
      "use_torch",
      [](const nb::module_& torch, const nb::object& weight) {
        if (!weight_class.type.is_valid())
          weight_class = {.type = weight,
                          .parts = {interned("qweight"), interned("qzeros"), interned("scales"), interned("g_idx")},
                          .scalars = {interned("bits"), interned("group_size"), interned("zero_offset")},
                          .forms = interned("_forms"),
                          .version = interned("_version")};
        return use_torch(torch);
      },
      "torch"_a, "weight"_a, nb::sig("def use_torch(torch: types.ModuleType, weight: type) -> bool"),
      "Lets KnownCalls read torch's tensors, and weights of the class GptqWeight. Says whether they can: torch 2.10 "
      "and "
      "newer offer what they need.");
  m.def(
      "measure", [](bool begins) { measured += begins ? 1 : -1; }, "begins"_a,
      "Says that a budget is measured from now on, or no longer: until then no call is like one that is known.");
}

}  // namespace cf::python
