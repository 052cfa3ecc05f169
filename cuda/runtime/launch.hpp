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

/// The percentage of an SM's L1 that is shared memory where kernels run side by side. On an H200 this is 132 KB:
/// attention's block fits beside three blocks of a product, and what is left of the L1 has room for the products'
/// loads. Of 44, 58, 65, 72 and 100, Pythia-2.8B with a cache of 2048 is fastest with 58 and 65. With 100 it is slower
/// than with the driver's own divisions.
inline constexpr int kSideBySideSharedPercent = 58;

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
