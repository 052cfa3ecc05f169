#include "cuda/step/dataflow.hpp"

namespace cf::cuda {

std::vector<int> Dataflow::add(std::span<const void* const> reads, std::span<const void* const> writes) {
  const int task = int(after_.size());
  std::vector<bool> wanted(after_.size(), false);
  const auto want = [&](int other) {
    if (other >= 0) wanted[std::size_t(other)] = true;
  };
  for (const void* tensor : reads) want(tensors_[tensor].writer);
  for (const void* tensor : writes) {
    want(tensors_[tensor].writer);
    for (int reader : tensors_[tensor].readers) want(reader);
  }

  // The latest task first: the tasks that it waits for need no edge of their own.
  std::vector<bool> after(after_.size(), false);
  std::vector<int> direct;
  for (std::size_t other = after_.size(); other-- > 0;) {
    if (!wanted[other] || after[other]) continue;
    direct.insert(direct.begin(), int(other));
    after[other] = true;
    for (std::size_t i = 0; i < other; ++i) after[i] = after[i] || after_[other][i];
  }

  for (const void* tensor : reads) tensors_[tensor].readers.push_back(task);
  for (const void* tensor : writes) tensors_[tensor] = {.writer = task, .readers = {}};
  after_.push_back(std::move(after));
  return direct;
}

}  // namespace cf::cuda
