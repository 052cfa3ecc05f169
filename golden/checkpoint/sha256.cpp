#include "golden/checkpoint/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace cf::checkpoint {
namespace {

constexpr std::size_t kBlock = 64;  // bytes

/// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/// FIPS 180-4, 5.3.3: the same of the square roots of the first eight primes.
constexpr std::array<std::uint32_t, 8> kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/// FIPS 180-4, 6.2.2.
void portable_blocks(std::uint32_t* state, const std::uint8_t* data, std::size_t blocks) {
  const auto rotated = [](std::uint32_t x, int bits) { return std::rotr(x, bits); };
  for (; blocks > 0; --blocks, data += kBlock) {
    std::uint32_t w[64];
    for (std::size_t t = 0; t < 16; ++t)
      w[t] = std::uint32_t(data[4 * t]) << 24 | std::uint32_t(data[4 * t + 1]) << 16 |
             std::uint32_t(data[4 * t + 2]) << 8 | std::uint32_t(data[4 * t + 3]);
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t x = w[t - 15], y = w[t - 2];
      w[t] = w[t - 16] + (rotated(x, 7) ^ rotated(x, 18) ^ x >> 3) + w[t - 7] +
             (rotated(y, 17) ^ rotated(y, 19) ^ y >> 10);
    }
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t t1 =
          h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const std::uint32_t t2 = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    const std::uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += sums[i];
  }
}

#ifdef __x86_64__

bool has_sha_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__builtin_cpu_supports("sse4.1") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (b & (1u << 29)) != 0;
}

/// The same by the instructions of Intel's SHA extensions, which hold the state as (a, b, e, f) and (c, d, g, h) and
/// make two rounds each. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, SHA256RNDS2.
__attribute__((target("sha,sse4.1"))) void sha_blocks(std::uint32_t* state, const std::uint8_t* data,
                                                      std::size_t blocks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; blocks > 0; --blocks, data += kBlock) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the newest sixteen words
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i < 4) {
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), big_endian);
      } else {
        const __m128i newest = w[(i + 3) % 4], w_7 = _mm_alignr_epi8(newest, w[(i + 2) % 4], 4);
        w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), w_7), newest);
      }
      const __m128i sum = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(kRound) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#else

bool has_sha_instructions() { return false; }
constexpr auto sha_blocks = portable_blocks;

#endif

}  // namespace

Sha256::Sha256(bool fast) : blocks_(fast && has_sha_instructions() ? sha_blocks : portable_blocks), state_(kInitial) {}

void Sha256::update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const std::uint8_t*>(data);
  const std::size_t there = bytes_ % kBlock;
  bytes_ += bytes;
  if (there > 0) {
    const std::size_t taken = std::min(bytes, kBlock - there);
    std::copy_n(from, taken, rest_.begin() + std::ptrdiff_t(there));
    from += taken;
    bytes -= taken;
    if (there + taken < kBlock) return;
    blocks_(state_.data(), rest_.data(), 1);
  }
  blocks_(state_.data(), from, bytes / kBlock);
  std::copy_n(from + bytes / kBlock * kBlock, bytes % kBlock, rest_.begin());
}

Sha256::Digest Sha256::finish() {
  const std::uint64_t bits = bytes_ * 8;
  // FIPS 180-4, 5.1.1: a one, zeros, and the number of bits as 64 of them, so that the last block is whole.
  std::array<std::uint8_t, kBlock + 8> end{0x80};
  const std::size_t zeros = (2 * kBlock - 9 - bytes_ % kBlock) % kBlock;
  for (std::size_t i = 0; i < 8; ++i) end[1 + zeros + i] = std::uint8_t(bits >> (56 - 8 * i));
  update(end.data(), 1 + zeros + 8);
  Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i) digest[i] = std::uint8_t(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

std::string hex_of(std::span<const std::uint8_t> bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (std::uint8_t byte : bytes) (text += digits[byte >> 4]) += digits[byte & 15];
  return text;
}

std::string sha256_of(const void* data, std::size_t bytes) {
  Sha256 sum;
  sum.update(data, bytes);
  return hex_of(sum.finish());
}

}  // namespace cf::checkpoint
