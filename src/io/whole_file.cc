#include "io/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, std::string_view what) {
  throw Error(fmt::format("{}: cannot be {}: {}", path, what, std::strerror(errno)));
}

// The directory entry must reach the disk too, or a crash could undo the rename.
void sync_directory_of(const std::string& path) {
  const int file = ::open((fs::path(path).parent_path() / ".").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;  // not every file system lets a directory be opened; the rename itself has succeeded
  ::fsync(file);
  ::close(file);
}

// Beside the target, and so short that every name of a file leaves room for the rest.
std::string temporary_of(const std::string& target, ::pid_t owner, unsigned number) {
  constexpr std::size_t kMostOfName = 100;
  const fs::path path = target;
  const std::string name = path.filename().string().substr(0, kMostOfName);
  return (path.parent_path() / fmt::format("{}.{}-{}.partial", name, owner, number)).string();
}

}  // namespace

std::string target_of(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (error == std::errc::filename_too_long) throw Error(fmt::format("{}: cannot be created: {}", path, error.message()));
  if (fs::exists(status) && !fs::is_regular_file(status)) throw Error(fmt::format("{}: is not a regular file", path));
  fs::path target = path;
  constexpr int kMostLinks = 40;  // as Linux
  for (int links = 0; fs::is_symlink(target, error); ++links) {
    const fs::path next = fs::read_symlink(target, error);
    if (error || links == kMostLinks) throw Error(fmt::format("{}: the link cannot be followed", path));
    target = target.parent_path() / next;
  }
  if (!target.has_filename()) throw Error(fmt::format("{}: is not the name of a file", path.empty() ? "''" : path));
  if (::access((target.parent_path() / ".").c_str(), W_OK | X_OK) != 0) fail(path, "created");
  if (fs::exists(status) && ::access(target.c_str(), W_OK) != 0) fail(path, "replaced");
  return target;
}

int make_room(int file, std::int64_t bytes) {
  int error = EINTR;  // by a signal that stops or continues the process, too
  while (error == EINTR) error = ::posix_fallocate(file, 0, bytes);
  return error;
}

WholeFile::WholeFile(const std::string& path) : path_(path), target_(target_of(path)), owner_(::getpid()) {
  static std::atomic<unsigned> counter{0};
  struct stat replaced {};
  if (::stat(target_.c_str(), &replaced) == 0) mode_ = replaced.st_mode & 0777;
  // What was for few to read is so while it is written, too; this process reads it back.
  const ::mode_t mode = mode_ ? *mode_ | 0600U : 0666U;
  do {
    temporary_ = temporary_of(target_, owner_, counter++);
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (file_ < 0 && errno == EEXIST);  // of a killed process of this number: those of containers are alike
  if (file_ < 0) fail(path_, "created");
}

WholeFile::~WholeFile() {
  if (file_ >= 0) ::close(file_);
  if (!temporary_.empty() && owner_ == ::getpid()) ::unlink(temporary_.c_str());
}

void WholeFile::resize(std::int64_t bytes) {
  errno = make_room(file_, bytes);
  if (errno != 0) fail(path_, fmt::format("made {} bytes large", bytes));
}

void WholeFile::write(std::string_view data, std::int64_t offset) {
  while (!data.empty()) {
    const auto written = ::pwrite(file_, data.data(), data.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(path_, "written");
    data.remove_prefix(static_cast<std::size_t>(written));
    offset += written;
  }
}

void WholeFile::finish() {
  if (mode_ && ::fchmod(file_, *mode_) != 0) fail(path_, "given the permissions of the file that it replaces");
  if (::fsync(file_) != 0) fail(path_, "forced to disk");
  const int file = file_;
  file_ = -1;
  if (::close(file) != 0) fail(path_, "closed");
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(path_, "renamed to its name");
  temporary_.clear();
  sync_directory_of(target_);
}

}  // namespace ringspan::io
