#pragma once
// The order that tasks' reads and writes ask for. Private to cuda.
#include <map>
#include <span>
#include <vector>

namespace cf::cuda {

/// Tasks told one after the other, each with the tensors that it reads and writes. A tensor is known by its first byte:
/// two of them are the same or have no byte in common.
class Dataflow {
 public:
  /// Adds a task; they are numbered from 0. Returns those that it must wait for, in order: whose data it reads, and who
  /// read or wrote what it overwrites, but for those that another of them waits for.
  std::vector<int> add(std::span<const void* const> reads, std::span<const void* const> writes);

 private:
  struct Uses {
    int writer = -1;
    std::vector<int> readers;  // since
  };

  std::map<const void*, Uses> tensors_;
  std::vector<std::vector<bool>> after_;  // after_[i][j]: task i runs after task j
};

}  // namespace cf::cuda
