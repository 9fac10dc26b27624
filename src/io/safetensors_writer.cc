#include <fmt/format.h>

#include "io/safetensors_header.h"
#include "io/whole_file.h"
#include "ringspan/error.h"

namespace ringspan::io {

struct SafetensorsWriter::State {
  explicit State(const std::string& path) : file(path) {}

  std::vector<TensorInfo> tensors;
  WholeFile file;
};

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::span<const TensorSpec> tensors, const Metadata& metadata) {
  std::vector<TensorInfo> infos;
  const std::string header = make_header(path, tensors, metadata, infos);
  state_ = std::make_unique<State>(path);
  state_->tensors = std::move(infos);
  auto bytes = static_cast<std::int64_t>(header.size());
  for (const TensorInfo& tensor : state_->tensors) bytes += tensor.bytes;
  state_->file.resize(bytes);
  state_->file.write(header, 0);
}

SafetensorsWriter::~SafetensorsWriter() = default;

const std::vector<TensorInfo>& SafetensorsWriter::tensors() const { return state_->tensors; }
const std::string& SafetensorsWriter::temporary_path() const { return state_->file.temporary_path(); }

void SafetensorsWriter::write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes) {
  for (const TensorInfo& tensor : state_->tensors) {
    if (tensor.name != name) continue;
    if (offset < 0 || bytes < 0 || bytes > tensor.bytes || offset > tensor.bytes - bytes) {
      throw InvalidArgument(fmt::format("{}: bytes {} to {} are outside tensor '{}' of {} bytes", state_->file.path(), offset,
                                        offset + bytes, name, tensor.bytes));
    }
    state_->file.write({static_cast<const char*>(data), static_cast<std::size_t>(bytes)}, tensor.offset + offset);
    return;
  }
  throw InvalidArgument(fmt::format("{}: no tensor '{}' is to be written", state_->file.path(), name));
}

void SafetensorsWriter::finish() { state_->file.finish(); }

}  // namespace ringspan::io
