#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/model/model.hpp"
#include "core/model/runner.hpp"
#include "core/model/slot_lease.hpp"
#include "core/status.hpp"

namespace cf {

/// Taps of a block of prompts, whose rows follow each other. The values may be on their way from a device.
struct TapBlock {
  struct Values {
    const void* data;
    DType dtype;  // the runner's
    Shape shape;  // (rows, ...)
  };
  std::map<std::string, Values> taps;
  std::shared_ptr<const void> owner;  // of the values' memory
  ModelRunner::Await await;           // waits until the values are there; any thread may call it
};

/// Reads prompts for their taps, a block after the other. On a GPU the values of a block come to the host while the next
/// one runs. Not shared between threads.
class TapReader {
 public:
  /// `taps` are of model_taps(). The slots' entries are the reader's from now on.
  TapReader(std::shared_ptr<SlotLease> slots, std::vector<Tap> taps)
      : slots_(std::move(slots)), taps_(std::move(taps)) {}

  /// Reads prompts, at most one a slot, and returns when their work is on the device. Where several prompts share a pass,
  /// its products are those of all their tokens. Refuses no prompts, more than slots, and what ModelRunner::run()
  /// refuses; Code::out_of_memory where the host's memory does not hold the values.
  Result<TapBlock> read(std::span<const std::vector<std::int32_t>> prompts);

 private:
  /// Memory of so many bytes, that of an earlier block where no one holds it any more.
  Result<std::shared_ptr<std::byte[]>> memory(ModelRunner& runner, std::size_t bytes);

  struct Memory {
    std::shared_ptr<std::byte[]> data;
    std::size_t bytes;
  };
  std::shared_ptr<SlotLease> slots_;
  std::vector<Tap> taps_;
  std::vector<Memory> kept_;
};

}  // namespace cf
