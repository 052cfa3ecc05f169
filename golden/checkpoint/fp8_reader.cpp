#include "golden/checkpoint/fp8_reader.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/tensor.hpp"
#include "golden/checkpoint/cast.hpp"
#include "golden/checkpoint/printable.hpp"

namespace cf::checkpoint {
namespace {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Status refuse(const FoundTensor& t, const std::string& what) {
  return Status::error(Code::invalid_file, t.file + ": tensor " + quote(t.entry->name) + ": " + what);
}

/// The scales that files have of a part: how many rows and columns, and how many elements of the matrix a scale has in
/// each direction.
struct Grid {
  std::int64_t rows, columns, height, width;
};

Grid grid_of(Fp8Scales scales, std::int64_t rows, std::int64_t in) {
  switch (scales) {
    case Fp8Scales::tensor: return {1, 1, rows, in};
    case Fp8Scales::channel: return {rows, 1, 1, in};
    case Fp8Scales::block: return {divide_up(rows, kFp8Block), divide_up(in, kFp8Block), kFp8Block, kFp8Block};
  }
  return {};
}

/// The shapes that files have for a part's scales.
std::vector<Shape> scale_shapes(Fp8Scales scales, const Grid& grid) {
  switch (scales) {
    case Fp8Scales::tensor: return {{1}, {}, {1, 1}};
    case Fp8Scales::channel: return {{grid.rows, 1}, {grid.rows}};
    case Fp8Scales::block: return {{grid.rows, grid.columns}};
  }
  return {};
}

Result<std::vector<float>> read_scales(Fp8Scales scales, const Grid& grid, const FoundTensor& found) {
  const TensorEntry& t = *found.entry;
  const std::vector<Shape> shapes = scale_shapes(scales, grid);
  if (std::find(shapes.begin(), shapes.end(), t.shape) == shapes.end())
    return refuse(found, "expected shape " + to_string(shapes[0]) + ", got " + to_string(t.shape));
  const std::optional<DType> dtype = float_dtype(t.stored_dtype);
  if (!dtype || *dtype == DType::f64) return refuse(found, "expected dtype F32, BF16 or F16, got " + t.stored_dtype);
  std::vector<float> values(std::size_t(grid.rows * grid.columns));
  cast_elements(*dtype, t.data, std::int64_t(values.size()), DType::f32, values.data());
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i]))
      return refuse(found, "element " + std::to_string(i) + ": expected a finite number, got " +
                               (std::isnan(values[i]) ? "NaN" : "infinity"));
  return values;
}

/// Refuses codes that are NaN.
Status check_codes(const FoundTensor& found, std::int64_t in) {
  const auto* const codes = static_cast<const e4m3*>(found.entry->data);
  unsigned any = 0;  // without a branch, so that the compiler vectorises the loop
  for (std::int64_t i = 0; i < found.entry->bytes; ++i) any |= unsigned(is_nan(codes[i]));
  if (!any) return {};
  std::int64_t first = -1, count = 0;
  for (std::int64_t i = 0; i < found.entry->bytes; ++i)
    if (is_nan(codes[i]) && count++ == 0) first = i;
  return refuse(found, "element " + to_string(Shape{first / in, first % in}) + ": expected a finite number, got NaN; " +
                           std::to_string(count) + " of " + std::to_string(found.entry->bytes) +
                           " elements are not finite");
}

}  // namespace

Result<OwnedFp8> read_fp8(const Fp8Config& config, const std::string& prefix, const StoredParts& stored,
                          std::int64_t in, const FindTensor& find) {
  std::int64_t out = 0;
  for (const StoredPart& part : stored.parts) out += part.rows;
  OwnedFp8 made(out, in, fp8_group_size(config, in));
  const std::int64_t groups = made.view().groups();
  for (std::size_t p = 0; p < stored.parts.size(); ++p) {
    const std::int64_t rows = stored.parts[p].rows;
    const std::string module = prefix + std::string(stored.parts[p].module) + ".";
    CF_TRY_ASSIGN(const FoundTensor codes, find(module + "weight"));
    const TensorEntry& t = *codes.entry;
    if (t.stored_dtype != kFp8Dtype)
      return refuse(codes, std::string("expected dtype ") + kFp8Dtype + ", got " + t.stored_dtype);
    if (t.shape != Shape{rows, in})
      return refuse(codes, "expected shape " + to_string(Shape{rows, in}) + ", got " + to_string(t.shape));
    CF_TRY_ASSIGN(const FoundTensor found, find(module + config.scale_name));
    const Grid grid = grid_of(config.scales, rows, in);
    CF_TRY_ASSIGN(const std::vector<float> scales, read_scales(config.scales, grid, found));
    CF_TRY(check_codes(codes, in));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t place = stored.joined_row(p, r);
      std::memcpy(made.codes() + place * in, static_cast<const char*>(t.data) + r * in, std::size_t(in));
      std::memcpy(made.scales() + place * groups, scales.data() + r / grid.height * grid.columns,
                  std::size_t(groups) * sizeof(float));
    }
  }
  return made;
}

}  // namespace cf::checkpoint
