#include "golden/hdf5_file.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>

#include "core/procedural.hpp"
#include "golden/atomic_file.hpp"
#include "golden/mapped_file.hpp"

static_assert(std::endian::native == std::endian::little, "golden files are read and written in place, little-endian");

namespace cf::golden {
namespace {

constexpr std::size_t kSealBytes = 512;
constexpr std::string_view kMagic = "cfgolden";
// Attributes are settings and configs, groups hold the tensors of one layer.
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 24;
constexpr hsize_t kMaxLinks = 1 << 16;
// Deflate, the tightest of HDF5's usual filters, packs 1032 bytes into one at most.
constexpr std::uint64_t kMaxCompression = 1032;

/// Turns HDF5's error printing off while it lives.
class Quiet {
 public:
  Quiet() {
    unsigned is_v2 = 0;
    // A handler of the 1.6 interface cannot be read through this one; it stays.
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

Hdf5Id float16_type() {
  Hdf5Id type(H5Tcopy(H5T_IEEE_F32LE), H5Tclose);
  H5Tset_fields(type, 15, 10, 5, 0, 10);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, 15);
  return type;
}

/// The type in files; bfloat16 is told from other 16-bit integers by an attribute.
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

Hdf5Id text_type() {
  Hdf5Id type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type, H5T_VARIABLE);
  H5Tset_cset(type, H5T_CSET_UTF8);
  return type;
}

std::array<char, kSealBytes> seal_of(const void* image, std::uint64_t bytes) {
  std::array<char, kSealBytes> seal{};
  const std::uint64_t sum = checksum(image, bytes);
  std::memcpy(seal.data(), kMagic.data(), kMagic.size());
  std::memcpy(seal.data() + 8, &bytes, 8);
  std::memcpy(seal.data() + 16, &sum, 8);
  return seal;
}

/// Refuses what was not written whole by a golden writer, before HDF5 parses it: the library trusts its files more than
/// it should.
Status check_seal(const std::string& path) {
  const Result<MappedFile> file = map_file(path);
  if (!file) return file.status();
  const char* data = file->text().data();
  const std::uint64_t bytes = file->size_bytes;
  const auto refuse = [&](const std::string& what) { return Status::error(Code::invalid_file, path + ": " + what); };
  if (file->text().substr(0, kMagic.size()) != kMagic)
    return refuse("no golden file: expected '" + std::string(kMagic) + "' at its start");
  if (bytes < kSealBytes)
    return refuse("truncated: expected at least " + std::to_string(kSealBytes) + " bytes, got " +
                  std::to_string(bytes));
  std::uint64_t length = 0;
  std::memcpy(&length, data + 8, 8);
  if (length != bytes - kSealBytes)
    return refuse("truncated or extended: expected " + std::to_string(length) + " bytes behind the seal, got " +
                  std::to_string(bytes - kSealBytes));
  if (std::memcmp(data, seal_of(data + kSealBytes, length).data(), kSealBytes) != 0)
    return refuse("damaged: its bytes do not match the checksum in its seal");
  return {};
}

/// Splits "a/b/c" and calls f on each part, until one returns false.
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

Result<Hdf5Reader> Hdf5Reader::open(const std::string& path) {
  CF_TRY(check_seal(path));
  const Quiet quiet;
  Hdf5Id access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
#if H5_VERSION_GE(1, 10, 7)
  // A finished file is never written again; locks only fail on file systems that lack them.
  H5Pset_file_locking(access, false, true);
#endif
  Hdf5Id file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), H5Fclose);
  if (!file.valid()) return Status::error(Code::invalid_file, path + ": HDF5 cannot open it");
  return Hdf5Reader(path, std::move(file));
}

Status Hdf5Reader::refuse(Code code, std::string_view object, std::string_view what, SourceLocation at) const {
  return Status::error(code, path_ + ": /" + std::string(object) + ": " + std::string(what), at);
}

Result<Hdf5Id> Hdf5Reader::open_object(const std::string& object) const {
  Hdf5Id at(H5Oopen(file_, "/", H5P_DEFAULT), H5Oclose);
  Status status;
  for_each_part(object, [&](const std::string& name) {
    H5L_info_t link{};
    if (H5Iget_type(at) != H5I_GROUP || H5Lexists(at, name.c_str(), H5P_DEFAULT) <= 0)
      status = refuse(Code::not_found, object, "missing");
    else if (H5Lget_info(at, name.c_str(), &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_HARD)
      // Soft and external links could lead into loops and other files.
      status = refuse(Code::invalid_file, object, "a link, expected the object itself");
    else if (at = Hdf5Id(H5Oopen(at, name.c_str(), H5P_DEFAULT), H5Oclose); !at.valid())
      status = refuse(Code::invalid_file, object, "HDF5 cannot open it");
    return bool(status);
  });
  if (!status) return status;
  if (!at.valid()) return refuse(Code::invalid_file, object, "HDF5 cannot open it");
  return at;
}

bool Hdf5Reader::has(const std::string& object) const {
  const Quiet quiet;
  return open_object(object).status().code() != Code::not_found;
}

Result<std::vector<std::string>> Hdf5Reader::names(const std::string& group) const {
  const Quiet quiet;
  Result<Hdf5Id> id = open_object(group);
  if (!id) return id.status();
  H5G_info_t info{};
  if (H5Iget_type(*id) != H5I_GROUP || H5Gget_info(*id, &info) < 0)
    return refuse(Code::invalid_file, group, "expected a group");
  if (info.nlinks > kMaxLinks)
    return refuse(Code::invalid_file, group,
                  "expected at most " + std::to_string(kMaxLinks) + " members, got " + std::to_string(info.nlinks));
  std::vector<std::string> names;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    char name[256];
    const ssize_t length = H5Lget_name_by_idx(*id, ".", H5_INDEX_NAME, H5_ITER_INC, i, name, sizeof name, H5P_DEFAULT);
    if (length <= 0 || length >= ssize_t(sizeof name))
      return refuse(Code::invalid_file, group, "expected names of 1 to 255 bytes");
    names.emplace_back(name, std::size_t(length));
  }
  return names;
}

struct Hdf5Reader::Attribute {
  Hdf5Id id, type;
  std::string name;  // of the object and the attribute, for messages
};

Result<Hdf5Reader::Attribute> Hdf5Reader::open_attribute(const std::string& object, const std::string& attribute,
                                                         H5T_class_t kind) const {
  Result<Hdf5Id> owner = open_object(object);
  if (!owner) return owner.status();
  std::string name = (object.empty() ? "" : object + " ") + "attribute '" + attribute + "'";
  if (H5Aexists(*owner, attribute.c_str()) <= 0) return refuse(Code::not_found, name, "missing");
  Hdf5Id id(H5Aopen(*owner, attribute.c_str(), H5P_DEFAULT), H5Aclose);
  Hdf5Id type(H5Aget_type(id), H5Tclose), space(H5Aget_space(id), H5Sclose);
  const char* expected = kind == H5T_STRING ? "one string" : "one integer";
  if (H5Tget_class(type) != kind || H5Sget_simple_extent_npoints(space) != 1)
    return refuse(Code::invalid_file, name, std::string("expected ") + expected);
  return Attribute{std::move(id), std::move(type), std::move(name)};
}

Result<std::string> Hdf5Reader::text(const std::string& object, const std::string& attribute) const {
  const Quiet quiet;
  Result<Attribute> a = open_attribute(object, attribute, H5T_STRING);
  if (!a) return a.status();
  const Status unreadable = refuse(Code::invalid_file, a->name, "HDF5 cannot read it");
  if (H5Tis_variable_str(a->type) > 0) {
    char* value = nullptr;
    if (H5Aread(a->id, a->type, &value) < 0) return unreadable;
    std::string text = value ? value : "";
    H5free_memory(value);
    return text;
  }
  const std::size_t bytes = H5Tget_size(a->type);
  if (bytes > kMaxTextBytes) return unreadable;
  std::string text(bytes, '\0');
  if (H5Aread(a->id, a->type, text.data()) < 0) return unreadable;
  if (const std::size_t end = text.find('\0'); end != std::string::npos) text.resize(end);
  if (H5Tget_strpad(a->type) == H5T_STR_SPACEPAD) text.resize(text.find_last_not_of(' ') + 1);
  return text;
}

Result<std::pair<std::uint64_t, bool>> Hdf5Reader::integer_bits(const std::string& object,
                                                                const std::string& attribute) const {
  Result<Attribute> a = open_attribute(object, attribute, H5T_INTEGER);
  if (!a) return a.status();
  const bool is_signed = H5Tget_sign(a->type) == H5T_SGN_2;
  std::uint64_t bits = 0;
  // Into 64 bits of the same signedness, so that HDF5 has nothing to clip.
  if (H5Tget_size(a->type) > 8 || H5Aread(a->id, is_signed ? H5T_NATIVE_INT64 : H5T_NATIVE_UINT64, &bits) < 0)
    return refuse(Code::invalid_file, a->name, "expected an integer of at most 64 bits");
  return std::pair{bits, is_signed && std::int64_t(bits) < 0};
}

Result<std::int64_t> Hdf5Reader::integer(const std::string& object, const std::string& attribute) const {
  const Quiet quiet;
  const auto value = integer_bits(object, attribute);
  if (!value) return value.status();
  if (!value->second && value->first > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
    return refuse(Code::invalid_file, "attribute '" + attribute + "'",
                  "expected a signed 64-bit integer, got " + std::to_string(value->first));
  return std::int64_t(value->first);
}

Result<std::uint64_t> Hdf5Reader::unsigned_integer(const std::string& object, const std::string& attribute) const {
  const Quiet quiet;
  const auto value = integer_bits(object, attribute);
  if (!value) return value.status();
  if (value->second)
    return refuse(Code::invalid_file, "attribute '" + attribute + "'",
                  "expected an unsigned integer, got " + std::to_string(std::int64_t(value->first)));
  return value->first;
}

Result<Hdf5Reader::Info> Hdf5Reader::info(const std::string& dataset) const {
  const Quiet quiet;
  Result<Hdf5Id> id = open_object(dataset);
  if (!id) return id.status();
  return info(dataset, *id);
}

Result<Hdf5Reader::Info> Hdf5Reader::info(const std::string& name, hid_t dataset) const {
  const auto invalid = [&](std::string_view what) { return refuse(Code::invalid_file, name, what); };
  if (H5Iget_type(dataset) != H5I_DATASET) return invalid("expected a dataset");

  Info info;
  const Hdf5Id type(H5Dget_type(dataset), H5Tclose);
  bool known = false;
  for (DType d : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
    if (H5Tequal(type, file_type(d)) > 0) {
      info.dtype = d;
      known = true;
    }
  if (known && info.dtype == DType::bf16) {
    const Result<std::string> dtype = text(name, "dtype");
    known = dtype && *dtype == to_string(DType::bf16);
  }
  if (!known)
    return invalid("expected little-endian float16, float32, float64, int32, or uint16 with dtype = \"bfloat16\"");

  const Hdf5Id space(H5Dget_space(dataset), H5Sclose);
  hsize_t dims[H5S_MAX_RANK];
  const int rank = H5Sget_simple_extent_type(space) == H5S_NULL ? -1 : H5Sget_simple_extent_dims(space, dims, nullptr);
  if (rank < 0) return invalid("expected a shape");
  const Hdf5Id creation(H5Dget_create_plist(dataset), H5Pclose);
  const H5D_layout_t layout = H5Pget_layout(creation);
  if (layout < H5D_COMPACT || layout > H5D_CHUNKED || H5Pget_external_count(creation) != 0)
    return invalid("expected its data in this file");
  const std::uint64_t stored = H5Dget_storage_size(dataset);
  std::uint64_t bytes = size_bytes(info.dtype);
  for (int i = 0; i < rank; ++i) {
    if (dims[i] > std::uint64_t(std::numeric_limits<std::int64_t>::max()) ||
        __builtin_mul_overflow(bytes, std::uint64_t(dims[i]), &bytes))
      return invalid("its shape overflows 64 bits");
    info.shape.push_back(std::int64_t(dims[i]));
  }
  if (bytes / kMaxCompression > stored || (bytes > 0 && stored == 0))
    return invalid("its shape " + to_string(info.shape) + " needs " + std::to_string(bytes) + " bytes, got " +
                   std::to_string(stored) + " in the file");
  return info;
}

Result<Tensor> Hdf5Reader::read(const std::string& dataset) const {
  const Quiet quiet;
  Result<Hdf5Id> id = open_object(dataset);
  if (!id) return id.status();
  const Result<Info> what = info(dataset, *id);
  if (!what) return what.status();
  Tensor tensor(what->dtype, what->shape);
  // The file's own type in memory too: HDF5's conversion of float16 is a hundred times slower than a copy.
  if (tensor.size() > 0 && H5Dread(*id, file_type(what->dtype), H5S_ALL, H5S_ALL, H5P_DEFAULT, tensor.data()) < 0)
    return refuse(Code::invalid_file, dataset, "HDF5 cannot read it");
  return tensor;
}

Result<Hdf5Writer> Hdf5Writer::create(const std::string& path) {
  CF_TRY(check_writable(path));
  const Quiet quiet;
  Hdf5Id access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose), creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  constexpr std::size_t increment = std::size_t{1} << 20;
  H5Pset_fapl_core(access, increment, false);
  H5Pset_libver_bounds(access, H5F_LIBVER_EARLIEST, H5F_LIBVER_V110);
  H5Pset_obj_track_times(creation, false);
  // The name is only the key in HDF5's list of open files.
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

Status Hdf5Writer::attribute(const std::string& group, const std::string& name, hid_t type, const void* value) {
  const Hdf5Id owner = open_group(group), space(H5Screate(H5S_SCALAR), H5Sclose);
  if (H5Aexists(owner, name.c_str()) > 0) H5Adelete(owner, name.c_str());
  const Hdf5Id id(H5Acreate2(owner, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!id.valid() || H5Awrite(id, type, value) < 0)
    return Status::error(Code::io_error, path_ + ": /" + group + ": attribute '" + name + "' cannot be written");
  return {};
}

Status Hdf5Writer::text(const std::string& group, const std::string& name, const std::string& value) {
  const Quiet quiet;
  const char* characters = value.c_str();
  return attribute(group, name, text_type(), &characters);
}

Status Hdf5Writer::integer(const std::string& group, const std::string& name, std::int64_t value) {
  const Quiet quiet;
  return attribute(group, name, H5T_STD_I64LE, &value);
}

Status Hdf5Writer::unsigned_integer(const std::string& group, const std::string& name, std::uint64_t value) {
  const Quiet quiet;
  return attribute(group, name, H5T_STD_U64LE, &value);
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
  if (tensor.dtype() != DType::bf16) return {};
  const std::string dtype(to_string(DType::bf16));
  const char* characters = dtype.c_str();
  const Hdf5Id one(H5Screate(H5S_SCALAR), H5Sclose), string = text_type();
  const Hdf5Id mark(H5Acreate2(id, "dtype", string, one, H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!mark.valid() || H5Awrite(mark, string, &characters) < 0)
    return Status::error(Code::io_error, path_ + ": /" + dataset + ": attribute 'dtype' cannot be written");
  return {};
}

Status Hdf5Writer::commit() {
  const Quiet quiet;
  const ssize_t bytes = H5Fflush(file_, H5F_SCOPE_GLOBAL) < 0 ? -1 : H5Fget_file_image(file_, nullptr, 0);
  std::string image(bytes > 0 ? std::size_t(bytes) : 0, '\0');
  if (bytes <= 0 || H5Fget_file_image(file_, image.data(), image.size()) != bytes)
    return Status::error(Code::io_error, path_ + ": HDF5 cannot finish the file");
  const auto seal = seal_of(image.data(), image.size());
  return write_file_atomically(path_, {std::string_view(seal.data(), seal.size()), image});
}

}  // namespace cf::golden
