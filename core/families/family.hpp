#pragma once
// What a family of models is, as constexpr data. Each family has a file, which a line of families.def and one of
// all.hpp enrol. Readers, writers, walks and the Python tools ask this data and no family's name.
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/families/fields.hpp"
#include "core/families/site.hpp"
#include "core/families/traits.hpp"
#include "core/ops/rope.hpp"

namespace cf {

enum class ModelType : std::uint8_t {
#define CF_FAMILY(name) name,
#include "core/families/families.def"
#undef CF_FAMILY
};

/// The sites of a layer that a family has, in the order of the walk.
class SiteList {
 public:
  /// Leaves out those without a name.
  constexpr SiteList(std::initializer_list<Site> sites) {
    for (const Site& s : sites)
      if (!s.name.empty()) sites_[size_++] = s;
  }
  constexpr const Site* begin() const { return sites_.data(); }
  constexpr const Site* end() const { return sites_.data() + size_; }
  constexpr std::size_t size() const { return size_; }
  constexpr const Site& operator[](std::size_t i) const { return sites_[i]; }

 private:
  std::array<Site, std::size_t(SiteId::embed_out)> sites_{};
  std::size_t size_ = 0;
};

/// The names of a family's modules: Hugging Face's, but for the steps that it has no module for. A product of several
/// matrices that Hugging Face keeps apart has a name in the same style. A site that a family lacks has no name.
struct ModelNames {
  std::string_view layers;  // what a layer's names begin with, before its number
  Site input_layernorm, query_key_value;
  Site qk_norm{};           // of each head of q and k, before RoPE
  Site q_norm{}, k_norm{};  // its modules, which hold the weights
  Site rotary_emb, kv_append, context, dense, post_attention_layernorm, dense_h_to_4h, dense_4h_to_h;
  Site embed_in;           // from here on outside the layers, by their whole names
  Site embed_positions{};  // of learned positions
  Site final_layer_norm, embed_out;
  std::string_view other_head{};  // what transformers 5 calls embed_out in memory, and some files, too

  /// Those outside the layers, in the order of the walk.
  constexpr SiteList outside() const { return {embed_in, embed_positions, final_layer_norm, embed_out}; }
  /// The layer's sites in the order of the walk.
  constexpr SiteList sites() const {
    return {input_layernorm, query_key_value,          qk_norm,       rotary_emb,   kv_append, context,
            dense,           post_attention_layernorm, dense_h_to_4h, dense_4h_to_h};
  }
  /// "gpt_neox.layers.3."
  std::string layer(std::int64_t index) const { return std::string(layers) + std::to_string(index) + "."; }
  /// What the names of tensors outside the head begin with, up to its dot: "gpt_neox.".
  constexpr std::string_view base() const { return layers.substr(0, layers.find('.') + 1); }
};

/// How checkpoints store a Linear of a layer, where they do not store it as the walk has it.
struct StoredLinear {
  SiteId site;
  std::span<const std::string_view> parts{};  // its modules; none: one, with the site's name
  bool interleaved = false;                   // the parts' rows in turn; otherwise the parts lie one below the other
  bool transposed = false;                    // dense weights are (in, out), as transformers' Conv1D has them
};

/// All that a family is.
struct FamilySpec {
  std::string_view model_type;  // config.json's
  std::string_view class_name;  // transformers' model with a head
  ModelNames names;
  std::span<const StoredLinear> stored{};
  std::span<const std::string_view> buffers{};  // of a layer in old checkpoints, which no one reads
  NormKind norm = NormKind::layernorm;
  Positions positions = Positions::rope;
  bool head_norm = false;         // RMSNorm of each head of q and of k, before RoPE
  bool dense_bias_as_qkv = true;  // dense has a bias where q, k and v have one; if false, never
  ops::QkvLayout qkv_layout = ops::QkvLayout::separate;
  std::span<const ActivationName> activations{};
  std::string_view activation_module{};  // of a layer in transformers: "mlp.act"
  std::span<const std::string_view> rope_types{};
  std::span<const ConfigField> fields{};  // of config.json; a size comes before those that follow from it
  std::span<const Preset> presets{};

  /// The field that says a key, or null where none does.
  constexpr const ConfigField* field(ConfigKey key) const {
    for (const ConfigField& f : fields)
      if (f.key == key && is_read(f.use)) return &f;
    return nullptr;
  }
  /// Whether config.json may say a value of its own.
  constexpr bool reads(ConfigKey key) const {
    const ConfigField* f = field(key);
    return f && f->use != FieldUse::asserted;
  }
  /// The default of a key whose values are T, or T{} where there is none.
  template <class T>
  constexpr T otherwise(ConfigKey key) const {
    for (const ConfigField& f : fields)
      if (f.key == key)
        if (const T* value = std::get_if<T>(&f.otherwise)) return *value;
    return T{};
  }
};

}  // namespace cf
