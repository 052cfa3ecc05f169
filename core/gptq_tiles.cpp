#include "core/gptq_tiles.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace cf {
namespace {

constexpr std::int64_t kRows = 16, kColumns = 64, kHalf = 32, kWords = 128;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Code i of packed words that are `stride` apart.
std::uint32_t code(const std::int32_t* words, std::int64_t stride, std::int64_t i, int bits) {
  const std::int64_t per_word = 32 / bits;
  return std::uint32_t(words[i / per_word * stride]) >> (i % per_word * bits) & ((1u << bits) - 1);
}

/// Where column c of a word's eight lies.
constexpr int shift_of(std::int64_t c) { return int(4 * (c / 4 + 2 * (c / 2 % 2) + 4 * (c % 2))); }

/// Eight codes of four bits, low bits first, in the tiles' order.
constexpr std::uint32_t shuffled(std::uint32_t word) {
  std::uint32_t to = 0;
  for (int c = 0; c < 8; ++c) to |= (word >> (4 * c) & 15) << shift_of(c);
  return to;
}

/// The inputs by column, -1 where there is none: one plane's.
std::vector<std::int32_t> columns_of(const GptqWeight& w, std::int64_t columns_per_group) {
  const std::int64_t groups = w.scales.shape[0];
  std::vector<std::int32_t> columns(std::size_t(groups * columns_per_group), -1);
  std::vector<std::int64_t> next(static_cast<std::size_t>(groups));
  for (std::int64_t k = 0; k < w.g_idx.size(); ++k) {
    const std::int64_t g = w.g_idx.data[k];
    columns[std::size_t(g * columns_per_group + next[std::size_t(g)]++)] = std::int32_t(k);
  }
  return columns;
}

}  // namespace

Result<OwnedGptqTiles> repack_gptq(const GptqWeight& w, RopePairs pairs) {
  const std::int64_t in = w.g_idx.size(), out = w.scales.shape[1], groups = w.scales.shape[0];
  const auto refuse = [](std::string what) { return Status::error(Code::invalid_argument, "GPTQ " + std::move(what)); };
  std::vector<std::int64_t> members(static_cast<std::size_t>(groups));
  for (std::int64_t k = 0; k < in; ++k) {
    const std::int32_t g = w.g_idx.data[k];
    if (g < 0 || g >= groups)
      return refuse("'g_idx'[" + std::to_string(k) + "] must be 0 to " + std::to_string(groups - 1) + ", got " +
                    std::to_string(g));
    ++members[std::size_t(g)];
  }
  const int planes = w.bits / 4;
  const std::int64_t columns_per_group =
      round_up(*std::max_element(members.begin(), members.end()), groups == 1 ? kColumns : kHalf);
  const std::vector<std::int32_t> inputs = columns_of(w, columns_per_group);
  const std::int64_t plane_columns = groups * columns_per_group;
  std::int64_t used = plane_columns;  // up to the last input
  while (inputs[std::size_t(used - 1)] < 0) --used;
  const std::int64_t chunks = round_up((planes - 1) * plane_columns + used, kColumns) / kColumns;
  const std::int64_t tile_rows = round_up(out, kRows) / kRows;
  const std::int64_t stored_groups =
      std::max(planes * groups, round_up(chunks * kColumns, columns_per_group) / columns_per_group);
  bool in_order = planes == 1;
  for (std::int64_t c = 0; c < plane_columns; ++c) in_order = in_order && inputs[std::size_t(c)] == (c < in ? c : -1);

  OwnedGptqTiles owned;
  const auto make = [&](Shape shape) {
    owned.storage.emplace_back(DType::i32, std::move(shape));
    return owned.storage.back().as<std::int32_t>();
  };
  auto* const codes = make({tile_rows, chunks, kWords});
  auto* const scales = make({tile_rows, stored_groups, kRows});
  owned.tiles = {.bits = w.bits,
                 .group_size = w.group_size,
                 .columns_per_group = columns_per_group,
                 .pairs = pairs,
                 .codes = {codes, {tile_rows, chunks, kWords}},
                 .scales = {scales, {tile_rows, stored_groups, kRows}},
                 .order = {}};
  if (!in_order) {
    auto* const order = make({chunks * kColumns});
    std::fill_n(order, chunks * kColumns, -1);
    for (int plane = 0; plane < planes; ++plane)
      std::copy_n(inputs.begin(), plane + 1 < planes ? plane_columns : used, order + plane * plane_columns);
    owned.tiles.order = {order, {chunks * kColumns}};
  }

  for (std::int64_t r = 0; r < out; ++r) {
    const std::int64_t n = pairs.row(r), g = r % kRows % 8, side = r % kRows / 8;
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int32_t zero =
          std::int32_t(code(w.qzeros.data + group * w.qzeros.shape[1], 1, n, w.bits)) + w.zero_offset;
      const f16 scale = w.scales.data[group * out + n];
      for (int plane = 0; plane < planes; ++plane) {
        const bool is_high = planes == 2 && plane == 0;
        const f16 scaled = is_high ? narrow<f16>(16 * widen<double>(scale)) : scale;
        if (is_high && std::isinf(widen<double>(scaled)))
          return refuse("'scales'(" + std::to_string(group) + ", " + std::to_string(n) +
                        ") must be at most 4095 with 8 bits, got " + std::to_string(widen<double>(scale)));
        const f16 offset = narrow<f16>(planes == 1 ? zero : is_high ? zero >> 4 : zero & 15);
        scales[((r / kRows) * stored_groups + plane * groups + group) * kRows + 2 * g + side] =
            std::int32_t(scaled.bits | std::uint32_t(offset.bits) << 16);
      }
    }
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
      for (std::int64_t half = 0; half < 2; ++half)
        for (std::int64_t t = 0; t < 4; ++t) {
          const std::int64_t first = chunk * kColumns + half * kHalf + 8 * t;
          std::uint32_t word = 0;
          if (in_order) {
            // The eight codes of a stored word, which ends where the inputs do.
            if (first < in) word = shuffled(std::uint32_t(w.qweight.data[first / 8 * out + n]));
          } else {
            for (std::int64_t c = 0; c < 8; ++c) {
              const std::int64_t column = first + c, k = owned.tiles.order.data[column];
              if (k < 0) continue;
              const std::uint32_t q = code(w.qweight.data + n, out, k, w.bits);
              word |= (planes == 1 ? q : column < plane_columns ? q >> 4 : q & 15) << shift_of(c);
            }
          }
          codes[((r / kRows) * chunks + chunk) * kWords + (4 * g + t) * 4 + 2 * half + side] = std::int32_t(word);
        }
  }
  return owned;
}

}  // namespace cf
