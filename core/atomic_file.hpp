#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf {

/// Writes the parts, one after the other, as the whole content of a file. The bytes go to a temporary file in the same
/// directory, which is synchronised and then renamed to `path`: a reader finds the old file, the new file or none. On a
/// failure the temporary file is removed. Where `path` is a symbolic link, the link's target is replaced. A device or a
/// pipe is written in place.
/// Refuses, with the path and the system's reason: a directory that is missing or not writable, a full disk.
Status write_file_atomically(const std::string& path, std::initializer_list<std::string_view> parts);
Status write_file_atomically(const std::string& path, std::string_view text);

/// Refuses a path that write_file_atomically would refuse before it writes. A program that computes for long calls this
/// first.
Status check_writable(const std::string& path);

}  // namespace cf
