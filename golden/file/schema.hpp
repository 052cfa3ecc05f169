#pragma once
// Private to the golden library: what the schemas of golden files share.
#include <functional>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "golden/checkpoint/checkpoint.hpp"
#include "golden/file/golden_file.hpp"
#include "golden/file/hdf5_reader.hpp"
#include "golden/file/hdf5_writer.hpp"
#include "golden/file/model_golden.hpp"

namespace cf::golden {

/// A schema's name and versions.
struct Schema {
  std::string_view name;
  std::int64_t oldest, newest;  // the versions that are read; the newest is written
  std::int64_t fixed_text;      // the first version whose strings all have a fixed length
};
inline constexpr Schema kLayerSchema{"cf-golden", kOldestSchemaVersion, kSchemaVersion, 2};
inline constexpr Schema kModelSchema{"cf-golden-model", kModelSchemaVersion, kModelSchemaVersion, 1};

/// Runs f. Returns an error where memory runs out.
template <class F>
auto guarded(const std::string& path, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Status::error(Code::out_of_memory, path + ": not enough memory for its tensors");
  }
}

/// Refuses a dataset of another dtype or shape.
Status expect(const Hdf5Reader& file, const std::string& name, DType dtype, const Shape& shape);

/// Refuses a value outside least .. most; `what` names it.
Status in_range(const Hdf5Reader& file, const std::string& what, std::int64_t value, std::int64_t least,
                std::int64_t most);

/// Refuses an attribute's value that is none of those.
Status one_of(const Hdf5Reader& file, const std::string& attribute, const std::string& value,
              std::initializer_list<std::string_view> allowed);

/// Reads an int32 dataset of that shape, whose elements must lie between `least` and `most`.
Status check_integers(const Hdf5Reader& file, const std::string& name, const Shape& shape, std::int64_t least,
                      std::int64_t most, std::vector<std::int32_t>& values);

/// Reads the attributes that every schema has. Refuses another schema or version, and weights from none of `sources`.
Status read_origin(const Hdf5Reader& file, const Schema& schema, std::initializer_list<std::string_view> sources,
                   GoldenOrigin& origin);
Status write_origin(Hdf5Writer& file, const Schema& schema, const GoldenOrigin& origin);

/// Reads a variant's attributes, those of the group or dataset `object`. Refuses a dtype that is not a floating-point
/// type, and another than float64 of the reference.
Status read_variant(const Hdf5Reader& file, const std::string& object, VariantInfo& variant, DType& dtype);
Status write_variant(Hdf5Writer& file, const std::string& object, const VariantInfo& variant);

/// A layer's sizes, as messages name them.
std::string layer_sizes(const ModelConfig& config);

/// Opens the checkpoint of a file's weights: `directory`, or where that is empty the one that the file names. Refuses
/// a checkpoint whose sizes are others than the file's; `sizes` describes a config's.
Result<checkpoint::Checkpoint> open_checkpoint(const std::string& path, const GoldenOrigin& origin,
                                               const std::string& directory,
                                               const std::function<std::string(const ModelConfig&)>& sizes);

/// Refuses weights whose checksum is not the file's; `source` says where they came from.
Status check_weights(const Hdf5Reader& file, const GoldenOrigin& origin, std::uint64_t checksum,
                     std::string_view source);

}  // namespace cf::golden
