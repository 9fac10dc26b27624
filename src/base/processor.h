// Which processor this is, as /proc/cpuinfo tells: a name that is equal on equal processors; and how many of them this process
// may use. Asks the system; no state.
#pragma once

#include <string>

namespace ringspan {

// "Intel(R) Xeon(R) Processor, family 6, model 143, stepping 8"; "" where the system does not tell.
std::string processor_name();

// That the calling thread may run on, as its affinity (taskset, a job's cpuset) tells; at least 1.
int usable_processors();

}  // namespace ringspan
