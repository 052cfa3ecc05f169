#include "cuda/ops/linear/pack/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace cf::cuda {
namespace {

constexpr std::string_view kName = "pack";
constexpr std::int64_t kHalf = kGptqColumns / 2, kTileWords = kGptqTileBytes / 4;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Code i of packed words that are `stride` apart.
std::uint32_t code(const std::int32_t* words, std::int64_t stride, std::int64_t i, int bits) {
  const std::int64_t per_word = 32 / bits;
  return std::uint32_t(words[i / per_word * stride]) >> (i % per_word * bits) & ((1u << bits) - 1);
}

/// Eight codes of four bits, low bits first, in the tiles' order.
constexpr std::uint32_t shuffled(std::uint32_t word) {
  std::uint32_t to = 0;
  for (int c = 0; c < 8; ++c) to |= (word >> (4 * c) & 15) << gptq_shift(int(c));
  return to;
}

/// The columns of a packed matrix. A code of 8 bits has a column in each of two planes, one of 4 bits in one plane.
struct Columns {
  int planes;
  std::int64_t per_group, per_plane, chunks;
  std::vector<std::int32_t> inputs;  // of every column of every chunk; -1 where a column has none
  bool in_order = true;              // column k is input k
  bool plane_in_order = true;        // column k of each plane is input k
};

Result<Columns> columns_of(const GptqWeight& w) {
  const std::int64_t in = w.g_idx.size(), groups = w.scales.shape[0];
  std::vector<std::vector<std::int32_t>> members(static_cast<std::size_t>(groups));
  for (std::int64_t k = 0; k < in; ++k) {
    const std::int32_t g = w.g_idx.data[k];
    if (g < 0 || g >= groups)
      return bad_argument(kName, "'g_idx'[" + std::to_string(k) + "] must be 0 to " + std::to_string(groups - 1) +
                                     ", got " + std::to_string(g));
    members[std::size_t(g)].push_back(std::int32_t(k));
  }
  std::size_t largest = 0;
  for (const auto& group : members) largest = std::max(largest, group.size());

  Columns c{.planes = w.bits / 4, .per_group = 0, .per_plane = 0, .chunks = 0, .inputs = {}};
  c.per_group = round_up(std::int64_t(largest), groups == 1 ? kGptqColumns : kHalf);
  c.per_plane = groups * c.per_group;
  for (int plane = 0; plane < c.planes; ++plane)
    for (const auto& group : members) {
      c.inputs.insert(c.inputs.end(), group.begin(), group.end());
      c.inputs.resize(c.inputs.size() + std::size_t(c.per_group) - group.size(), -1);
    }
  while (c.inputs.back() < 0) c.inputs.pop_back();  // the last chunk is that of the last input
  c.chunks = round_up(std::int64_t(c.inputs.size()), kGptqColumns) / kGptqColumns;
  c.inputs.resize(std::size_t(c.chunks * kGptqColumns), -1);
  c.in_order = c.planes == 1;
  for (std::int64_t i = 0; i < std::int64_t(c.inputs.size()); ++i)
    c.in_order = c.in_order && c.inputs[std::size_t(i)] == (i < in ? i : -1);
  for (std::int64_t i = 0; i < in; ++i) c.plane_in_order = c.plane_in_order && c.inputs[std::size_t(i)] == i;
  return c;
}

/// A scale of 0 becomes 1, its codes and zeros 0: kernels divide by a row's scales.
constexpr std::uint32_t kNothing = 0x3c00;
bool is_nothing(const GptqWeight& w, std::int64_t group, std::int64_t row) {
  return (w.scales.data[group * w.scales.shape[1] + row].bits & 0x7fff) == 0;
}

/// Writes the scales and zeros of packed row r. Behind the groups of inputs come those of columns without one.
Status pack_scales(const GptqWeight& w, const Columns& columns, const GptqLayout& l, std::int64_t r,
                   std::int32_t* scales) {
  const std::int64_t groups = w.scales.shape[0], out = w.scales.shape[1], n = l.pairs.row(r);
  std::int32_t* const words =
      scales + r / kGptqRows * l.groups * kGptqRows + 2 * (r % kGptqRows % 8) + r % kGptqRows / 8;
  for (std::int64_t group = 0; group < l.groups; ++group) words[group * kGptqRows] = kNothing;
  for (std::int64_t group = 0; group < groups; ++group) {
    if (is_nothing(w, group, n)) continue;
    const std::int32_t zero =
        std::int32_t(code(w.qzeros.data + group * w.qzeros.shape[1], 1, n, w.bits)) + w.zero_offset;
    const f16 scale = w.scales.data[group * out + n];
    for (int plane = 0; plane < columns.planes; ++plane) {
      const bool is_high = columns.planes == 2 && plane == 0;
      const f16 scaled = is_high ? narrow<f16>(16 * widen<double>(scale)) : scale;
      if (is_high && std::isinf(widen<double>(scaled)))
        return bad_argument(kName, "'scales'(" + std::to_string(group) + ", " + std::to_string(n) +
                                       ") must be at most 4095 with 8 bits, got " +
                                       std::to_string(widen<double>(scale)));
      const f16 offset = narrow<f16>(columns.planes == 1 ? zero : is_high ? zero >> 4 : zero & 15);
      words[(plane * groups + group) * kGptqRows] = std::int32_t(scaled.bits | std::uint32_t(offset.bits) << 16);
    }
  }
  return {};
}

/// Writes the codes of packed row r.
void pack_codes(const GptqWeight& w, const Columns& columns, const GptqLayout& l, std::int64_t r, std::int32_t* codes) {
  const std::int64_t in = w.g_idx.size(), out = w.scales.shape[1], n = l.pairs.row(r);
  const std::int64_t g = r % kGptqRows % 8, side = r % kGptqRows / 8, groups = w.scales.shape[0];
  for (std::int64_t chunk = 0; chunk < l.chunks; ++chunk)
    for (std::int64_t half = 0; half < 2; ++half)
      for (std::int64_t t = 0; t < 4; ++t) {
        const std::int64_t first = chunk * kGptqColumns + half * kHalf + 8 * t;
        std::uint32_t word = 0;
        if (is_nothing(w, first / columns.per_group % groups, n)) {
          // as many zeros
        } else if (columns.in_order) {
          // The eight columns are those of one stored word. The last chunk may have columns beyond the inputs.
          if (first < in) word = shuffled(std::uint32_t(w.qweight.data[first / 8 * out + n]));
        } else {
          for (std::int64_t c = 0; c < 8; ++c) {
            const std::int64_t column = first + c, k = columns.inputs[std::size_t(column)];
            if (k < 0) continue;
            const std::uint32_t q = code(w.qweight.data + n, out, k, w.bits);
            word |= (columns.planes == 1 ? q : column < columns.per_plane ? q >> 4 : q & 15) << gptq_shift(int(c));
          }
        }
        codes[(r / kGptqRows * l.chunks + chunk) * kTileWords + (4 * g + t) * 4 + 2 * half + side] = std::int32_t(word);
      }
}

/// Whether every weight lies within float16's range. A code and its zero differ by 2^bits at most.
bool fits_f16(const GptqWeight& w) {
  return std::all_of(w.scales.data, w.scales.data + w.scales.size(),
                     [&](f16 scale) { return std::abs(widen<double>(scale)) * double(1 << w.bits) <= 65504; });
}

Result<Packed> pack_gptq(const GptqWeight& w, const PackHint& hint) {
  CF_TRY(check_packable(w));
  CF_TRY_ASSIGN(const Columns columns, columns_of(w));
  const std::int64_t in = w.g_idx.size(), out = w.scales.shape[1], groups = w.scales.shape[0];
  const std::int64_t touched = round_up(columns.chunks * kGptqColumns, columns.per_group) / columns.per_group;
  const GptqLayout layout{.row_tiles = std::int32_t(round_up(out, kGptqRows) / kGptqRows),
                          .chunks = std::int32_t(columns.chunks),
                          .groups = std::int32_t(std::max(columns.planes * groups, touched)),
                          .columns_per_group = std::int32_t(columns.per_group),
                          .inputs = std::int32_t(in),
                          .has_order = !columns.in_order,
                          .in_order = columns.plane_in_order,
                          .fits_f16 = fits_f16(w),
                          .pairs = hint.pairs};

  Tensor block(DType::i32, {layout.words()});
  auto* const codes = block.as<std::int32_t>();
  auto* const scales = codes + layout.code_words();
  for (std::int64_t r = 0; r < out; ++r) {
    CF_TRY(pack_scales(w, columns, layout, r, scales));
    pack_codes(w, columns, layout, r, codes);
  }
  std::int32_t* const order = scales + layout.scale_words();
  if (layout.has_order) std::copy(columns.inputs.begin(), columns.inputs.end(), order);
  if (layout.inverse_words())
    for (std::int64_t column = columns.per_plane - 1; column >= 0; --column)
      if (const std::int32_t input = columns.inputs[std::size_t(column)]; input >= 0)
        order[layout.order_words() + input] = std::int32_t(column);

  PackedWeight packed{.packer = kCudaPacker,
                      .format = {w.bits, w.group_size},
                      .out = out,
                      .in = in,
                      .data = {codes, {layout.words()}},
                      .layout = {}};
  static_assert(sizeof layout <= sizeof packed.layout && std::is_trivially_copyable_v<GptqLayout>);
  std::memcpy(packed.layout.data(), &layout, sizeof layout);
  return Packed{.weight = packed, .storage = std::move(block)};
}

}  // namespace

Status check_packable(const GptqWeight& w) {
  const LinearParams linear{.weight = w, .bias = {}};
  const std::int64_t in = w.g_idx.shape[0], out = w.scales.shape[1];
  CF_TRY(ops::Linear::check_linear(kName, out, in, linear));
  TensorCheck check(kName);
  ops::Linear::linear_tensors(out, in, linear, check);
  return check.status();
}

Result<Packed> pack(const LinearWeight& weight, const PackHint& hint) {
  if (const auto* gptq = std::get_if<GptqWeight>(&weight)) return pack_gptq(*gptq, hint);
  return Packed{.weight = weight, .storage = {}};
}

Result<GptqLayout> gptq_layout(std::string_view op, const PackedWeight& w) {
  if (w.packer != kCudaPacker)
    return Status::error(Code::unimplemented, std::string(op) + ": cuda takes weights packed by " +
                                                  std::string(kCudaPacker) + ", got a weight packed by " +
                                                  (w.packer.empty() ? "nobody" : std::string(w.packer)));
  GptqLayout layout;
  std::memcpy(&layout, w.layout.data(), sizeof layout);
  if (w.data.size() != layout.words())
    return bad_argument(
        op, "'packed' has " + std::to_string(w.data.size()) + " words, expected " + std::to_string(layout.words()));
  return layout;
}

}  // namespace cf::cuda
