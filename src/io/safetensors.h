// Safetensors files: a mapped reader without copies, and a writer that leaves a whole file or none.
//
// A file is 8 bytes of header length, a JSON header (name -> dtype, shape, data_offsets; __metadata__ -> strings) and the data.
// Nothing in a header is believed: every check has its own InvalidArgument, which begins with the path.
//
// Reader: open costs O(header); data() returns memory of the mapping (an aligned copy where the file misaligns a tensor), raw()
// never copies.
// Writer: write() goes straight to the file, any part of any tensor in any order, and may be called from several threads or
// forked processes; finish() makes the file appear under its name (whole_file.h). Not thread safe otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan::io {

// The format's names: "F32", "BF16", "F16", "I32", ...; throws InvalidArgument for an unknown one.
std::int64_t bytes_of_dtype(std::string_view dtype);

struct TensorInfo {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // from the start of the file
  std::int64_t bytes = 0;

  std::int64_t elements() const;
  bool operator==(const TensorInfo&) const = default;
};

using Metadata = std::map<std::string, std::string>;

inline constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation

class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  const std::string& path() const;
  const Metadata& metadata() const;
  const std::vector<TensorInfo>& tensors() const;                  // in the order of their data
  const TensorInfo* find(std::string_view name) const;             // null when there is none
  const TensorInfo& at(std::string_view name) const;               // throws InvalidArgument, listing the names that there are
  const std::byte* data(const TensorInfo& tensor) const;           // of this file; aligned to its element; thread safe
  std::span<const std::byte> raw(const TensorInfo& tensor) const;  // of this file, as it lies there: aligned to nothing
  // The whole file. Where it becomes shorter while it is mapped, reading what is gone raises SIGBUS.
  std::span<const std::byte> mapped() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct TensorSpec {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
};

class SafetensorsWriter {
 public:
  // Creates a temporary file beside `path`, of the final size. Data not written stays 0. Throws as WholeFile does.
  SafetensorsWriter(const std::string& path, std::span<const TensorSpec> tensors, const Metadata& metadata);
  ~SafetensorsWriter();  // removes the temporary file unless finished, in the process that created it
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Writes bytes [offset, offset + bytes) of a tensor.
  void write(std::string_view name, std::int64_t offset, const void* data, std::int64_t bytes);
  // Forces the data to disk and renames the file to its final name.
  void finish();

  const std::vector<TensorInfo>& tensors() const;
  // The file as it is so far: a whole safetensors file, to be read back before finish().
  const std::string& temporary_path() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringspan::io
