#pragma once
#include <optional>
#include <string_view>

namespace cf::cuda {

/// How a step is put onto a stream. unfused and graph give the same bits; so do split, layer and persistent, which keep
/// the residual stream in float32 from layer to layer and write no site's output but the last layer's.
///   unfused     every kernel launched by the host, one after the other
///   graph       a CUDA graph in which an op waits for those alone whose data it needs: with a parallel residual the
///               attention and the MLP's first product run side by side. For few tokens ln_qkv makes q, k and v, and
///               attn_in and qkv are not written; for more, rope_append makes q, and k and v are not written. For
///               one token of a model with RMSNorm and quantised weights, the products' kernels normalise the token,
///               and attn_in, qkv, k, v and mlp_in are not written
///   split       the persistent kernel in two launches a layer, neither of them cooperative. With a parallel residual
///               the first makes what needs the layer's input alone, the second the rest; with a sequential residual
///               the first is the attention, the second the MLP
///   layer       one launch of the persistent kernel a layer
///   persistent  one launch of the persistent kernel for all layers; of a Model, for whole tokens, and for many of them
///               where they are greedy
enum class Impl { unfused, graph, split, layer, persistent };
inline constexpr Impl kImpls[] = {Impl::unfused, Impl::graph, Impl::split, Impl::layer, Impl::persistent};

std::string_view to_string(Impl);
/// The inverse of to_string; empty for any other name.
std::optional<Impl> impl_from_string(std::string_view name);

}  // namespace cf::cuda
