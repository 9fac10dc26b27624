#include "api/tune_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/processor.h"
#include "kernels/registry.h"
#include "ringspan/error.h"
#include "ringspan/version.h"

namespace ringspan::internal {
namespace {

using nlohmann::ordered_json;

constexpr int kTuneSchema = 1;
constexpr int kLargestSize = 1 << 20;

// Nothing where there is no file.
std::optional<ordered_json> read_json(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {  // reading a pipe would wait for ever
    throw InvalidArgument(
        fmt::format("tune file {}: is not a regular file; name one, or set RINGSPAN_TUNE_FILE= to do without", path));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    refuse_tune_file(path, fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  std::string text;
  try {
    text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  } catch (const std::ios_base::failure& error) {
    refuse_tune_file(path, fmt::format("cannot be read: {}", error.what()));
  }
  if (text.find('\0') != std::string::npos)
    refuse_tune_file(path, "is not JSON: it holds a NUL byte");  // parse() would stop there
  ordered_json json = ordered_json::parse(text, nullptr, false);
  if (json.is_discarded()) refuse_tune_file(path, "is not JSON");
  return json;
}

std::int64_t integer_at(const ordered_json& object, const char* name) {
  const ordered_json& value = object.at(name);
  // get() would round, and wrap what is beyond 64 bits with a sign.
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (value.is_number_unsigned() ? value.get<std::uint64_t>() <= kMost : value.is_number_integer())
    return value.get<std::int64_t>();
  throw InvalidArgument(fmt::format("{} must be a whole number{}, not {}", name,
                                    value.is_number_integer() ? fmt::format(" of at most {}", kMost) : "",
                                    value.is_number() ? value.dump() : value.type_name()));
}

const ordered_json& list_at(const ordered_json& object, const char* name) {
  const ordered_json& value = object.at(name);
  if (!value.is_array()) throw InvalidArgument(fmt::format("{} must be a list, not {}", name, value.type_name()));
  return value;
}

int size_at(const ordered_json& object, const char* name) {
  const std::int64_t value = integer_at(object, name);
  if (value < 0 || value > kLargestSize) {
    throw InvalidArgument(fmt::format("{} ({}) must be in [0, {}]", name, value, kLargestSize));
  }
  return static_cast<int>(value);
}

Tile tile_at(const ordered_json& object) {
  const Tile tile{size_at(object, "tile_queries"), size_at(object, "tile_keys")};
  if ((tile.queries == 0) == (tile.keys == 0)) return tile;
  throw InvalidArgument(fmt::format("a tile of {} x {} must have queries and keys, or neither", tile.queries, tile.keys));
}

TuneEntry entry_of(const ordered_json& json) {
  TuneEntry entry;
  entry.dtype = parse_dtype(json.at("dtype").get<std::string>());
  entry.head_dim = size_at(json, "head_dim");
  entry.date = json.at("date").get<std::string>();
  entry.attend_kernel = json.at("attend").at("kernel").get<std::string>();
  entry.attend_tile = tile_at(json.at("attend"));
  entry.attend_backward_kernel = json.at("attend_backward").at("kernel").get<std::string>();
  entry.attend_backward_tile = tile_at(json.at("attend_backward"));
  entry.bucket_rows = size_at(json, "bucket_rows");
  return entry;
}

ordered_json json_of(const TuneEntry& entry) {
  const auto kernel = [](const std::string& name, Tile tile) {
    return ordered_json{{"kernel", name}, {"tile_queries", tile.queries}, {"tile_keys", tile.keys}};
  };
  return {{"dtype", to_string(entry.dtype)},
          {"head_dim", entry.head_dim},
          {"date", entry.date},
          {"attend", kernel(entry.attend_kernel, entry.attend_tile)},
          {"attend_backward", kernel(entry.attend_backward_kernel, entry.attend_backward_tile)},
          {"bucket_rows", entry.bucket_rows}};
}

struct MachineEntries {
  TuneMachine machine;
  std::vector<TuneEntry> entries;
};

// The whole file, so that a mistake is found whichever machine it belongs to.
std::vector<MachineEntries> read_machines(const std::string& path) {
  const std::optional<ordered_json> json = read_json(path);
  std::vector<MachineEntries> machines;
  if (!json) return machines;
  try {
    const std::int64_t schema = integer_at(*json, "schema");
    if (schema != kTuneSchema) throw InvalidArgument(fmt::format("has schema {}, this version knows {}", schema, kTuneSchema));
    for (const ordered_json& of : list_at(*json, "machines")) {
      MachineEntries machine{{of.at("processor"), of.at("instructions"), of.at("version")}, {}};
      for (const ordered_json& entry : list_at(of, "entries")) machine.entries.push_back(entry_of(entry));
      machines.push_back(std::move(machine));
    }
  } catch (const nlohmann::json::exception& error) {
    const std::string_view what = error.what();  // "[json.exception.out_of_range.403] key 'date' not found"
    refuse_tune_file(path, std::string(what.substr(std::min(what.size(), what.find("] ") + 2))));
  } catch (const InvalidArgument& error) {
    refuse_tune_file(path, error.what());
  }
  return machines;
}

// What tells one content of a file from another.
struct Identity {
  std::string path;
  dev_t device = 0;
  ino_t inode = 0;
  off_t bytes = 0;
  std::int64_t seconds = 0, nanoseconds = 0;  // of the last change
  bool operator==(const Identity&) const = default;
};

// read_machines(), of the latest file once for as long as it stays the same: every plan asks.
std::vector<MachineEntries> read_known_machines(const std::string& path) {
  static std::mutex mutex;
  static Identity known;
  static std::vector<MachineEntries> machines;
  struct stat now {};
  if (::stat(path.c_str(), &now) != 0 && (errno == ENOENT || errno == ENOTDIR)) return {};
  const Identity identity{path, now.st_dev, now.st_ino, now.st_size, now.st_mtim.tv_sec, now.st_mtim.tv_nsec};
  const std::lock_guard lock(mutex);
  if (identity == known) return machines;
  std::vector<MachineEntries> read = read_machines(path);
  constexpr std::int64_t kSettled = 2;  // seconds after which another change has another time
  if (S_ISREG(now.st_mode) && identity.seconds + kSettled < std::time(nullptr)) {
    known = identity;
    machines = read;
  }
  return read;
}

[[noreturn]] void fail_to_write(const std::string& path) {
  throw Error(fmt::format("tune file {}: cannot be written: {}", path, std::strerror(errno)));
}

// Where a file of this path is written: a link stays, and what it points to need not be there. Makes the folders.
std::string target_of(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as Linux
  std::error_code ignored;        // where it matters, the file cannot be made either
  fs::path target = fs::absolute(path, ignored);
  for (int links = 0; links < kMostLinks && fs::is_symlink(target, ignored); ++links) {
    target = target.parent_path() / fs::read_symlink(target, ignored);
  }
  fs::create_directories(target.parent_path(), ignored);
  return target;
}

// While one lives, no other process or thread changes the file; for those that know this lock, beside it, which stays. Where
// the file system has no locks there is none.
class Lock {
 public:
  Lock(const std::string& path, const std::string& target)
      : file_(::open((target + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666)) {
    if (file_ < 0) fail_to_write(path);
    while (::flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~Lock() { ::close(file_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int file_;
};

// A file beside the target that goes away unless it was moved there.
class Temporary {
 public:
  Temporary(const std::string& path, const std::string& target) : given_(path), target_(target) {
    static std::atomic<unsigned> counter{0};
    struct stat replaced {};
    const bool replaces = ::stat(target.c_str(), &replaced) == 0;
    do {
      path_ = fmt::format("{}.{}-{}.tmp", target, ::getpid(), counter++);
      file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (file_ < 0 && errno == EEXIST);  // of a killed process of this number: those of containers are alike
    if (file_ < 0) fail_to_write(given_);
    if (replaces) static_cast<void>(!::fchmod(file_, replaced.st_mode & 0777));  // nothing in it is secret
  }
  ~Temporary() {
    ::close(file_);
    if (!moved_) ::unlink(path_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  void write(std::string_view text) {
    while (!text.empty()) {
      const auto written = ::write(file_, text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail_to_write(given_);
      text.remove_prefix(static_cast<std::size_t>(written));
    }
    if (::fsync(file_) != 0) fail_to_write(given_);
  }
  void move() {
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail_to_write(given_);
    moved_ = true;
  }

 private:
  std::string given_, target_, path_;
  int file_ = -1;
  bool moved_ = false;
};

}  // namespace

void refuse_tune_file(const std::string& path, const std::string& why) {
  throw InvalidArgument(
      fmt::format("tune file {}: {}; remove it and run `ringspan tune`, or set RINGSPAN_TUNE_FILE= to do without", path, why));
}

TuneMachine this_machine() {
  TuneMachine machine{processor_name(), "",
                      fmt::format("{}.{}.{}", RINGSPAN_VERSION_MAJOR, RINGSPAN_VERSION_MINOR, RINGSPAN_VERSION_PATCH)};
  for (const kernels::Implementation& implementation : kernels::implementations()) {
    if (!implementation.machine_has()) continue;
    if (!machine.instructions.empty()) machine.instructions += ' ';
    machine.instructions += implementation.name;
  }
  return machine;
}

std::vector<TuneEntry> read_tune_file(const std::string& path, const TuneMachine& machine) {
  for (MachineEntries& of : read_known_machines(path)) {
    if (of.machine == machine) return std::move(of.entries);
  }
  return {};
}

void prepare_tune_file(const std::string& path) {
  read_machines(path);
  const std::string target = target_of(path);
  const Lock lock(path, target);
  const Temporary file(path, target);
}

void write_tune_entry(const std::string& path, const TuneMachine& machine, const TuneEntry& entry) {
  const std::string target = target_of(path);
  const Lock lock(path, target);
  std::vector<MachineEntries> machines = read_machines(path);
  auto of = std::find_if(machines.begin(), machines.end(), [&](const auto& m) { return m.machine == machine; });
  if (of == machines.end()) of = machines.insert(machines.end(), {machine, {}});
  std::erase_if(of->entries, [&](const TuneEntry& old) {
    return old.dtype == entry.dtype && old.head_dim == entry.head_dim && old.attend_kernel == entry.attend_kernel &&
           old.attend_backward_kernel == entry.attend_backward_kernel;
  });
  of->entries.push_back(entry);

  ordered_json json{{"schema", kTuneSchema}, {"machines", ordered_json::array()}};
  for (const MachineEntries& m : machines) {
    ordered_json entries = ordered_json::array();
    for (const TuneEntry& e : m.entries) entries.push_back(json_of(e));
    json["machines"].push_back({{"processor", m.machine.processor},
                                {"instructions", m.machine.instructions},
                                {"version", m.machine.version},
                                {"entries", std::move(entries)}});
  }
  Temporary file(path, target);
  file.write(json.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n");
  file.move();
}

}  // namespace ringspan::internal
