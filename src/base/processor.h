// Which processor this is, as /proc/cpuinfo tells: a name that is equal on equal processors. Reads that file; no state.
#pragma once

#include <string>

namespace ringspan {

// "Intel(R) Xeon(R) Processor, family 6, model 143, stepping 8"; "" where the system does not tell.
std::string processor_name();

}  // namespace ringspan
