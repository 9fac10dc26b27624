#include "machine.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "base/processor.h"

namespace ringspan::cli {
namespace {

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "48K", "1024 kB", "33554432": bytes, or nothing.
std::optional<std::int64_t> size_of(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  const std::size_t unit = text.find_first_of("KkMm", static_cast<std::size_t>(end - text.data()));
  if (unit == std::string_view::npos) return value;
  return value << (text[unit] == 'K' || text[unit] == 'k' ? 10 : 20);
}

// The value of the first line "name : value" of a file.
std::string field(const char* path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "";
}

std::vector<Cache> read_caches() {
  std::vector<Cache> caches;
  for (int index = 0;; ++index) {
    const std::filesystem::path folder = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}", index);
    const auto level = size_of(first_line(folder / "level"));
    const auto bytes = size_of(first_line(folder / "size"));
    if (!level || !bytes) return caches;
    caches.push_back({static_cast<int>(*level), first_line(folder / "type"), *bytes});
  }
}

void read_processors(Machine& machine) {
  machine.processors = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.usable = usable_processors();
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return;
  std::set<std::string> cores;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(static_cast<unsigned>(processor), &set)) continue;
    const std::string siblings =
        first_line(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", processor));
    if (siblings.empty()) return;
    cores.insert(siblings);
  }
  machine.cores = static_cast<int>(cores.size());
}

// The folders of this process's control groups, version 2 and 1: a process is held to what any group around its own allows.
std::vector<std::filesystem::path> control_groups() {
  std::set<std::filesystem::path> folders;
  const std::filesystem::path root = "/sys/fs/cgroup";
  for (const char* of : {"", "cpu", "memory"}) folders.insert(root / of);  // all that a container sees
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/user.slice/job", "4:cpu,cpuacct:/job"
    const std::size_t name = line.find(':') + 1, path = line.find(':', name) + 1;
    if (name == 0 || path == 0) continue;
    std::istringstream names(line.substr(name, path - 1 - name) + ",");
    for (std::string of; std::getline(names, of, ',');) {
      std::filesystem::path group = line.substr(path);
      for (; group.has_relative_path(); group = group.parent_path()) folders.insert(root / of / group.relative_path());
    }
  }
  return {folders.begin(), folders.end()};
}

void read_limits(Machine& machine) {
  for (const std::filesystem::path& group : control_groups()) {
    std::istringstream both(first_line(group / "cpu.max"));
    std::string quota, period;
    if (!(both >> quota >> period)) {
      quota = first_line(group / "cpu.cfs_quota_us");
      period = first_line(group / "cpu.cfs_period_us");
    }
    const auto allowed = size_of(quota), of = size_of(period);
    if (allowed && of && *allowed > 0 && *of > 0) {
      const double share = static_cast<double>(*allowed) / static_cast<double>(*of);
      machine.quota = std::min(machine.quota.value_or(share), share);
    }
    for (const char* name : {"memory.max", "memory.limit_in_bytes"}) {
      const auto limit = size_of(first_line(group / name));
      if (limit && *limit > 0 && *limit < machine.memory)
        machine.memory_limit = std::min(machine.memory_limit.value_or(*limit), *limit);
    }
  }
}

}  // namespace

Machine read_machine() {
  Machine machine;
  utsname names{};
  if (uname(&names) == 0) {
    machine.architecture = names.machine;
    machine.system = fmt::format("{} {}", names.sysname, names.release);
  }
  machine.processor = field("/proc/cpuinfo", "model name");
  read_processors(machine);
  machine.caches = read_caches();
  machine.memory = size_of(field("/proc/meminfo", "MemTotal")).value_or(0);
  machine.available = size_of(field("/proc/meminfo", "MemAvailable")).value_or(0);
  read_limits(machine);
  return machine;
}

}  // namespace ringspan::cli
