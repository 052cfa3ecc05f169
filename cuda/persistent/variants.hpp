#pragma once
// Private to cuda, cf-layer and tests.
#include <string>
#include <vector>

#include "cuda/persistent/plan.hpp"

namespace cf::cuda {

/// A plan that differs from a given one in one choice.
struct PersistentVariant {
  std::string choice;  // "bytes in flight"
  std::string value;   // "20 KB"
  PersistentChoices choices;
};

/// Whether two plans of a model add in the same order, and so give the same output bits. A choice that leaves more or
/// less shared memory may change the slices of a row, and so the order.
bool same_bits(const PersistentPlan& a, const PersistentPlan& b);

/// The plans to compare a given one with, each with one choice made another way: the bytes in flight, the size of the
/// ring, what work hides which waits between blocks, the products of one token, and the splits of a head's keys. The
/// first plan is the given one.
std::vector<PersistentVariant> persistent_variants(const PersistentPlan& plan);

}  // namespace cf::cuda
