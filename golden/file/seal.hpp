#pragma once
// Private to the golden library: the seal in a golden file's first 512 bytes (golden_file.hpp).
#include <array>
#include <cstring>
#include <string_view>

#include "core/procedural.hpp"

namespace cf::golden {

inline constexpr std::size_t kSealBytes = 512;
inline constexpr std::string_view kSealMagic = "cfgolden";

/// The seal of the bytes that follow it.
inline std::array<char, kSealBytes> seal_of(std::string_view content) {
  std::array<char, kSealBytes> seal{};
  const std::uint64_t bytes = content.size(), sum = checksum(content.data(), content.size());
  std::memcpy(seal.data(), kSealMagic.data(), kSealMagic.size());
  std::memcpy(seal.data() + 8, &bytes, 8);
  std::memcpy(seal.data() + 16, &sum, 8);
  return seal;
}

}  // namespace cf::golden
