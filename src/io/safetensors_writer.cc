#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/function_ref.h"
#include "io/safetensors_header.h"
#include "ringspan/error.h"

namespace ringspan::io {

struct SafetensorsWriter::State {
  std::string path, temporary;
  int file = -1;
  ::pid_t owner = 0;
  std::vector<TensorInfo> tensors;

  ~State() {
    if (file >= 0) ::close(file);
    if (!temporary.empty() && owner == ::getpid()) ::unlink(temporary.c_str());
  }
  [[noreturn]] void fail(const char* what) const {
    throw Error(fmt::format("{}: cannot be {}: {}", path, what, std::strerror(errno)));
  }
};

namespace {

void write_all(int file, const char* data, std::int64_t bytes, std::int64_t offset, FunctionRef<void()> fail) {
  while (bytes > 0) {
    const auto written = ::pwrite(file, data, static_cast<std::size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail();
    data += written;
    offset += written;
    bytes -= written;
  }
}

// The directory entry must reach the disk too, or a crash could undo the rename.
void sync_directory_of(const std::string& path) {
  const auto slash = path.find_last_of('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int file = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;  // not every file system lets a directory be opened; the rename itself has succeeded
  ::fsync(file);
  ::close(file);
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::span<const TensorSpec> tensors, const Metadata& metadata)
    : state_(std::make_unique<State>()) {
  static std::atomic<unsigned> counter{0};
  state_->path = path;
  state_->owner = ::getpid();
  const std::string header = make_header(path, tensors, metadata, state_->tensors);
  const std::string temporary = fmt::format("{}.{}-{}.partial", path, state_->owner, counter++);
  state_->file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (state_->file < 0) state_->fail("created");
  state_->temporary = temporary;
  auto bytes = static_cast<std::int64_t>(header.size());
  for (const TensorInfo& tensor : state_->tensors) bytes += tensor.bytes;
  if (::ftruncate(state_->file, bytes) != 0) state_->fail("made large enough");
  write_all(state_->file, header.data(), static_cast<std::int64_t>(header.size()), 0, [this] { state_->fail("written"); });
}

SafetensorsWriter::~SafetensorsWriter() = default;

const std::vector<TensorInfo>& SafetensorsWriter::tensors() const { return state_->tensors; }
const std::string& SafetensorsWriter::temporary_path() const { return state_->temporary; }

void SafetensorsWriter::write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes) {
  for (const TensorInfo& tensor : state_->tensors) {
    if (tensor.name != name) continue;
    if (offset < 0 || bytes < 0 || bytes > tensor.bytes || offset > tensor.bytes - bytes) {
      throw InvalidArgument(fmt::format("{}: bytes {} to {} are outside tensor '{}' of {} bytes", state_->path, offset,
                                        offset + bytes, name, tensor.bytes));
    }
    write_all(state_->file, static_cast<const char*>(data), bytes, tensor.offset + offset, [this] { state_->fail("written"); });
    return;
  }
  throw InvalidArgument(fmt::format("{}: no tensor '{}' is to be written", state_->path, name));
}

void SafetensorsWriter::finish() {
  if (::fsync(state_->file) != 0) state_->fail("forced to disk");
  const int file = state_->file;
  state_->file = -1;
  if (::close(file) != 0) state_->fail("closed");
  if (::rename(state_->temporary.c_str(), state_->path.c_str()) != 0) state_->fail("renamed to its name");
  state_->temporary.clear();
  sync_directory_of(state_->path);
}

}  // namespace ringspan::io
