#pragma once
// Private to the checkpoint library: the fields of a configuration in JSON.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "golden/checkpoint/json.hpp"

namespace cf::checkpoint {

// Reads a value as the type of a field. Returns false for a value of another type.
inline bool read(const Json& value, bool& out) {
  if (value.is_boolean()) out = value.get<bool>();
  return value.is_boolean();
}
inline bool read(const Json& value, std::int64_t& out) {
  constexpr auto most = std::uint64_t(std::numeric_limits<std::int64_t>::max());
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > most)) return false;
  out = value.get<std::int64_t>();
  return true;
}
inline bool read(const Json& value, double& out) {
  if (value.is_number()) out = value.get<double>();
  return value.is_number();
}
inline bool read(const Json& value, std::string& out) {
  if (value.is_string()) out = value.get<std::string>();
  return value.is_string();
}

inline const char* kind(bool) { return "true or false"; }
inline const char* kind(std::int64_t) { return "a 64-bit integer"; }
inline const char* kind(double) { return "a number"; }
inline const char* kind(const std::string&) { return "a string"; }

/// Whether a value turns a feature on: it is not null, false or empty.
inline bool asks(const Json& value) {
  return !(value.is_null() || (value.is_boolean() && !value.get<bool>()) || (value.is_structured() && value.empty()));
}

/// The fields of a config. status() holds the first fault; after a fault the values that were read have no meaning.
class Fields {
 public:
  Fields(const Json& object, std::string source) : object_(object), source_(std::move(source)) {}

  const Status& status() const { return status_; }
  void refuse(const std::string& name, const std::string& what) {
    if (status_) status_ = Status::error(Code::invalid_file, source_ + ": " + quote(name) + " " + what);
  }

  template <class T>
  T required(const std::string& name) {
    if (!find(name)) refuse(name, std::string("is missing, expected ") + kind(T{}));
    return get(name, T{});
  }
  template <class T>
  T get(const std::string& name, T otherwise) {
    return get_any({name}, std::move(otherwise));
  }
  /// A field with several names over time. Where a file holds more than one of them, they must agree. "a.b" is the
  /// member b of the object a.
  template <class T>
  T get_any(std::initializer_list<std::string> names, T otherwise) {
    std::string first;
    T value = std::move(otherwise);
    for (const std::string& name : names) {
      const Json* given = find(name);
      if (!given) continue;
      T v{};
      if (!read(*given, v))
        refuse(name, "is " + shown(*given) + ", expected " + kind(T{}));
      else if (!first.empty() && v != value)
        refuse(name, "is " + shown(*given) + ", expected " + shown(value) + " as " + quote(first) + " is");
      first = name;
      value = std::move(v);
    }
    return value;
  }

 private:
  const Json* find(const std::string& name) {
    const Json* at = &object_;
    for (std::size_t from = 0; from <= name.size();) {
      const std::size_t dot = std::min(name.find('.', from), name.size());
      if (!at->is_object()) {
        refuse(name.substr(0, from - 1), "is " + shown(*at) + ", expected an object");
        return nullptr;
      }
      const auto member = at->find(name.substr(from, dot - from));
      if (member == at->end()) return nullptr;
      at = &*member;
      from = dot + 1;
    }
    return at;
  }

  const Json& object_;
  std::string source_;
  Status status_;
};

}  // namespace cf::checkpoint
