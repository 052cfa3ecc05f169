#pragma once
// Memory of a device in parts, and host tensors copied into them. Private to cuda/model.
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <string>

#include "core/contract.hpp"
#include "core/tensor.hpp"
#include "cuda/runtime/context.hpp"
#include "cuda/runtime/memory.hpp"

namespace cf::cuda {

/// Hands out consecutive parts of a block, each aligned to 256 bytes. Without a block it measures how many bytes the
/// block needs.
class Arena {
 public:
  explicit Arena(std::byte* block) : block_(block) {}

  template <class V>
  void allocate(V& v, std::array<std::int64_t, V::rank> shape, DType dtype) {
    using Element = typename V::element;
    v.shape = shape;
    if constexpr (std::is_void_v<std::remove_const_t<Element>>) v.dtype = dtype;
    v.data = block_ ? reinterpret_cast<Element*>(block_ + std::size_t(bytes_)) : nullptr;
    double bytes = double(size_bytes(dtype));
    for (std::int64_t d : shape) bytes *= double(d);
    bytes_ += std::ceil(bytes / 256) * 256;
  }
  std::size_t bytes() const { return std::size_t(bytes_); }
  /// bytes() as a double. A block that is measured and not allocated may have more bytes than 64 bits can count.
  double measured() const { return bytes_; }

 private:
  std::byte* block_;
  double bytes_ = 0;  // exact below 2^53
};

/// Refuses a tensor that has no data, or whose shape or dtype is not the expected one. The message names `owner` and
/// `name`:
/// "kv_cache: 'k_cache' has shape ...".
template <int Rank>
Status check_source(std::string_view owner, const std::string& name, const ConstAnyView<Rank>& tensor,
                    const std::array<std::int64_t, Rank>& shape, DType dtype) {
  TensorCheck check(owner);
  check({dtype == DType::i32 ? Role::position : Role::input, name}, tensor, shape);
  CF_TRY(check.status());
  if (tensor.dtype != dtype)
    return bad_argument(owner, "'" + name + "' has dtype " + std::string(to_string(tensor.dtype)) + ", expected " +
                                   std::string(to_string(dtype)));
  return {};
}

/// Copies a tensor of the host or of a device to `to`, whose shape and dtype it must have.
template <int Rank>
Status copy_in(const Context& context, std::string_view owner, const std::string& name, const AnyView<Rank>& to,
               const ConstAnyView<Rank>& from) {
  CF_TRY(check_source<Rank>(owner, name, from, to.shape, to.dtype));
  return copy_to_device(context, to.data, from.data, std::size_t(to.bytes()));
}

template <int Rank>
Status copy_in(const Context& context, std::string_view owner, const std::string& name, const AnyView<Rank>& to,
               const Tensor& from) {
  if (from.shape().size() != Rank)
    return bad_argument(
        owner, "'" + name + "' has shape " + cf::to_string(from.shape()) + ", expected rank " + std::to_string(Rank));
  return copy_in<Rank>(context, owner, name, to, from.view<Rank>());
}

inline std::string layer_prefix(std::int64_t layer) { return "layer " + std::to_string(layer) + ": "; }

/// A number that no earlier call has returned.
inline std::uint64_t next_version() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace cf::cuda
