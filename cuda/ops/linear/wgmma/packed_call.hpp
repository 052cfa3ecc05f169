#pragma once
// What the kernels of packed weights on Hopper's tensor cores share on the host: the matrix, and x as it is multiplied.
#include "cuda/ops/linear/packed/plan.hpp"
#include "cuda/ops/linear/wgmma/packed_plan.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/tensor_map.hpp"

namespace cf::cuda {

/// A packed matrix and how it is multiplied.
struct PackedOperand {
  GptqMatrix matrix;
  RopePairs pairs;
  int halves_a_group;  // half chunks of a group
};

inline Result<PackedOperand> packed_operand(const ops::Linear::Args& a) {
  const auto& weight = std::get<PackedWeight>(a.linear.weight);
  CF_TRY_ASSIGN(const GptqLayout layout, gptq_layout(ops::Linear::name, weight));
  return PackedOperand{gptq_matrix(weight, layout), layout.pairs, layout.columns_per_group / 32};
}

/// The maps of a packed matrix for the stages of PackedRing.
struct PackedMaps {
  CUtensorMap codes, scales;
};
inline Result<PackedMaps> packed_maps(const GptqMatrix& m) {
  constexpr int tiles = kLinearWgmmaTileRows / kGptqRows, tile_rows = kGptqTileBytes / (kTileColumns * 2);
  PackedMaps maps;
  CF_TRY(make_tensor_map({.data = m.codes,
                          .dtype = DType::f16,
                          .columns = kTileColumns,
                          .rows = std::int64_t(m.chunks) * tile_rows,
                          .matrices = m.tiles},
                         tile_rows, maps.codes, tiles));
  CF_TRY(make_tensor_map(
      {.data = m.scales, .dtype = DType::f16, .columns = std::int64_t(m.groups) * kGptqGroupBytes / 2, .rows = m.tiles},
      tiles, maps.scales));
  return maps;
}

/// x with a column for each of the matrix's columns.
struct PackedInput {
  const void* data;
  std::int64_t columns;
};

/// The x that the product of a call reads. For a matrix whose columns have an order of their own, this adds a launch
/// that writes x in that order into scratch memory.
Result<PackedInput> packed_input(const ops::Linear::Args& args, const PackedOperand& operand, LaunchList& launches);

}  // namespace cf::cuda
