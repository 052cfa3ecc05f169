#pragma once
#include "core/families/family.hpp"
#include "core/families/gpt2.hpp"
#include "core/families/gpt_neox.hpp"
#include "core/families/llama.hpp"
#include "core/families/mistral.hpp"
#include "core/families/qwen2.hpp"
#include "core/families/qwen3.hpp"
#include "core/families/stablelm.hpp"

namespace cf {

/// Every family, in the order of ModelType.
inline constexpr std::array kFamilies{
#define CF_FAMILY(name) &families::name::kFamily,
#include "core/families/families.def"
#undef CF_FAMILY
};

constexpr const FamilySpec& family_of(ModelType type) { return *kFamilies[std::size_t(type)]; }

}  // namespace cf
