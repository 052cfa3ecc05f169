#pragma once
// Private to the golden library: writes golden files with libhdf5, in the part of HDF5 that hdf5_reader.hpp reads.
#include <hdf5.h>

#include <cstdint>
#include <string>
#include <utility>

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

/// Builds a file in memory; commit() seals it and writes it atomically. Objects are named by their path without a
/// leading slash, "" is the root group; groups are made when a dataset or an attribute needs them. libhdf5 prints no
/// errors inside these calls, and the caller's error handler is restored after each.
class Hdf5Writer {
 public:
  static Result<Hdf5Writer> create(const std::string& path);

  const std::string& path() const { return path_; }
  /// Writes a UTF-8 string of fixed length, an attribute of a group or of a dataset. Refuses more than 65000 bytes, for
  /// which an object header has no room, and text with a zero byte, which would end it.
  Status text(const std::string& object, const std::string& attribute, const std::string& value);
  Status integer(const std::string& group, const std::string& attribute, std::int64_t value);
  Status unsigned_integer(const std::string& group, const std::string& attribute, std::uint64_t value);
  /// Refuses a dataset whose name is taken.
  Status write(const std::string& dataset, const Tensor& tensor);
  Status commit();

 private:
  Hdf5Writer(std::string path, Hdf5Id file) : path_(std::move(path)), file_(std::move(file)) {}
  Hdf5Id open_group(const std::string& group);
  Status attribute(const std::string& object, hid_t owner, const std::string& name, hid_t type, const void* value);
  Status text(const std::string& object, hid_t owner, const std::string& name, const std::string& value);

  std::string path_;
  Hdf5Id file_;
};

}  // namespace cf::golden
