#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "io/safetensors_header.h"
#include "ringspan/error.h"

namespace ringspan::io {

struct SafetensorsReader::State {
  std::string path;
  const std::byte* map = nullptr;
  std::size_t map_bytes = 0;
  Header header;
  std::mutex mutex;  // of copies
  std::map<std::string, std::vector<std::max_align_t>, std::less<>> copies;

  ~State() {
    if (map != nullptr) ::munmap(const_cast<std::byte*>(map), map_bytes);
  }
};

namespace {

struct FileDescriptor {
  int value;
  explicit FileDescriptor(int fd) : value(fd) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (value >= 0) ::close(value);
  }
};

// Maps a regular file; null and 0 when it is empty.
std::pair<const std::byte*, std::size_t> map_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.value < 0) throw InvalidArgument(fmt::format("{}: cannot be opened: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.value, &status) != 0)
    throw InvalidArgument(fmt::format("{}: cannot be read: {}", path, std::strerror(errno)));
  if (!S_ISREG(status.st_mode)) throw InvalidArgument(path + ": is not a regular file");
  if (status.st_size == 0) return {nullptr, 0};
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* map = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.value, 0);
  if (map == MAP_FAILED) throw Error(fmt::format("{}: cannot be mapped: {}", path, std::strerror(errno)));
  return {static_cast<const std::byte*>(map), bytes};
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : state_(std::make_unique<State>()) {
  state_->path = path;
  std::tie(state_->map, state_->map_bytes) = map_file(path);
  const auto file_bytes = static_cast<std::int64_t>(state_->map_bytes);
  if (file_bytes < 8)
    throw InvalidArgument(fmt::format("{}: is truncated: {} bytes cannot hold the length of a header", path, file_bytes));
  std::uint64_t length = 0;
  for (std::size_t byte = 0; byte < 8; ++byte) length |= std::to_integer<std::uint64_t>(state_->map[byte]) << (8 * byte);
  if (length > static_cast<std::uint64_t>(kMaxHeaderBytes)) {
    throw InvalidArgument(fmt::format("{}: the header of {} bytes exceeds the limit of {}", path, length, kMaxHeaderBytes));
  }
  if (static_cast<std::int64_t>(length) > file_bytes - 8) {
    throw InvalidArgument(
        fmt::format("{}: is truncated: the header takes {} bytes, but only {} follow", path, length, file_bytes - 8));
  }
  const std::string_view text(reinterpret_cast<const char*>(state_->map + 8), static_cast<std::size_t>(length));
  state_->header = parse_header(path, text, file_bytes);
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

std::span<const std::byte> SafetensorsReader::mapped() const { return {state_->map, state_->map_bytes}; }
const std::string& SafetensorsReader::path() const { return state_->path; }
const Metadata& SafetensorsReader::metadata() const { return state_->header.metadata; }
const std::vector<TensorInfo>& SafetensorsReader::tensors() const { return state_->header.tensors; }

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  for (const TensorInfo& tensor : tensors()) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

const TensorInfo& SafetensorsReader::at(std::string_view name) const {
  if (const TensorInfo* tensor = find(name)) return *tensor;
  if (tensors().empty()) throw InvalidArgument(fmt::format("{}: has no tensor '{}', and no other", path(), name));
  constexpr std::size_t kNamed = 16;
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < std::min(tensors().size(), kNamed); ++i) names.push_back(tensors()[i].name);
  const std::string more = tensors().size() > kNamed ? fmt::format(" and {} more", tensors().size() - kNamed) : "";
  throw InvalidArgument(fmt::format("{}: has no tensor '{}', only: {}{}", path(), name, fmt::join(names, ", "), more));
}

std::span<const std::byte> SafetensorsReader::raw(const TensorInfo& tensor) const {
  return mapped().subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes));
}

const std::byte* SafetensorsReader::data(const TensorInfo& tensor) const {
  if (tensor.offset % bytes_of_dtype(tensor.dtype) == 0) return state_->map + tensor.offset;
  const std::lock_guard lock(state_->mutex);
  const auto [copy, is_new] = state_->copies.try_emplace(tensor.name);
  if (is_new) {
    copy->second.resize(static_cast<std::size_t>(tensor.bytes) / sizeof(std::max_align_t) + 1);
    std::memcpy(copy->second.data(), state_->map + tensor.offset, static_cast<std::size_t>(tensor.bytes));
  }
  return reinterpret_cast<const std::byte*>(copy->second.data());
}

}  // namespace ringspan::io
