#pragma once
// Passes over programs. Each puts one op into the place of several wherever their calls fit each other and the op's
// call is wanted; all other nodes pass through. The tensors between the replaced calls are not written any more: a pass
// leaves calls alone whose intermediate tensors another node reads.
#include <functional>

#include "core/model/program.hpp"

namespace cf {

/// Whether a fused node is wanted in the place of its parts, as where a backend has a kernel for its call. The backend
/// may leave in the node what it has planned to find out.
using Wanted = std::function<bool(Node&)>;
inline bool always(Node&) { return true; }

/// RopeAppend, at kv_append, in the place of Rope and of the KvAppend of its keys and values.
Program with_rope_append(Program program, const Wanted& wanted = always);
/// LnQkv, at query_key_value, in the place of LayerNorm, the product behind it, Rope and KvAppend. Their q, k and v are
/// interleaved by head.
Program with_ln_qkv(Program program, const Wanted& wanted = always);
/// LinearSum, at the second product, in the place of two products of which the second adds what the first makes.
Program with_linear_sum(Program program, const Wanted& wanted = always);
/// RmsLinear, at the product, in the place of RmsNorm and of the product behind it.
Program with_rms_linear(Program program, const Wanted& wanted = always);
/// Of a rank that shares a model with others, AllReduce behind each product whose result is summed over the ranks, in the
/// place of that result: mlp.dense_4h_to_h and, with a sequential residual, attention.dense. The program of a model on
/// one rank stays as it is. This pass comes before the others.
Program with_all_reduce(Program program, const ModelSpec& m);
/// Of rank `rank`, in the place of the LM head its rows of the head, the vocabulary being divided in order, and AllGather
/// of what they make. `part` is memory for that: (rows, vocab / ranks). The program stays as it is where the ranks do not
/// divide the vocabulary in multiples of 8 ids, where the head is not dense, and where it has more rows than `part`.
Program with_rank_head(Program program, const ModelSpec& m, std::int64_t rank, const AnyView<2>& part);
/// The rows of the LM head that each rank makes; 0 where every rank makes all.
std::int64_t rank_head_rows(const ModelSpec& m);
/// RmsQkv, at kv_append, in the place of RmsLinear and of the RopeAppend of what it makes. Its q, k and v are separate.
Program with_rms_qkv(Program program, const Wanted& wanted = always);

}  // namespace cf
