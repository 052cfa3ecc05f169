#pragma once
// A layer by its sites' own kernels. Private to cuda/model and the Python package.
#include "core/ops/decode_layer.hpp"
#include "cuda/model/token_rows.hpp"

namespace cf::cuda {

/// Adds the launches of a layer of one token whose caller has the cache as rows, too: every site's own kernels in the
/// walk's order, or ln_qkv in the place of the first four, which gives the same bits. Then nothing writes attn_in and
/// qkv. The rows' launch takes the place of the append's, or follows ln_qkv.
Status prepare_layer(const ops::DecodeLayer::Args& a, const TokenRows& rows, LaunchList& launches);

}  // namespace cf::cuda
