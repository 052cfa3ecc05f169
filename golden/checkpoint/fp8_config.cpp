#include "golden/checkpoint/fp8_config.hpp"

#include "golden/checkpoint/json_fields.hpp"

namespace cf::checkpoint {
namespace {

constexpr const char* kBlocks = "[128, 128]";
constexpr const char* kUnsupported = "nothing: it is not supported";

/// Sizes in a message: an array's elements count.
std::string shown_sizes(const Json& value) {
  if (!value.is_array() || value.size() > 4) return shown(value);
  std::string text;
  for (const Json& size : value) text += (text.empty() ? "" : ", ") + shown(size);
  return "[" + text + "]";
}

bool is_block(const Json& sizes) { return sizes == Json::array({kFp8Block, kFp8Block}) || sizes == "128x128"; }

/// Refuses a field that asks for something, unless `allowed` says that its value asks for nothing.
void refuse_asked(Fields& fields, const Json& object, const std::string& path, const char* name, bool allowed = false) {
  const auto it = object.find(name);
  if (it != object.end() && asks(*it) && !allowed)
    fields.refuse(path + name, "is " + shown(*it) + ", expected " + kUnsupported);
}

Fp8Config read_blocks(const Json& document, Fields& fields) {
  const auto expect = [&](const char* name, const std::string& least, std::initializer_list<const char*> known) {
    const std::string got = fields.get(name, least);
    std::string expected;
    for (const char* k : known) {
      if (got == k) return;
      expected += (expected.empty() ? "" : " or ") + quote(k);
    }
    fields.refuse(name, "is " + quote(got) + ", expected " + expected);
  };
  expect("fmt", "e4m3", {"e4m3", "float8_e4m3fn"});
  expect("activation_scheme", "dynamic", {"dynamic"});
  if (document.contains("scale_fmt") && !document["scale_fmt"].is_null())
    expect("scale_fmt", "float", {"float", "ue8m0"});
  const auto sizes = document.find("weight_block_size");
  if (sizes == document.end())
    fields.refuse("weight_block_size", std::string("is missing, expected ") + kBlocks);
  else if (!is_block(*sizes))
    fields.refuse("weight_block_size", "is " + shown_sizes(*sizes) + ", expected " + kBlocks);
  return {};
}

/// Refuses weights or activations that are no symmetric float of 8 bits. `path` ends in a dot.
void check_float8(Fields& fields, const std::string& path) {
  const auto type = fields.get(path + "type", std::string("int"));
  const auto bits = fields.get<std::int64_t>(path + "num_bits", 8);
  if (type != "float") fields.refuse(path + "type", "is " + quote(type) + ", expected 'float'");
  if (bits != 8) fields.refuse(path + "num_bits", "is " + std::to_string(bits) + ", expected 8");
  if (!fields.get(path + "symmetric", true)) fields.refuse(path + "symmetric", "is false, expected true");
}

Fp8Config read_compressed(const Json& document, Fields& fields) {
  Fp8Config c{.scales = Fp8Scales::channel, .scale_name = "weight_scale"};
  const auto format = fields.get("format", std::string("float-quantized"));
  if (format != "float-quantized" && format != "naive-quantized")
    fields.refuse("format", "is " + quote(format) + ", expected 'float-quantized' or 'naive-quantized'");
  refuse_asked(fields, document, "", "kv_cache_scheme");
  refuse_asked(fields, document, "", "transform_config");
  const auto sparsity = document.find("sparsity_config");
  const bool is_dense =
      sparsity != document.end() && sparsity->is_object() && sparsity->value("format", Json()) == "dense";
  refuse_asked(fields, document, "", "sparsity_config", is_dense);
  const auto groups = document.find("config_groups");
  if (groups == document.end() || !groups->is_object() || groups->size() != 1 || !groups->begin()->is_object()) {
    fields.refuse("config_groups", (groups == document.end() ? "is missing"
                                    : groups->is_object()    ? "has " + std::to_string(groups->size()) + " groups"
                                                             : "is " + shown(*groups)) +
                                       std::string(", expected an object of one group"));
    return c;
  }
  const Json& group = *groups->begin();
  const std::string path = "config_groups." + groups->begin().key() + ".";
  refuse_asked(fields, group, path, "output_activations");
  const auto format_of_group = group.find("format");
  if (format_of_group != group.end() && !format_of_group->is_null() && *format_of_group != "float-quantized" &&
      *format_of_group != "naive-quantized")
    fields.refuse(path + "format", "is " + shown(*format_of_group) + ", expected 'float-quantized'");

  const auto weights = group.find("weights");
  if (weights == group.end() || !weights->is_object()) {
    fields.refuse(path + "weights",
                  "is " + (weights == group.end() ? "missing" : shown(*weights)) + ", expected an object");
    return c;
  }
  const std::string inside = path + "weights.";
  check_float8(fields, inside);
  refuse_asked(fields, *weights, inside, "dynamic");
  refuse_asked(fields, *weights, inside, "actorder");
  const Json strategy = weights->value("strategy", Json());
  if (strategy == "tensor") {
    c.scales = Fp8Scales::tensor;
  } else if (strategy == "block") {
    c.scales = Fp8Scales::block;
    const Json sizes = weights->value("block_structure", Json());
    if (!is_block(sizes))
      fields.refuse(inside + "block_structure", "is " + shown_sizes(sizes) + ", expected " + kBlocks);
  } else if (strategy != "channel") {
    fields.refuse(inside + "strategy", "is " + shown(strategy) + ", expected 'tensor', 'channel' or 'block'");
  }

  const auto activations = group.find("input_activations");
  if (activations == group.end() || activations->is_null()) return c;
  if (!activations->is_object()) {
    fields.refuse(path + "input_activations", "is " + shown(*activations) + ", expected an object or null");
    return c;
  }
  check_float8(fields, path + "input_activations.");
  if (const Json dynamic = activations->value("dynamic", Json(false)); dynamic != true)
    fields.refuse(path + "input_activations.dynamic",
                  "is " + shown(dynamic) + ", expected true: static scales of activations are not supported");
  return c;
}

std::string method_of(const Json& document) {
  const auto method = document.find("quant_method");
  return method != document.end() && method->is_string() ? method->get<std::string>() : "";
}

}  // namespace

bool is_fp8_config(std::string_view text) {
  const Result<Json> document = parse_json_object(text, "");
  if (!document) return false;
  const std::string method = method_of(*document);
  return method == "fp8" || method == "fbgemm_fp8" || method == "compressed-tensors";
}

Result<Fp8Config> parse_fp8_config(std::string_view text, const std::string& source) {
  CF_TRY_ASSIGN(const Json document, parse_json_object(text, source));
  Fields fields(document, source);
  const std::string method = fields.required<std::string>("quant_method");
  Fp8Config c;
  if (method == "fp8")
    c = read_blocks(document, fields);
  else if (method == "fbgemm_fp8")
    c = {.scales = Fp8Scales::channel, .scale_name = "weight_scale"};
  else if (method == "compressed-tensors")
    c = read_compressed(document, fields);
  else
    fields.refuse("quant_method", "is " + quote(method) + ", expected 'fp8', 'fbgemm_fp8' or 'compressed-tensors'");
  CF_TRY(fields.status());
  return c;
}

std::string describe_fp8(const Fp8Config& config) {
  const std::string name = "fp8 (e4m3), ";
  switch (config.scales) {
    case Fp8Scales::tensor: return name + "a scale a matrix";
    case Fp8Scales::channel: return name + "a scale a channel";
    case Fp8Scales::block: return name + "a scale for a block of 128 x 128";
  }
  return name;
}

}  // namespace cf::checkpoint
