#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

struct LaunchShape;  // cuda/runtime/launch.hpp

/// How launches are put onto a stream, apart from what they compute.
struct LaunchMode {
  bool early = false;         // a kernel may start before its predecessor is done (programmatic dependent launch)
  bool urgent = false;        // its blocks go before those of other kernels that wait for an SM
  bool side_by_side = false;  // it divides an SM's memory into L1 and shared memory as its neighbours do
};

/// Kernel launches with their arguments. Ops check and plan their call once, when they add their launches; submit()
/// only launches, any number of times. A list holds the addresses of the call's tensors: these must still be there when
/// it is submitted. It may be submitted from one thread at a time.
class LaunchList {
 public:
  /// An empty list for the context's device and launch plans.
  explicit LaunchList(const Context& context) : arch_(context.arch()), device_(context.device()) {}

  const Arch& arch() const { return arch_; }
  int device() const { return device_; }
  bool empty() const { return launches_.empty(); }
  std::size_t size() const { return launches_.size(); }

  /// Adds a launch. `arguments` are copied. `op` names it in errors.
  struct Argument {
    const void* data;
    std::size_t bytes;
  };
  Status add(std::string_view op, const LaunchShape& shape, const void* kernel, const Argument* arguments,
             std::size_t argument_count);

  /// What profiles call the launches that are added from now on; without a label, the op's name. The text must outlive
  /// the list.
  void set_label(const char* label) { label_ = label; }

  /// Launches everything in order. Code::device_error names the op whose launch failed.
  Status submit(CUstream_st* stream, const LaunchMode& mode = {}) const;

 private:
  struct Launch {
    std::string_view op;  // a name with static storage duration
    const char* label;
    const void* kernel;
    unsigned grid[3], block[3];
    std::size_t smem_bytes;
    int cluster_blocks;
    std::size_t first_argument, argument_count;
  };
  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  Arch arch_;
  int device_;
  const char* label_ = nullptr;
  std::vector<Launch> launches_;
  std::vector<std::size_t> offsets_;  // where each argument begins in values_
  std::vector<Unit> values_;          // the arguments' bytes
};

}  // namespace cf::cuda
