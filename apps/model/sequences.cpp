#include "apps/model/sequences.hpp"

#include <fmt/format.h>

#include <utility>

#include "golden/checkpoint/token_file.hpp"

namespace cf::apps {
namespace {

Status bad_file(const std::string& path, std::string what) {
  return Status::error(Code::invalid_file, path + ": " + std::move(what));
}

}  // namespace

Result<Sequences> Sequences::open(const std::string& path, std::optional<std::int64_t> row, const std::string& type) {
  Sequences s;
  s.path_ = path;
  std::int64_t ids = 0;
  if (path.ends_with(".npy")) {
    CF_TRY_ASSIGN(checkpoint::TokenFile file, checkpoint::read_token_file(path));
    ids = std::int64_t(file.ids.size());
    if (file.shape.size() == 1 && !row)
      return bad_file(path, "expected --row, the ids of a sequence, for ids in a row");
    s.length_ = row.value_or(file.shape.back());
    s.ids_ = std::move(file.ids);
  } else {
    if (!row) return bad_file(path, "expected --row, the ids of a sequence, for a file that is no .npy file");
    s.id_bytes_ = type == "uint16" ? 2 : 4;
    s.length_ = *row;
    s.file_.open(path, std::ios::binary | std::ios::ate);
    if (!s.file_) return Status::error(Code::io_error, path + ": cannot be read");
    const auto bytes = std::int64_t(s.file_.tellg());
    ids = bytes / std::int64_t(s.id_bytes_);
    if (bytes % std::int64_t(s.id_bytes_) != 0)
      return bad_file(path, fmt::format("expected ids of {} bytes, got {} bytes", s.id_bytes_, bytes));
  }
  if (ids == 0 || ids % s.length_ != 0)
    return bad_file(path, fmt::format("expected sequences of {} ids, got {} ids", s.length_, ids));
  s.count_ = ids / s.length_;
  return s;
}

Result<std::vector<std::int32_t>> Sequences::read(std::int64_t number, std::int64_t ids) {
  const auto first = std::size_t(number * length_), count = std::size_t(ids);
  if (!ids_.empty()) {
    const auto begin = ids_.begin() + std::ptrdiff_t(first);
    return std::vector<std::int32_t>(begin, begin + std::ptrdiff_t(count));
  }
  std::vector<unsigned char> bytes(count * id_bytes_);
  file_.seekg(std::streamoff(first * id_bytes_));
  file_.read(reinterpret_cast<char*>(bytes.data()), std::streamsize(bytes.size()));
  if (!file_) return Status::error(Code::io_error, path_ + ": cannot be read");
  std::vector<std::int32_t> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t id = 0;
    for (std::size_t byte = id_bytes_; byte-- > 0;) id = id << 8 | bytes[i * id_bytes_ + byte];  // little-endian
    made[i] = std::int32_t(id);
  }
  return made;
}

Status continue_sequences(Memorizer& memorizer, Sequences& sequences, std::int64_t begin, std::int64_t end,
                          std::int64_t ids, std::int64_t slots,
                          const std::function<Status(std::span<const Memorized>)>& put) {
  while (begin < end || memorizer.running() > 0) {
    // As many wait as there are slots, so that one is there wherever a sequence ends.
    for (; begin < end && memorizer.running() < 2 * slots; ++begin) {
      CF_TRY_ASSIGN(const std::vector<std::int32_t> sequence, sequences.read(begin, ids));
      CF_TRY(memorizer.add(begin, sequence));
    }
    CF_TRY_ASSIGN(const std::vector<Memorized> ended, memorizer.step());
    CF_TRY(put(ended));
  }
  return {};
}

}  // namespace cf::apps
