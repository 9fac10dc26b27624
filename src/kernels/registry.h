// What the implementations of the kernels are compiled for, to be shown to people. Pure; any thread.
#pragma once

#include <span>
#include <string_view>

#include "kernels/attend.h"

namespace ringspan::kernels {

struct Implementation {
  std::string_view name;   // the last word of the names of its kernels
  std::string_view needs;  // of the processor
  std::string_view note;   // "" or what a user has to know
  bool (*machine_has)();   // what it needs
};

// Those compiled into this library, in the order of kernels.inc.
std::span<const Implementation> implementations();

}  // namespace ringspan::kernels
