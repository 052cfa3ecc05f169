#include "python/src/torch_tensors.hpp"

namespace nb = nanobind;

namespace cf::python {
namespace {

// DLPack's binary interface, version 1: dlpack.h of https://github.com/dmlc/dlpack, "DLPackExchangeAPI".
namespace dlpack {
constexpr std::uint32_t kMajor = 1;
constexpr std::int32_t kCuda = 2;

struct Tensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t rank;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48);

/// An error is -1, and Python's.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* previous;
  void (*allocate)();
  void (*managed_from_object)();
  void (*managed_to_object)();
  int (*tensor_from_object)(void* object, Tensor* out);  // borrowed; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** out);
};
}  // namespace dlpack

const dlpack::Exchange& exchange(const void* table) { return *static_cast<const dlpack::Exchange*>(table); }

}  // namespace

const Torch* Torch::found_ = nullptr;

bool use_torch(const nb::module_& torch) {
  if (Torch::found_) return true;
  const nb::object tensor = torch.attr("Tensor"), none = nb::none();
  const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", none);
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return false;
  auto* table = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table && table->major > dlpack::kMajor) table = table->previous;
  if (!table || table->major != dlpack::kMajor || !table->tensor_from_object || !table->current_stream) return false;
  nb::object make = none;
  try {
    make = torch.attr("_C").attr("_dynamo").attr("guards").attr("_empty_strided_cuda");
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_AttributeError)) throw;
  }
  auto* const found = new Torch;
  found->table_ = table;
  found->tensor_ = nb::object(torch.attr("Tensor")).release();
  found->parameter_ = nb::object(torch.attr("nn").attr("Parameter")).release();
  if (!make.is_none()) found->empty_strided_cuda_ = make.release();
  Torch::found_ = found;
  return true;
}

std::optional<TorchTensor> Torch::read(nb::handle object) const {
  const nb::handle type = object.type();
  if (!type.is(tensor_) && !type.is(parameter_)) return {};
  dlpack::Tensor t;
  if (exchange(table_).tensor_from_object(object.ptr(), &t) != 0) {
    PyErr_Clear();  // a sparse tensor raises, for example
    return {};
  }
  if (t.device_type != dlpack::kCuda || t.lanes != 1 || !t.data) return {};
  if (t.strides) {
    std::int64_t expected = 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      if (t.shape[i] != 1 && t.strides[i] != expected) return {};
      expected *= t.shape[i];
    }
  }
  return TorchTensor{.address = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset,
                     .device = t.device_id,
                     .dtype = std::uint32_t(t.code) << 8 | t.bits,
                     .rank = t.rank,
                     .shape = t.shape};
}

std::optional<std::uintptr_t> Torch::stream(int device) const {
  void* stream = nullptr;
  if (exchange(table_).current_stream(dlpack::kCuda, device, &stream) != 0) {
    PyErr_Clear();
    return {};
  }
  return reinterpret_cast<std::uintptr_t>(stream);
}

nb::object Torch::empty(const nb::tuple& sizes, const nb::tuple& strides, nb::handle dtype, nb::handle like, int device,
                        TorchTensor& made) const {
  const auto take = [&](nb::object tensor) -> nb::object {
    const std::optional<TorchTensor> found = read(tensor);
    if (!found || found->device != device) return {};
    made = *found;
    return tensor;
  };
  // The first takes memory of the calling thread's current GPU, which need not be the op's.
  if (empty_strided_cuda_.is_valid())
    if (nb::object tensor = take(empty_strided_cuda_(sizes, strides, dtype)); tensor.is_valid()) return tensor;
  return take(like.attr("new_empty")(sizes, nb::arg("dtype") = dtype));
}

bool Torch::may_require_grad(nb::handle object) {
  return nb::getattr(object, "requires_grad", nb::none()).ptr() != Py_False;
}

}  // namespace cf::python
