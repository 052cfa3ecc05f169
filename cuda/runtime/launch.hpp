#pragma once
// How ops add their kernels to a list of launches. Private to cuda.
#include <cuda_runtime.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda/runtime/check.hpp"
#include "cuda/runtime/launch_list.hpp"

namespace cf::cuda {

struct LaunchShape {
  dim3 grid, block;
  std::size_t smem_bytes = 0;  // dynamic shared memory
  int cluster_blocks = 1;      // blocks of a cluster, along x
};

/// Adds a kernel's launch with its arguments to the list. `op` outlives the list. A kernel that is submitted early must
/// call wait_for_predecessors() before it reads what its predecessors write, or writes what they read or write.
template <class... Params, class... Args>
Status launch(std::string_view op, LaunchList& launches, const LaunchShape& shape, void (*kernel)(Params...),
              Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args) && (std::is_trivially_copyable_v<Params> && ...));
  const std::tuple<std::remove_cv_t<Params>...> values(std::forward<Args>(args)...);
  return std::apply(
      [&](const auto&... value) {
        const std::array<LaunchList::Argument, sizeof...(Params)> arguments{
            LaunchList::Argument{&value, sizeof value}...};
        return launches.add(op, shape, reinterpret_cast<const void*>(kernel), arguments.data(), arguments.size());
      },
      values);
}

}  // namespace cf::cuda
