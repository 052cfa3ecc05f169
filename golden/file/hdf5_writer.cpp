#include "golden/file/hdf5_writer.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <string_view>
#include <vector>

#include "core/atomic_file.hpp"
#include "golden/file/seal.hpp"

static_assert(std::endian::native == std::endian::little, "golden files are little-endian");

namespace cf::golden {
namespace {

constexpr std::size_t kMaxTextBytes = 65'000;

/// Turns libhdf5's error printing off while it lives.
class Quiet {
 public:
  Quiet() {
    unsigned is_v2 = 0;
    // The 1.8 interface cannot read a handler of the 1.6 interface: such a handler stays on.
    saved_ = H5Eauto_is_v2(H5E_DEFAULT, &is_v2) >= 0 && is_v2 && H5Eget_auto2(H5E_DEFAULT, &handler_, &data_) >= 0;
    if (saved_) H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
  ~Quiet() {
    if (saved_) H5Eset_auto2(H5E_DEFAULT, handler_, data_);
  }

 private:
  H5E_auto2_t handler_ = nullptr;
  void* data_ = nullptr;
  bool saved_;
};

/// IEEE half precision, for which HDF5 1.10 has no constant.
Hdf5Id float16_type() {
  Hdf5Id type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  H5Tset_fields(type, 15, 10, 5, 0, 10);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, 15);
  return type;
}

/// The type in files. The attribute dtype = "bfloat16" marks the uint16 datasets that hold bfloat16.
Hdf5Id file_type(DType d) {
  switch (d) {
    case DType::f16: return float16_type();
    case DType::bf16: return {H5Tcopy(H5T_STD_U16LE), H5Tclose};
    case DType::f32: return {H5Tcopy(H5T_IEEE_F32LE), H5Tclose};
    case DType::f64: return {H5Tcopy(H5T_IEEE_F64LE), H5Tclose};
    case DType::i32: return {H5Tcopy(H5T_STD_I32LE), H5Tclose};
  }
  return {H5I_INVALID_HID, H5Tclose};
}

/// Calls f on each part of "a/b/c", until one call returns false.
template <class F>
void for_each_part(const std::string& path, F&& f) {
  for (std::size_t from = 0; from < path.size();) {
    const std::size_t to = std::min(path.find('/', from), path.size());
    if (!f(path.substr(from, to - from))) return;
    from = to + 1;
  }
}

}  // namespace

Hdf5Id::~Hdf5Id() {
  if (!valid()) return;
  const Quiet quiet;
  close_(id_);
}

Result<Hdf5Writer> Hdf5Writer::create(const std::string& path) {
  CF_TRY(check_writable(path));
  const Quiet quiet;
  Hdf5Id access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose), creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  constexpr std::size_t increment = std::size_t{1} << 20;
  H5Pset_fapl_core(access, increment, false);
  H5Pset_libver_bounds(access, H5F_LIBVER_EARLIEST, H5F_LIBVER_V110);
  H5Pset_obj_track_times(creation, false);
  // Each file in memory needs a name of its own, the key in libhdf5's list of open files.
  static std::atomic<int> count{0};
  const std::string name = "golden file in memory " + std::to_string(count++);
  Hdf5Id file(H5Fcreate(name.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose);
  if (!file.valid()) return Status::error(Code::out_of_memory, path + ": HDF5 cannot make a file in memory");
  return Hdf5Writer(path, std::move(file));
}

Hdf5Id Hdf5Writer::open_group(const std::string& group) {
  Hdf5Id at(H5Gopen2(file_, "/", H5P_DEFAULT), H5Gclose);
  for_each_part(group, [&](const std::string& name) {
    const Hdf5Id creation(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
    H5Pset_obj_track_times(creation, false);
    const bool there = H5Lexists(at, name.c_str(), H5P_DEFAULT) > 0;
    at = Hdf5Id(there ? H5Gopen2(at, name.c_str(), H5P_DEFAULT)
                      : H5Gcreate2(at, name.c_str(), H5P_DEFAULT, creation, H5P_DEFAULT),
                H5Gclose);
    return at.valid();
  });
  return at;
}

Status Hdf5Writer::attribute(const std::string& object, hid_t owner, const std::string& name, hid_t type,
                             const void* value) {
  const Hdf5Id space(H5Screate(H5S_SCALAR), H5Sclose);
  if (H5Aexists(owner, name.c_str()) > 0) H5Adelete(owner, name.c_str());
  const Hdf5Id id(H5Acreate2(owner, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!id.valid() || H5Awrite(id, type, value) < 0)
    return Status::error(Code::io_error, path_ + ": /" + object + ": attribute '" + name + "' cannot be written");
  return {};
}

Status Hdf5Writer::text(const std::string& object, hid_t owner, const std::string& name, const std::string& value) {
  const auto refuse = [&](const std::string& what) {
    return Status::error(Code::invalid_argument, path_ + ": /" + object + ": attribute '" + name + "': " + what);
  };
  if (value.size() > kMaxTextBytes)
    return refuse("expected at most " + std::to_string(kMaxTextBytes) + " bytes, got " + std::to_string(value.size()));
  if (const std::size_t zero = value.find('\0'); zero != value.npos)
    return refuse("expected text, got a zero byte at " + std::to_string(zero));
  const Hdf5Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type, std::max<std::size_t>(value.size(), 1));  // HDF5 has no empty type
  H5Tset_strpad(type, H5T_STR_NULLPAD);
  H5Tset_cset(type, H5T_CSET_UTF8);
  return attribute(object, owner, name, type, value.c_str());
}

Status Hdf5Writer::text(const std::string& object, const std::string& name, const std::string& value) {
  const Quiet quiet;
  const Hdf5Id dataset(H5Dopen2(file_, object.c_str(), H5P_DEFAULT), H5Dclose);
  return dataset.valid() ? text(object, dataset, name, value) : text(object, open_group(object), name, value);
}

Status Hdf5Writer::integer(const std::string& group, const std::string& name, std::int64_t value) {
  const Quiet quiet;
  return attribute(group, open_group(group), name, H5T_STD_I64LE, &value);
}

Status Hdf5Writer::unsigned_integer(const std::string& group, const std::string& name, std::uint64_t value) {
  const Quiet quiet;
  return attribute(group, open_group(group), name, H5T_STD_U64LE, &value);
}

Status Hdf5Writer::write(const std::string& dataset, const Tensor& tensor) {
  const Quiet quiet;
  const std::size_t slash = dataset.rfind('/');
  const std::string group = slash == std::string::npos ? "" : dataset.substr(0, slash),
                    name = dataset.substr(slash + 1);
  const std::vector<hsize_t> dims(tensor.shape().begin(), tensor.shape().end());
  const Hdf5Id owner = open_group(group), type = file_type(tensor.dtype());
  if (H5Lexists(owner, name.c_str(), H5P_DEFAULT) > 0)
    return Status::error(Code::invalid_argument, path_ + ": /" + dataset + ": is there already");
  const Hdf5Id space(H5Screate_simple(int(dims.size()), dims.data(), nullptr), H5Sclose);
  const Hdf5Id creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(creation, false);
  H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
  const Hdf5Id id(H5Dcreate2(owner, name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose);
  if (!id.valid() || (tensor.size() > 0 && H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.data()) < 0))
    return Status::error(Code::io_error, path_ + ": /" + dataset + ": cannot be written");
  return tensor.dtype() == DType::bf16 ? text(dataset, id, "dtype", std::string(to_string(DType::bf16))) : Status();
}

Status Hdf5Writer::commit() {
  const Quiet quiet;
  const ssize_t bytes = H5Fflush(file_, H5F_SCOPE_GLOBAL) < 0 ? -1 : H5Fget_file_image(file_, nullptr, 0);
  std::string image(bytes > 0 ? std::size_t(bytes) : 0, '\0');
  if (bytes <= 0 || H5Fget_file_image(file_, image.data(), image.size()) != bytes)
    return Status::error(Code::io_error, path_ + ": HDF5 cannot finish the file");
  const auto seal = seal_of(image);
  return write_file_atomically(path_, {std::string_view(seal.data(), seal.size()), image});
}

}  // namespace cf::golden
