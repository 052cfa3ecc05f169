#include "core/fp8.hpp"

#include <string>

namespace cf {
namespace {

constexpr std::int64_t kWordBytes = 4;

std::int64_t code_words(const PackedWeight& w) { return (w.out * w.in + kWordBytes - 1) / kWordBytes; }

std::int64_t words(const PackedWeight& w) {
  return code_words(w) + w.out * Fp8Weight{.out = w.out, .in = w.in, .group_size = w.format.group_size}.groups();
}

}  // namespace

PackedWeight fp8_outline(std::int64_t out, std::int64_t in, std::int64_t group_size) {
  PackedWeight w{.packer = kFp8Packer,
                 .format = {.bits = 8, .group_size = group_size, .is_fp8 = true},
                 .out = out,
                 .in = in,
                 .data = {},
                 .layout = {}};
  w.data.shape = {words(w)};
  return w;
}

OwnedFp8::OwnedFp8(std::int64_t out, std::int64_t in, std::int64_t group_size)
    : weight(fp8_outline(out, in, group_size)), storage(DType::i32, {weight.data.size()}) {
  weight.data.data = storage.as<std::int32_t>();
}

Fp8Weight OwnedFp8::view() const { return fp8_of(weight); }

bool is_fp8(const LinearWeight& weight) {
  const auto* const packed = std::get_if<PackedWeight>(&weight);
  return packed && packed->packer == kFp8Packer;
}

Status check_fp8(std::string_view op, const PackedWeight& w) {
  if (w.format.group_size < 1)
    return bad_argument(op, "fp8 group_size must be at least 1, got " + std::to_string(w.format.group_size));
  if (!w.data) return bad_argument(op, "the fp8 weight is null, expected " + std::to_string(words(w)) + " words");
  if (w.data.size() != words(w))
    return bad_argument(
        op, "the fp8 weight has " + std::to_string(w.data.size()) + " words, expected " + std::to_string(words(w)));
  return {};
}

Fp8Weight fp8_of(const PackedWeight& w) {
  const void* const scales = w.data.data + code_words(w);
  const void* const codes = w.data.data;
  return {.out = w.out,
          .in = w.in,
          .group_size = w.format.group_size,
          .codes = static_cast<const e4m3*>(codes),
          .scales = static_cast<const float*>(scales)};
}

}  // namespace cf
