#include "cuda/report.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "cuda/device_tensor_maps.h"

namespace ringspan::cuda {
namespace {

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string device_line(int index) {
  cudaDeviceProp properties{};
  const cudaError_t status = cudaGetDeviceProperties(&properties, index);
  if (status != cudaSuccess) return fmt::format("cuda:{}: {}", index, cudaGetErrorString(status));
  const std::string head =
      fmt::format("cuda:{}: {}, compute capability {}.{}, {} MiB, {} multiprocessors", index, properties.name, properties.major,
                  properties.minor, properties.totalGlobalMem >> 20, properties.multiProcessorCount);
  if (properties.major < 8) {
    return head + "; refused: the kernels need 8.0 or newer, which this CUDA cannot compile for. The CPU can be used";
  }
  std::string line =
      head + fmt::format(
                 "; attention runs with kernels of our own, where this build has code for it: mma.sync for 16-bit tensors, "
                 "float32 units for float32; {} KiB of shared memory per block",
                 properties.sharedMemPerBlockOptin >> 10);
  if (RINGSPAN_CUDA_SM90A && properties.major == 9 && properties.minor == 0) {
    line += has_tensor_maps() ? "; wgmma up to a head_dim of 128, whole tiles by TMA"
                              : "; wgmma up to a head_dim of 128, without TMA: the driver has no cuTensorMapEncodeTiled";
  }
  return line;
}

}  // namespace

std::vector<std::string> cuda_report() {
  std::vector<std::string> lines;
  int runtime = 0;
  int driver = 0;
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  static_cast<void>(cudaDriverGetVersion(&driver));
  lines.push_back(fmt::format("cuda: compiled with CUDA {} for {}", version_text(runtime), RINGSPAN_CUDA_ARCHITECTURES));
  if (driver == 0) {
    lines.push_back("cuda: no CUDA driver found; everything runs on the CPU");
    return lines;
  }
  lines.push_back(fmt::format("cuda: the driver is for CUDA {}", version_text(driver)));
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    lines.push_back(fmt::format("cuda: no device can be used: {}; everything runs on the CPU", cudaGetErrorString(status)));
    return lines;
  }
  for (int index = 0; index < count; ++index) lines.push_back(device_line(index));
  return lines;
}

}  // namespace ringspan::cuda
