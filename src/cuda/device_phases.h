// Where cycles of phases (phases.h) are added up, and how they are told: after each launch a line of JSON,
//     {"kernel": ..., "blocks": ..., "phases": {"store": [how often, mean cycles], ...}}
// over all blocks of the launch, is appended to the file that RINGSPAN_PHASES names. Launches are then waited for. For nvcc
// only, in builds with RINGSPAN_CUDA_PHASES.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda/phases.h"

namespace ringspan::cuda {

struct PhaseSums {
  unsigned long long cycles[kPhases], count[kPhases];
};
static __device__ PhaseSums phase_sums;

// Of one role, in the registers of its threads.
class PhaseClock {
 public:
  __device__ __forceinline__ void note(Phase phase, bool counts) {
    const std::uint32_t now = read();
    if (counts && now_in_ != Phase::none) {
      atomicAdd(&phase_sums.cycles[static_cast<int>(now_in_)], static_cast<unsigned long long>(now - since_));
      atomicAdd(&phase_sums.count[static_cast<int>(now_in_)], 1ULL);
    }
    now_in_ = phase;
    since_ = read();
  }

 private:
  static __device__ __forceinline__ std::uint32_t read() {
    std::uint32_t now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
  }
  Phase now_in_ = Phase::none;
  std::uint32_t since_ = 0;
};

inline cudaError_t tell_phases(const char* kernel, std::int64_t blocks, cudaStream_t stream) {
  const char* const file = std::getenv("RINGSPAN_PHASES");
  if (file == nullptr) return cudaSuccess;
  PhaseSums sums{};
  cudaError_t status = cudaStreamSynchronize(stream);
  if (status == cudaSuccess) status = cudaMemcpyFromSymbol(&sums, phase_sums, sizeof sums);
  const PhaseSums zeros{};
  if (status == cudaSuccess) status = cudaMemcpyToSymbol(phase_sums, &zeros, sizeof zeros);
  if (status != cudaSuccess) return status;
  std::FILE* const out = std::fopen(file, "a");
  if (out == nullptr) return cudaErrorInvalidValue;
  std::fprintf(out, "{\"kernel\": \"%s\", \"blocks\": %lld, \"phases\": {", kernel, static_cast<long long>(blocks));
  const char* between = "";
  for (int phase = 0; phase < kPhases; ++phase) {
    if (sums.count[phase] == 0) continue;
    std::fprintf(out, "%s\"%s\": [%llu, %.0f]", between, kPhaseNames[phase], sums.count[phase],
                 static_cast<double>(sums.cycles[phase]) / static_cast<double>(sums.count[phase]));
    between = ", ";
  }
  std::fprintf(out, "}}\n");
  std::fclose(out);
  return cudaSuccess;
}

}  // namespace ringspan::cuda
