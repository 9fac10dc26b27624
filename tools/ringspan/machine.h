// What the machine under the program is, as its system tells: /proc, /sys, the limits of its container. Facts that a system
// does not tell are left empty. Reads some small files; no state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ringspan::cli {

struct Cache {
  int level = 0;
  std::string type;  // Data, Instruction or Unified
  std::int64_t bytes = 0;
};

struct Machine {
  std::string processor;                     // "Intel(R) Xeon(R) Processor"
  std::string architecture;                  // "x86_64"
  std::string system;                        // "Linux 6.1.0"
  int processors = 0;                        // of the machine
  int usable = 0;                            // that this process may run on
  std::optional<double> quota;               // processors' worth of time that control groups allow
  std::optional<int> cores;                  // that the usable processors lie on
  std::vector<Cache> caches;                 // of the first processor
  std::int64_t memory = 0;                   // bytes
  std::int64_t available = 0;                // bytes, for new work
  std::optional<std::int64_t> memory_limit;  // of control groups, where below memory
};

Machine read_machine();

}  // namespace ringspan::cli
