#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf::golden {

/// Writes the parts, one behind the other, as the file's whole content: under a temporary name in the same directory
/// that is renamed when every byte is on its way to the disk, so that a reader finds the old file, the new one or none.
/// On any failure the temporary is removed. Through a symbolic link its target is replaced; a device or a pipe is
/// written in place.
/// Refuses, naming the file and the system's reason: a directory that is missing or not writable, a full disk.
Status write_file_atomically(const std::string& path, std::initializer_list<std::string_view> parts);
Status write_file_atomically(const std::string& path, std::string_view text);

/// Whether write_file_atomically could begin: for programs that work long before they write.
Status check_writable(const std::string& path);

}  // namespace cf::golden
