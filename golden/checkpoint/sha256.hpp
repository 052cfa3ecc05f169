#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cf::checkpoint {

/// SHA-256 of bytes that are given piece by piece. Source: NIST, FIPS 180-4.
class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  /// `fast` uses the processor's own instructions for it, where it has them: eight times as fast.
  explicit Sha256(bool fast = true);

  void update(const void* data, std::size_t bytes);
  /// The digest of all bytes so far. Nothing is added behind this call.
  Digest finish();

 private:
  using Blocks = void (*)(std::uint32_t* state, const std::uint8_t* data, std::size_t blocks);

  Blocks blocks_;
  std::array<std::uint32_t, 8> state_;
  std::array<std::uint8_t, 64> rest_;  // of the last block, which is not whole
  std::uint64_t bytes_ = 0;
};

/// Each byte as two lowercase hexadecimal digits.
std::string hex_of(std::span<const std::uint8_t> bytes);

/// The SHA-256 of bytes in hexadecimal digits.
std::string sha256_of(const void* data, std::size_t bytes);

}  // namespace cf::checkpoint
