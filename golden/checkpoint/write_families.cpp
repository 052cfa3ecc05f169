// Writes families_json() to the file that is named: what the target families_json runs.
#include <cstdio>

#include "core/atomic_file.hpp"
#include "golden/checkpoint/families_json.hpp"

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: write_families FILE\n"), 2;
  const cf::Status written = cf::write_file_atomically(argv[1], cf::checkpoint::families_json());
  if (!written) std::fprintf(stderr, "%s\n", written.message().c_str());
  return written ? 0 : 2;
}
