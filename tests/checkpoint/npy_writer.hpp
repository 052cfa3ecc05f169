#pragma once
#include <string>

namespace cf::test {

/// A .npy file of any header and any bytes behind it.
inline std::string npy_with_header(int version, const std::string& header, const std::string& data) {
  std::string bytes = "\x93NUMPY";
  bytes += {char(version), '\0'};
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) bytes += char(header.size() >> (8 * i));
  return bytes + header + data;
}

/// The same with numpy's header of a dtype and a shape, which are put in as they are.
inline std::string npy(int version, const std::string& descr, const std::string& shape, const std::string& data) {
  return npy_with_header(version, "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }  \n",
                         data);
}

}  // namespace cf::test
