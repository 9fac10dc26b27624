#include "io/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

using nlohmann::json;

// Those of whole bytes: F4, F6_E2M3 and F6_E3M2 are not known.
constexpr std::pair<std::string_view, std::int64_t> kDTypes[] = {
    {"F64", 8},         {"I64", 8},         {"U64", 8}, {"C64", 8}, {"F32", 4},     {"I32", 4},     {"U32", 4},
    {"F16", 2},         {"BF16", 2},        {"I16", 2}, {"U16", 2}, {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}};

constexpr std::string_view kMetadata = "__metadata__";

template <typename... Args>
[[noreturn]] void fail(const std::string& path, fmt::format_string<Args...> format, Args&&... args) {
  throw InvalidArgument(path + ": " + fmt::format(format, std::forward<Args>(args)...));
}

// A whole number that fits int64; json holds larger ones as uint64 or floating point.
bool read_count(const json& value, std::int64_t& out) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return false;
  }
  out = value.get<std::int64_t>();
  return out >= 0;
}

// Stops at the first name that occurs twice in an object. (A callback of json::parse would find it too, but takes time
// quadratic in the number of tensors.)
class DuplicateFinder final : public nlohmann::json_sax<json> {
 public:
  std::string name;

  bool key(string_t& key) override {
    if (objects_.back().insert(key).second) return true;
    name = key;
    return false;
  }
  bool start_object(std::size_t) override {
    objects_.emplace_back();
    return true;
  }
  bool end_object() override {
    objects_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return false; }

 private:
  std::vector<std::set<std::string>> objects_;
};

// Parses, and rejects names that occur twice, which json would silently merge, and NUL, at which it would stop.
json parse_json(const std::string& path, std::string_view text) {
  const std::size_t nul = text.find('\0');
  if (nul != std::string_view::npos) fail(path, "the header is not valid JSON: it holds a NUL byte at {}", nul);
  json header;
  try {
    header = json::parse(text);
  } catch (const json::exception& error) {
    fail(path, "the header is not valid JSON: {}", error.what());
  }
  DuplicateFinder finder;
  if (!json::sax_parse(text, &finder)) fail(path, "the name '{}' occurs twice in the header", finder.name);
  return header;
}

Metadata parse_metadata(const std::string& path, const json& value) {
  if (!value.is_object()) fail(path, "{} must be an object of strings", kMetadata);
  Metadata metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) fail(path, "{} entry '{}' must be a string", kMetadata, key);
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

std::vector<std::int64_t> parse_shape(const std::string& path, const std::string& name, const json& value) {
  if (!value.is_array()) fail(path, "tensor '{}': shape must be a list of sizes", name);
  std::vector<std::int64_t> shape;
  for (const json& size : value) {
    std::int64_t count = 0;
    if (!read_count(size, count)) {
      fail(path, "tensor '{}': shape must hold sizes from 0 up, not {}", name,
           size.is_number() ? size.dump() : size.type_name());  // what is nested is as deep as a file likes
    }
    shape.push_back(count);
  }
  return shape;
}

// Bytes of a tensor; -1 where they do not fit int64.
std::int64_t checked_bytes(const std::vector<std::int64_t>& shape, std::int64_t element_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t bytes = element_bytes;
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return -1;
  }
  return bytes;
}

TensorInfo parse_tensor(const std::string& path, const std::string& name, const json& value, std::int64_t data_bytes) {
  if (!value.is_object()) fail(path, "tensor '{}' must be an object", name);
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) fail(path, "tensor '{}' has no {}", name, key);
  }
  TensorInfo tensor;
  tensor.name = name;
  if (!value["dtype"].is_string()) fail(path, "tensor '{}': dtype must be a string", name);
  tensor.dtype = value["dtype"].get<std::string>();
  const auto known =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& dtype) { return dtype.first == tensor.dtype; });
  if (known == std::end(kDTypes)) fail(path, "tensor '{}' has the unknown dtype '{}'", name, tensor.dtype);
  tensor.shape = parse_shape(path, name, value["shape"]);

  const json& offsets = value["data_offsets"];
  std::int64_t begin = 0, end = 0;
  if (!offsets.is_array() || offsets.size() != 2 || !read_count(offsets[0], begin) || !read_count(offsets[1], end)) {
    fail(path, "tensor '{}': data_offsets must be two offsets from 0 up", name);
  }
  if (begin > end) fail(path, "tensor '{}' begins at {}, after its end at {}", name, begin, end);
  if (end > data_bytes) fail(path, "tensor '{}' ends at {}, but the file holds only {} bytes of data", name, end, data_bytes);
  const std::int64_t bytes = checked_bytes(tensor.shape, known->second);
  if (bytes < 0) fail(path, "tensor '{}': the shape [{}] overflows", name, fmt::join(tensor.shape, ", "));
  if (bytes != end - begin) {
    fail(path, "tensor '{}': {} of shape [{}] takes {} bytes, but data_offsets give it {}", name, tensor.dtype,
         fmt::join(tensor.shape, ", "), bytes, end - begin);
  }
  tensor.offset = begin;
  tensor.bytes = bytes;
  return tensor;
}

// Together the tensors must be the data: no byte twice, none left over.
void check_layout(const std::string& path, const std::vector<TensorInfo>& tensors, std::int64_t data_bytes) {
  std::int64_t end = 0;
  const TensorInfo* before = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset < end) fail(path, "tensors '{}' and '{}' overlap at byte {}", before->name, tensor.name, tensor.offset);
    if (tensor.offset > end) fail(path, "bytes {} to {} of the data belong to no tensor", end, tensor.offset);
    end = tensor.offset + tensor.bytes;
    before = &tensor;
  }
  if (end < data_bytes) fail(path, "bytes {} to {} of the data belong to no tensor", end, data_bytes);
}

}  // namespace

std::int64_t bytes_of_dtype(std::string_view dtype) {
  for (const auto& [name, bytes] : kDTypes) {
    if (name == dtype) return bytes;
  }
  throw InvalidArgument(fmt::format("unknown safetensors dtype '{}'", dtype));
}

std::int64_t TensorInfo::elements() const { return bytes / bytes_of_dtype(dtype); }

Header parse_header(const std::string& path, std::string_view text, std::int64_t file_bytes) {
  if (text.empty() || text.front() != '{') fail(path, "the header does not begin with '{{': not a safetensors file");
  const json root = parse_json(path, text);
  const auto data_begin = static_cast<std::int64_t>(8 + text.size());
  Header header;
  for (const auto& [name, value] : root.items()) {
    if (name == kMetadata) {
      header.metadata = parse_metadata(path, value);
    } else {
      header.tensors.push_back(parse_tensor(path, name, value, file_bytes - data_begin));
    }
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  check_layout(path, header.tensors, file_bytes - data_begin);
  for (TensorInfo& tensor : header.tensors) tensor.offset += data_begin;
  return header;
}

std::string make_header(const std::string& path, std::span<const TensorSpec> specs, const Metadata& metadata,
                        std::vector<TensorInfo>& tensors) {
  tensors.clear();
  std::set<std::string_view> names;
  for (const TensorSpec& spec : specs) {
    if (spec.name == kMetadata) fail(path, "a tensor cannot be called '{}'", spec.name);
    if (!names.insert(spec.name).second) fail(path, "two tensors are called '{}'", spec.name);
    for (const std::int64_t size : spec.shape) {
      if (size < 0) fail(path, "tensor '{}': shape must hold sizes from 0 up, not {}", spec.name, size);
    }
    const std::int64_t bytes = checked_bytes(spec.shape, bytes_of_dtype(spec.dtype));
    if (bytes < 0) fail(path, "tensor '{}': the shape [{}] overflows", spec.name, fmt::join(spec.shape, ", "));
    tensors.push_back({spec.name, spec.dtype, spec.shape, 0, bytes});
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) { return bytes_of_dtype(a.dtype) > bytes_of_dtype(b.dtype); });
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root[kMetadata] = metadata;
  std::int64_t offset = 0;
  for (TensorInfo& tensor : tensors) {
    tensor.offset = offset;
    offset += tensor.bytes;
    root[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.offset, offset}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::exception& error) {
    fail(path, "a name or a text of {} is not valid UTF-8: {}", kMetadata, error.what());
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  for (TensorInfo& tensor : tensors) tensor.offset += static_cast<std::int64_t>(8 + text.size());
  std::string length(8, '\0');
  for (std::size_t byte = 0; byte < 8; ++byte) length[byte] = static_cast<char>(text.size() >> (8 * byte) & 0xffU);
  return length + text;
}

}  // namespace ringspan::io
