#pragma once
// HDF5 behind RAII, for golden files alone: the few types, shapes and attributes that their schema uses. Private to
// golden/*.cpp. The library's own error printing is off inside every call, and as the caller had it afterwards.
#include <hdf5.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf::golden {

/// An HDF5 identifier, closed by the function of its kind.
class Hdf5Id {
 public:
  Hdf5Id(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  Hdf5Id(Hdf5Id&& o) noexcept : id_(std::exchange(o.id_, H5I_INVALID_HID)), close_(o.close_) {}
  Hdf5Id& operator=(Hdf5Id&& o) noexcept {
    std::swap(id_, o.id_);
    std::swap(close_, o.close_);
    return *this;
  }
  ~Hdf5Id();
  operator hid_t() const { return id_; }  // NOLINT(google-explicit-constructor)
  bool valid() const { return id_ >= 0; }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

/// Objects are named by their path without a leading slash; "" is the root group.
class Hdf5Reader {
 public:
  /// Verifies the seal (golden_file.hpp), then lets HDF5 open the file.
  static Result<Hdf5Reader> open(const std::string& path);

  const std::string& path() const { return path_; }
  bool has(const std::string& object) const;
  /// The names in a group, sorted.
  Result<std::vector<std::string>> names(const std::string& group) const;

  Result<std::string> text(const std::string& object, const std::string& attribute) const;
  Result<std::int64_t> integer(const std::string& object, const std::string& attribute) const;
  Result<std::uint64_t> unsigned_integer(const std::string& object, const std::string& attribute) const;

  /// A dataset's dtype and shape. Refuses types other than ours, data outside the file, and sizes that the dataset's
  /// bytes in the file cannot hold.
  struct Info {
    DType dtype;
    Shape shape;
  };
  Result<Info> info(const std::string& dataset) const;
  /// The dataset's elements, bit for bit.
  Result<Tensor> read(const std::string& dataset) const;

  /// "file: object: what", as every refusal reads.
  Status refuse(Code code, std::string_view object, std::string_view what,
                SourceLocation at = SourceLocation::current()) const;

 private:
  Hdf5Reader(std::string path, Hdf5Id file) : path_(std::move(path)), file_(std::move(file)) {}
  Result<Hdf5Id> open_object(const std::string& object) const;
  Result<Info> info(const std::string& name, hid_t dataset) const;
  struct Attribute;
  Result<Attribute> open_attribute(const std::string& object, const std::string& attribute, H5T_class_t kind) const;
  /// An integer attribute's 64 bits and whether they are negative.
  Result<std::pair<std::uint64_t, bool>> integer_bits(const std::string& object, const std::string& attribute) const;

  std::string path_;
  Hdf5Id file_;
};

/// Builds a file in memory; commit() seals it and writes it atomically. Groups are made as datasets and attributes need
/// them.
class Hdf5Writer {
 public:
  static Result<Hdf5Writer> create(const std::string& path);

  const std::string& path() const { return path_; }
  Status text(const std::string& group, const std::string& attribute, const std::string& value);
  Status integer(const std::string& group, const std::string& attribute, std::int64_t value);
  Status unsigned_integer(const std::string& group, const std::string& attribute, std::uint64_t value);
  /// Refuses a dataset that is there already.
  Status write(const std::string& dataset, const Tensor& tensor);
  Status commit();

 private:
  Hdf5Writer(std::string path, Hdf5Id file) : path_(std::move(path)), file_(std::move(file)) {}
  Hdf5Id open_group(const std::string& group);
  Status attribute(const std::string& group, const std::string& name, hid_t type, const void* value);

  std::string path_;
  Hdf5Id file_;
};

}  // namespace cf::golden
