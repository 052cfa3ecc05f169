#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/ops/linear/pack/pack.hpp"
#include "python/src/device_ops.hpp"

namespace cf::python {

/// A GPTQ weight on a GPU, in the layout of its kernels, and the tensor whose memory it lies in.
struct DeviceWeight {
  cuda::Packed packed;
  nanobind::object memory;
};

/// A scalar of a call that is a number.
struct Number {
  std::string_view name;
  bool is_integer = false;
  std::int64_t integer = 0;
  double real = 0;
};

/// An op on a GPU with the dtypes and shapes of its tensors, all but their addresses. A call takes addresses in the
/// order in which the tensors were described.
class BoundOp {
 public:
  using Addresses = std::vector<std::uintptr_t>;

  BoundOp() = default;
  BoundOp(const BoundOp&) = delete;
  BoundOp& operator=(const BoundOp&) = delete;
  virtual ~BoundOp() = default;

  /// The prefix of the names of each GPTQ weight's tensors.
  virtual std::vector<std::string> gptq() const = 0;
  /// The order of rows that the op wants of its GPTQ weights, as (head_dim, rotary_dim) of cuda::RopePairs.
  virtual std::pair<std::int64_t, std::int64_t> row_order() const = 0;
  /// Packs the GPTQ weight that is number `number` of gptq(). `allocate(bytes)` makes a tensor on the device.
  virtual DeviceWeight pack(std::size_t number, const DeviceStream& at, const Addresses& addresses,
                            const nanobind::callable& allocate) const = 0;
  /// Launches the op. `packed` has each GPTQ weight's packed form, `scalars` those scalars that were not bound.
  virtual void run(const DeviceStream& at, const Addresses& addresses, const nanobind::dict& scalars,
                   const std::vector<const DeviceWeight*>& packed, const nanobind::callable& allocate) const = 0;
  /// The same for scalars that are numbers.
  virtual void run(const DeviceStream& at, const Addresses& addresses, std::span<const Number> numbers,
                   const std::vector<const DeviceWeight*>& packed, const nanobind::callable& allocate) const = 0;
};

}  // namespace cf::python
