// Compiled twice, with and without contraction of floating-point operations. `cf` is the name of another namespace each
// time: of two inline functions of one name the linker would keep one.
#include "core/sampling.hpp"

namespace cf {

/// (3, n): of each logit the order key, the weight, and the weight of its product with the penalty. Nothing but the
/// product's own rounding lies between that product and the difference that weight() takes.
void sampling_bits(const float* logits, const bool* seen, int n, float repetition_penalty, std::uint64_t* bits) {
  constexpr float highest = 30;
  for (int i = 0; i < n; ++i) {
    const float score = sampling::score(logits[i], seen[i], repetition_penalty, 1.0f);
    bits[i] = sampling::order_key(score, i);
    bits[n + i] = sampling::weight(highest, score);
  }
  // In a loop of its own: a product that score() needs too would not be contracted.
  for (int i = 0; i < n; ++i)
    bits[2 * n + i] = sampling::weight(highest, sampling::product(logits[i], repetition_penalty));
}

/// What a compiler may contract.
float difference_and_product(float a, float b, float c) { return c - a * b; }

}  // namespace cf
