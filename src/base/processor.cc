#include "base/processor.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <thread>

namespace ringspan {
namespace {

std::string trimmed(const std::string& text, std::size_t begin, std::size_t end) {
  constexpr const char* kSpace = " \t";
  begin = text.find_first_not_of(kSpace, begin);
  if (begin == std::string::npos || begin >= end) return "";
  return text.substr(begin, text.find_last_not_of(kSpace, end - 1) + 1 - begin);
}

std::string read_processor_name() {
  std::map<std::string, std::string> fields;  // of the first processor
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const std::size_t colon = line.find(':');
    if (colon != std::string::npos) fields[trimmed(line, 0, colon)] = trimmed(line, colon + 1, line.size());
  }
  std::string name;
  const auto add = [&](const char* field, const char* label) {
    if (fields[field].empty()) return;
    if (!name.empty()) name += ", ";
    name += label + fields[field];
  };
  add("model name", "");
  add("cpu family", "family "), add("model", "model "), add("stepping", "stepping ");                  // x86
  add("CPU implementer", "implementer "), add("CPU part", "part "), add("CPU revision", "revision ");  // Arm
  return name;
}

}  // namespace

std::string processor_name() {
  static const std::string name = read_processor_name();  // of many cores the system takes milliseconds to tell
  return name;
}

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool told = sched_getaffinity(0, sizeof set, &set) == 0;  // not of more processors than the set holds
  return std::max(1, told ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace ringspan
