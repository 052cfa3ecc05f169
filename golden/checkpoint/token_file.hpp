#pragma once
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace cf::checkpoint {

/// Token ids of a NumPy .npy file: of one sequence, or of several equally long ones.
struct TokenFile {
  Shape shape;                    // (tokens) or (sequences, tokens), neither of them 0
  std::vector<std::int32_t> ids;  // in C order; the first ones where that many were asked for
};

inline constexpr std::int64_t kAllIds = std::numeric_limits<std::int64_t>::max();

/// Reads the bytes of a .npy file (numpy.lib.format). It accepts versions 1.0, 2.0 and 3.0 of the format, the dtypes
/// '<i4', '<i8', '<u2' and '<u4', C order, and one or two dimensions. The ids take 4 bytes each, and only the first
/// `most` are read. Refuses, naming `source` and what was expected: other bytes at the beginning; another version,
/// dtype, order or rank; a header that is not a Python dict of descr, fortran_order and shape, each once and as a plain
/// literal; a file without ids; a file shorter ("truncated") or longer than its header asks for; an id outside int32;
/// ids that the machine's free memory does not hold.
Result<TokenFile> parse_token_file(std::string_view bytes, const std::string& source, std::int64_t most = kAllIds);

/// Reads a .npy file. Refuses a file that is missing, not readable or a git-lfs pointer, and what parse_token_file
/// refuses.
Result<TokenFile> read_token_file(const std::string& path, std::int64_t most = kAllIds);

/// Writes ids as an int32 array, atomically. The file has the bytes that numpy.save writes.
/// Refuses, naming the path, a shape that TokenFile does not allow, a shape with another number of elements than `ids`,
/// and what write_file_atomically refuses.
Status write_token_file(const std::string& path, std::span<const std::int32_t> ids, const Shape& shape);

}  // namespace cf::checkpoint
