// What `ringspan doctor` says about devices, one fact per line: driver, devices, what they will be used with and why.
#pragma once

#include <string>
#include <vector>

namespace ringspan::cuda {

// Never throws but for memory. Starts the driver where there is one.
std::vector<std::string> cuda_report();
// Whether NCCL is there, its version and file; loads it. The same contract.
std::string nccl_report();

}  // namespace ringspan::cuda
