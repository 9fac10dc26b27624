// ringspan inspect: what is in a safetensors file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "command.h"
#include "qkv_file.h"
#include "text.h"

namespace ringspan::cli {
namespace {

struct Documents {
  std::string name;
  std::int64_t count = 0;
  std::int64_t shortest = 0, median = 0, longest = 0, tokens = 0;
  std::string wrong;  // where the numbers are no offsets: why
};

// Of a tensor of offsets; nothing where it is not one.
std::optional<Documents> documents_of(const io::SafetensorsReader& reader, const io::TensorInfo& info) {
  if (!info.name.starts_with("cu_seqlens") || info.dtype != "I32" || info.shape.size() != 1 || info.shape[0] < 2)
    return std::nullopt;
  const std::byte* data = reader.raw(info).data();
  const auto offset = [data](std::size_t i) {
    std::int32_t value = 0;
    std::memcpy(&value, data + i * sizeof value, sizeof value);
    return value;
  };
  Documents documents;
  documents.name = info.name;
  documents.count = info.shape[0] - 1;
  if (offset(0) != 0) {
    documents.wrong = fmt::format("not offsets: entry 0 ({}) must be 0", offset(0));
    return documents;
  }
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(documents.count));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (offset(i + 1) < offset(i)) {
      documents.wrong = fmt::format("not ascending, so not offsets: entry {} is {} after {}", i + 1, offset(i + 1), offset(i));
      return documents;
    }
    lengths[i] = offset(i + 1) - offset(i);
  }
  documents.tokens = offset(lengths.size());
  const auto middle = lengths.begin() + static_cast<std::ptrdiff_t>(lengths.size() / 2);
  std::nth_element(lengths.begin(), middle, lengths.end());
  documents.median = *middle;
  documents.shortest = *std::min_element(lengths.begin(), middle + 1);
  documents.longest = *std::max_element(middle, lengths.end());
  return documents;
}

int print_json(const io::SafetensorsReader& reader) {
  nlohmann::ordered_json json{{"version", 1}, {"file", reader.path()}, {"metadata", reader.metadata()}};
  json["tensors"] = nlohmann::ordered_json::array();
  for (const io::TensorInfo& info : reader.tensors()) {
    json["tensors"].push_back({{"name", info.name}, {"dtype", info.dtype}, {"shape", info.shape}, {"bytes", info.bytes}});
    const auto documents = documents_of(reader, info);
    if (documents && !documents->wrong.empty()) {
      json["documents"].push_back({{"tensor", documents->name}, {"wrong", documents->wrong}});
    } else if (documents) {
      json["documents"].push_back({{"tensor", documents->name},
                                   {"count", documents->count},
                                   {"tokens", documents->tokens},
                                   {"shortest", documents->shortest},
                                   {"median", documents->median},
                                   {"longest", documents->longest}});
    }
  }
  fmt::print("{}\n", json_text(json));
  return kOk;
}

int print_text(const io::SafetensorsReader& reader) {
  std::int64_t bytes = 0;
  std::size_t width = 4;
  for (const io::TensorInfo& info : reader.tensors()) {
    bytes += info.bytes;
    width = std::max(width, std::min<std::size_t>(info.name.size(), 40));
  }
  fmt::print("{}: {}, {}\n\n", printable(reader.path()), counted(std::ssize(reader.tensors()), "tensor"),
             bytes_text(static_cast<double>(bytes)));
  fmt::print("  {:<{}}  {:<6}{:>12}  {}\n", "name", width, "dtype", "size", "shape");
  for (const io::TensorInfo& info : reader.tensors()) {
    fmt::print("  {:<{}}  {:<6}{:>12}  ({})\n", printable(info.name), width, info.dtype,
               bytes_text(static_cast<double>(info.bytes)), fmt::join(info.shape, ", "));
  }
  for (const io::TensorInfo& info : reader.tensors()) {
    const auto documents = documents_of(reader, info);
    if (!documents) continue;
    if (!documents->wrong.empty()) {
      fmt::print("\n{}: {}\n", printable(documents->name), documents->wrong);
      continue;
    }
    fmt::print("\n{}: {} of {} to {} tokens (median {}), {} in all\n", printable(documents->name),
               counted(documents->count, "document"), count_text(documents->shortest), count_text(documents->longest),
               count_text(documents->median), count_text(documents->tokens));
  }
  if (!reader.metadata().empty()) fmt::print("\nmetadata\n");
  for (const auto& [key, value] : reader.metadata()) fmt::print("  {}: {}\n", printable(key), printable(value));
  return kOk;
}

}  // namespace

Body setup_inspect(CLI::App& app) {
  struct Options {
    std::string file;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  app.add_option("FILE", options->file, "a safetensors file")->required();
  app.add_flag("--json", options->json, "print JSON");
  return [options] {
    const io::SafetensorsReader reader = open_safetensors(options->file);
    return options->json ? print_json(reader) : print_text(reader);
  };
}

}  // namespace ringspan::cli
