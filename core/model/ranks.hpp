#pragma once
#include <cstdint>
#include <string>

#include "core/model/weights.hpp"
#include "core/status.hpp"

namespace cf {

/// What rank `rank` of `ranks` holds of a layer: the rows of its heads in query_key_value and of its part of the MLP in
/// dense_h_to_4h, and the columns that go with them in dense and dense_4h_to_h; norms and the biases of summed products
/// whole. The shapes are those of whole.of_rank(rank, ranks). Rows that lie together are views into `layer`; all else is
/// copied to the result's own memory. A view without memory gives views without memory.
/// Refuses what of_rank() refuses; packed weights; and of a GPTQ weight rows that cut a word of zeros, columns that cut
/// a group, and columns in act order, whose groups are not consecutive.
Result<OwnedLayerWeights> layer_of_rank(const ModelSpec& whole, const LayerWeights& layer, std::int64_t rank,
                                        std::int64_t ranks);

/// The formats, dtypes and shapes of what a rank holds of a model, from which bytes are counted. The embedding, the
/// final norm and the LM head, which each rank has whole, are `model`'s own views; so are the tensors of layers, as far
/// as their first elements go: their values must not be read.
Result<ModelWeights> outline_of_rank(const ModelSpec& whole, const ModelWeights& model, std::int64_t rank,
                                     std::int64_t ranks);

/// Whether what this product makes is a rank's part of a sum over the ranks: mlp.dense_4h_to_h and, with a sequential
/// residual, attention.dense. No product's on one rank.
bool makes_part(const ModelSpec& m, SiteId site);

/// What ranks that share a model must have alike, a line each: sizes, arithmetic, formats of weights, and a hash of the
/// first bytes of every tensor that has values, in which another revision's differ.
std::string identity_of(const ModelSpec& whole, const ModelWeights& model);

}  // namespace cf
