#pragma once
#include "core/families/all.hpp"
#include "core/model/shape.hpp"

namespace cf {

constexpr const FamilySpec& family_of(const ModelSpec& m) { return family_of(m.traits.family); }
constexpr const ModelNames& names_of(ModelType type) { return family_of(type).names; }
constexpr const ModelNames& names_of(const ModelSpec& m) { return names_of(m.traits.family); }

}  // namespace cf
