// The files that a command reads and writes, checked before any work: no two of them, of which one is written, may be the same,
// and what is written must be able to be. Throws InvalidArgument and FileError, which name the options.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ringspan::cli {

struct NamedFile {
  std::string option;  // "--output", as messages call it
  std::string path;
  bool written = false;
};

// Standard output and the file of `tune`, which a plan reads, are among them without being named.
void check_files(std::span<const NamedFile> named);

// Replaces a file as a whole, or leaves it as it was; throws FileError.
void write_file(const std::string& path, std::string_view text);

}  // namespace ringspan::cli
