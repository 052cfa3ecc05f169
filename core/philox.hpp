#pragma once
#include <cstdint>

#include "core/host_device.hpp"

namespace cf {

/// Four random words, the counter they are made from, and the key of a stream.
struct PhiloxBlock {
  std::uint32_t word[4];
};
struct PhiloxKey {
  std::uint32_t word[2];
};

/// Philox4x32-10: random words that are a function of a counter and a key, without a state. A round is
///   (x0, x1, x2, x3) -> (high(m1 x2) ^ x1 ^ k0, low(m1 x2), high(m0 x0) ^ x3 ^ k1, low(m0 x0)),  m and k as below,
/// and k grows by w between two rounds.
/// Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
CF_HD constexpr PhiloxBlock philox4x32_10(PhiloxBlock counter, PhiloxKey key) {
  constexpr std::uint64_t m0 = 0xd2511f53, m1 = 0xcd9e8d57;
  constexpr std::uint32_t w0 = 0x9e3779b9, w1 = 0xbb67ae85;  // of the golden ratio and of sqrt(3)
  PhiloxBlock x = counter;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = m0 * x.word[0], p1 = m1 * x.word[2];
    x = {{std::uint32_t(p1 >> 32) ^ x.word[1] ^ key.word[0], std::uint32_t(p1),
          std::uint32_t(p0 >> 32) ^ x.word[3] ^ key.word[1], std::uint32_t(p0)}};
    key.word[0] += w0;
    key.word[1] += w1;
  }
  return x;
}

}  // namespace cf
