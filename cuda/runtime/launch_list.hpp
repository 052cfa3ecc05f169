#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"
#include "cuda/runtime/context.hpp"

struct CUgraphExec_st;  // cudaGraphExec_t and cudaGraphNode_t are pointers to these
struct CUgraphNode_st;

namespace cf::cuda {

struct LaunchShape;  // cuda/runtime/launch.hpp

/// How a call's launches stand beside those of the other calls of a step, apart from what they compute.
struct LaunchMode {
  bool early = false;          // a kernel may start before its predecessor is done (programmatic dependent launch)
  bool after_waiting = false;  // its predecessors let it start only once they have waited for theirs
  bool shares_sms = false;     // its blocks are laid out to run on an SM together with another kernel's
  bool leaves_room = false;    // its blocks take no more shared memory than they use: a successor's fit beside them
  bool urgent = false;         // its blocks go before those of other kernels that wait for an SM
  int shared_percent = 0;      // of an SM's L1 that is shared memory while it runs; 0 leaves that to the driver
  bool operator==(const LaunchMode&) const = default;
};

/// How a list's launches follow each other, and the work before them, on a stream.
struct Submission {
  bool early = false;        // each kernel may start before its predecessor is done
  bool first_waits = false;  // the first one does not: it is ordered behind work that may still write weights
};

/// Device memory that launches may use while they run, from a multiple of 256 bytes on. Its content before and after
/// has no meaning. Launches that may run at the same time need one each.
struct Scratch {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// Kernel launches with their arguments, and calls of libraries that launch kernels of their own. Ops check and plan
/// their call once, when they add their launches; submit() only launches, any number of times. A list holds the
/// addresses of the call's tensors: these must still be there when it is submitted. It may be submitted from one thread
/// at a time.
class LaunchList {
 public:
  /// An empty list for the context's device and launch plans. An op that wants scratch memory does without where
  /// there is none or too little. Ops plan their launches for the mode.
  explicit LaunchList(const Context& context, Scratch scratch = {}, const LaunchMode& mode = {})
      : arch_(context.arch()), device_(context.device()), peers_(context.peers()), scratch_(scratch), mode_(mode) {}

  const Arch& arch() const { return arch_; }
  int device() const { return device_; }
  const Peers* peers() const { return peers_; }  // of the context
  bool empty() const { return launches_.empty(); }
  std::size_t size() const { return launches_.size(); }
  const Scratch& scratch() const { return scratch_; }
  const LaunchMode& mode() const { return mode_; }
  /// Says that launches of this list use the scratch memory.
  void use_scratch() { uses_scratch_ = true; }
  bool uses_scratch() const { return uses_scratch_; }
  /// Says that the tensors of all calls lie in the device's memory, as whoever allocated them knows. Without that,
  /// checks ask CUDA where each address lies.
  void trust_addresses() { trusts_addresses_ = true; }
  bool trusts_addresses() const { return trusts_addresses_; }
  /// Whether the list holds a library's call.
  bool has_calls() const { return has_calls_; }

  /// Adds a launch. `arguments` are copied. `op` names it in errors.
  struct Argument {
    const void* data;
    std::size_t bytes;
  };
  Status add(std::string_view op, const LaunchShape& shape, const void* kernel, const Argument* arguments,
             std::size_t argument_count);

  /// Adds a library's call that puts work onto the stream that it is given. The work starts when all before it is done:
  /// of LaunchMode and Submission, nothing applies to it.
  using Call = std::function<Status(CUstream_st*)>;
  void add_call(std::string_view op, Call call);

  /// What profiles call the launches that are added from now on; without a label, the op's name. The text must outlive
  /// the list.
  void set_label(const char* label) { label_ = label; }

  /// Submits everything in order, with the mode's priority and division of the L1. Whether a kernel is early is the
  /// caller's to say. Code::device_error names the op whose launch failed.
  Status submit(CUstream_st* stream, const Submission& how = {}) const;

  /// Whether another list launches the same kernels in grids, blocks and shared memory of the same sizes: then only the
  /// arguments may differ. A library's call is like no other.
  bool is_like(const LaunchList& other) const;
  /// Gives a kernel node of a graph the arguments of launch `i`, for the graph's later launches. The node was captured
  /// from launch `i` of a list like this one.
  Status rewrite(std::size_t i, CUgraphExec_st* graph, CUgraphNode_st* node) const;

 private:
  struct Launch {
    std::string_view op;  // a name with static storage duration
    const char* label;
    const void* kernel;  // null for a library's call
    Call call;
    unsigned grid[3], block[3];
    std::size_t smem_bytes;
    int cluster_blocks;
    std::size_t first_argument, argument_count;
  };
  static Status submit_call(const Launch& l, CUstream_st* stream);

  static constexpr std::size_t kMaxArguments = 16;
  using Arguments = std::array<void*, kMaxArguments>;
  /// Where a launch's arguments lie, as CUDA asks for them.
  Arguments arguments_of(const Launch& l) const;

  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  Arch arch_;
  int device_;
  const Peers* peers_;
  Scratch scratch_;
  LaunchMode mode_;
  bool uses_scratch_ = false, trusts_addresses_ = false, has_calls_ = false;
  const char* label_ = nullptr;
  std::vector<Launch> launches_;
  std::vector<std::size_t> offsets_;  // where each argument begins in values_
  std::vector<Unit> values_;          // the arguments' bytes
};

}  // namespace cf::cuda
