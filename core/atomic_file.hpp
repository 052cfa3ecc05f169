#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/status.hpp"

namespace cf {

/// Writes the parts, one after the other, as the whole content of a file: a reader finds the old file, the new file or
/// none. The bytes go to a file of the same directory that has no name until it is whole and synchronised, so that
/// neither a failure nor a signal leaves anything. Where the file system has no such files it has a name, ".cf-*.tmp",
/// from the beginning: a failure removes it, a signal may leave it. A file that is replaced keeps its mode. Where
/// `path` is a symbolic link, the link's target is replaced or made. A device or a pipe is written in place.
/// Refuses, with the path and the system's reason: a directory that is missing or not writable, a full disk.
Status write_file_atomically(const std::string& path, std::initializer_list<std::string_view> parts);
Status write_file_atomically(const std::string& path, std::string_view text);

/// Refuses a path that write_file_atomically would refuse before it writes. A program that computes for long calls this
/// first.
Status check_writable(const std::string& path);

}  // namespace cf
