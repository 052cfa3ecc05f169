#pragma once
#include <cstddef>
#include <memory>
#include <string_view>

#include "core/status.hpp"
#include "cuda/runtime/context.hpp"

namespace cf::cuda {

/// A block of a device's memory, freed with its owner.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// `what` names the block in the message. Code::out_of_memory says in one line how much was needed and how much is
  /// free; nothing is taken then.
  static Result<DeviceMemory> create(const Context& context, std::size_t bytes, std::string_view what);

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte*) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_ = 0;
};

/// Copies `bytes` bytes after all work that is on the context's stream, and waits for them to arrive.
Status copy_to_device(const Context& context, void* device, const void* host, std::size_t bytes);
Status copy_to_host(const Context& context, void* host, const void* device, std::size_t bytes);

}  // namespace cf::cuda
