#include "files.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "file_error.h"
#include "io/whole_file.h"
#include "ringspan/tuning.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

namespace fs = std::filesystem;

// Also of files that are not there yet.
bool same(const std::string& a, const std::string& b) {
  std::error_code ignored;
  if (fs::equivalent(a, b, ignored)) return true;
  const auto place = [&](const std::string& path) { return fs::weakly_canonical(fs::absolute(path, ignored), ignored); };
  return !place(a).empty() && place(a) == place(b);
}

}  // namespace

void check_files(std::span<const NamedFile> named) {
  std::vector<NamedFile> files(named.begin(), named.end());
  for (NamedFile& file : files) {
    if (file.written) file.path = as_file_error([&] { return io::target_of(file.path); });
  }
  files.push_back({"standard output", "/dev/stdout"});
  if (const std::string tuned = tuning_file(); !tuned.empty()) files.push_back({"the tune file", tuned});
  for (std::size_t i = 0; i < files.size(); ++i) {
    for (std::size_t j = i + 1; j < files.size(); ++j) {
      if ((!files[i].written && !files[j].written) || !same(files[i].path, files[j].path)) continue;
      throw InvalidArgument(fmt::format("{} and {} are the same file ({})", files[i].option, files[j].option, files[i].path));
    }
  }
}

void write_file(const std::string& path, std::string_view text) {
  as_file_error([&] {
    io::WholeFile file(path);
    remove_when_killed(file.temporary_path());
    file.write(text, 0);
    file.finish();
    remove_when_killed({});
  });
}

}  // namespace ringspan::cli
