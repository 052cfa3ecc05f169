#pragma once
// Private to golden: a Linear from the parts that a checkpoint stores of it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/model/weights.hpp"
#include "core/tensor.hpp"

namespace cf::checkpoint {

/// Copies a part's elements along `axis` (0 or 1) of a tensor to their places in the joined tensor. A word of packed
/// codes counts as `codes` places of `32 / codes` bits.
inline void copy_part(const StoredParts& stored, std::size_t part, const void* from, void* to, const Shape& whole,
                      int axis, std::size_t element_bytes, std::int64_t codes) {
  const std::int64_t rows = stored.parts[part].rows, all_rows = whole[std::size_t(axis)] * codes;
  const std::int64_t outer = axis == 1 ? whole[0] : 1;
  const std::size_t row_bytes = element_bytes * std::size_t(axis == 0 && whole.size() == 2 ? whole[1] : 1);
  for (std::int64_t o = 0; o < outer; ++o)
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t source = o * rows + r, target = o * all_rows + stored.joined_row(part, r);
      if (codes == 1) {
        std::memcpy(static_cast<char*>(to) + std::size_t(target) * row_bytes,
                    static_cast<const char*>(from) + std::size_t(source) * row_bytes, row_bytes);
        continue;
      }
      const std::int64_t bits = 32 / codes;
      const std::uint32_t mask = (1u << bits) - 1;
      const auto word = std::uint32_t(static_cast<const std::int32_t*>(from)[source / codes]);
      auto& joined = static_cast<std::uint32_t*>(to)[target / codes];
      joined |= (word >> (source % codes * bits) & mask) << (target % codes * bits);
    }
}

/// Copies a part that is stored as (columns, rows) to its rows of the joined matrix. Elements have 2, 4 or 8 bytes.
inline void transpose_part(const StoredParts& stored, std::size_t part, const void* from, void* to,
                           std::int64_t columns, std::size_t element_bytes) {
  constexpr std::int64_t tile = 32;  // what is read and written of a tile stays in the nearest cache
  const std::int64_t rows = stored.parts[part].rows;
  const auto transpose = [&]<class T>(T) {
    for (std::int64_t row_0 = 0; row_0 < rows; row_0 += tile)
      for (std::int64_t column_0 = 0; column_0 < columns; column_0 += tile)
        for (std::int64_t r = row_0; r < std::min(rows, row_0 + tile); ++r) {
          T* target = static_cast<T*>(to) + stored.joined_row(part, r) * columns;
          for (std::int64_t c = column_0; c < std::min(columns, column_0 + tile); ++c)
            target[c] = static_cast<const T*>(from)[c * rows + r];
        }
  };
  switch (element_bytes) {
    case 2: return transpose(std::uint16_t());
    case 4: return transpose(std::uint32_t());
    case 8: return transpose(std::uint64_t());
  }
}

}  // namespace cf::checkpoint
