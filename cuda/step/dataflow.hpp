#pragma once
// The order of tasks that follows from what they read and write. Private to cuda.
#include <map>
#include <span>
#include <vector>

namespace cf::cuda {

/// Tasks in program order, each with the tensors that it reads and writes. A tensor is identified by its address; two
/// tensors are identical or do not overlap.
class Dataflow {
 public:
  /// Adds a task, and returns the numbers of the tasks that it must wait for, in order and counted from 0: those that
  /// wrote what it reads, and those that read or wrote what it overwrites. A task that another one of these waits for
  /// is left out.
  std::vector<int> add(std::span<const void* const> reads, std::span<const void* const> writes);

 private:
  struct Uses {
    int writer = -1;
    std::vector<int> readers;  // since that write
  };

  std::map<const void*, Uses> tensors_;
  std::vector<std::vector<bool>> after_;  // after_[i][j]: task i runs after task j
};

}  // namespace cf::cuda
