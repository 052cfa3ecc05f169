#include "cpu_ref/ops/chain.hpp"

namespace cf::cpu_ref {
namespace {

/// Both products.
constexpr auto kParts = [](const ops::LinearSum::Args& a, auto&& f) { return ops::LinearSum::for_each_part(a, f); };

}  // namespace

Status run(const ops::LinearSum::Args& a) { return run_chain(a, kParts); }

Result<Condition> condition(const ops::LinearSum::Args& a) { return chain_condition(a, kParts); }

}  // namespace cf::cpu_ref
