#pragma once
// torch's tensors of a GPU, read and made without Python's attributes.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "core/dtype.hpp"

namespace cf::python {

/// A contiguous tensor on a GPU, as torch holds it. The shape is the tensor's own.
struct TorchTensor {
  std::uintptr_t address = 0;
  int device = 0;
  std::uint32_t dtype = 0;  // a number for each of torch's dtypes; code_of() has those of the library's own
  int rank = 0;
  const std::int64_t* shape = nullptr;
};

/// TorchTensor::dtype of float16 and float32.
inline constexpr std::uint32_t kTorchF16 = 2u << 8 | 16, kTorchF32 = 2u << 8 | 32;

/// What this part knows of torch: the table of functions that torch.Tensor offers by DLPack's exchange API, and how
/// torch's own generated code takes memory. There is none before use_torch() has found the table, which torch 2.10 and
/// newer have.
class Torch {
 public:
  static const Torch* find() { return found_; }

  /// The tensor, where `object` is a torch.Tensor or a torch.nn.Parameter, and no object of another subclass, strided,
  /// contiguous, with elements, and on a GPU. What is something else is nothing, which is no error.
  std::optional<TorchTensor> read(nanobind::handle object) const;
  /// The handle of torch's current stream of a GPU.
  std::optional<std::uintptr_t> stream(int device) const;
  /// A tensor of the GPU with memory of torch's and without values. Sizes and strides are tuples, `like` is a tensor of
  /// the GPU. Nothing where torch makes a tensor of another kind.
  nanobind::object empty(const nanobind::tuple& sizes, const nanobind::tuple& strides, nanobind::handle dtype,
                         nanobind::handle like, int device, TorchTensor& made) const;
  /// Whether torch may record gradients for the object. True where this is not known.
  static bool may_require_grad(nanobind::handle object);

 private:
  friend bool use_torch(const nanobind::module_& torch);
  Torch() = default;

  static const Torch* found_;
  const void* table_ = nullptr;
  // Held for ever, since the interpreter may be gone when a static object is destroyed.
  nanobind::handle tensor_, parameter_, empty_strided_cuda_;
};

/// Looks for torch's table. Says whether it is there.
bool use_torch(const nanobind::module_& torch);

}  // namespace cf::python
