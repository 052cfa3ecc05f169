#include "core/status.hpp"

namespace cf {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid argument";
    case Code::not_found: return "not found";
    case Code::invalid_file: return "invalid file";
    case Code::io_error: return "input/output error";
    case Code::unimplemented: return "unimplemented";
    case Code::out_of_memory: return "out of memory";
    case Code::device_error: return "device error";
  }
  return "?";
}

}  // namespace cf
