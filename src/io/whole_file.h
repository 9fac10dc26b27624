// A file that appears whole or not at all: it is written under a temporary name beside its place and renamed when finished.
//
// A link stays: what it points to is written. What is replaced passes its permissions on. Errors are Error and begin with the
// path as it was given. Writing goes straight to the file and may come from several threads or forked processes; not thread
// safe otherwise.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ringspan::io {

// Where a file of this path would be written. Throws where that is seen to be impossible: what is there is not a regular file
// (a rename would replace a device or a pipe), or the folder is missing or may not be written.
std::string target_of(const std::string& path);

// Makes an empty file so large and books its room on the disk, so that a full disk is found now. Returns 0 or an errno.
int make_room(int file, std::int64_t bytes);

class WholeFile {
 public:
  explicit WholeFile(const std::string& path);  // creates the temporary file
  ~WholeFile();                                 // removes the temporary file unless finished, in the process that created it
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  // To be called first; throws where the disk has no room.
  void resize(std::int64_t bytes);
  void write(std::string_view data, std::int64_t offset);
  // Forces the data to disk and renames the file to its place.
  void finish();

  const std::string& path() const { return path_; }
  const std::string& temporary_path() const { return temporary_; }

 private:
  std::string path_, target_, temporary_;
  int file_ = -1;
  std::optional<::mode_t> mode_;  // of the file that is replaced
  ::pid_t owner_;
};

}  // namespace ringspan::io
