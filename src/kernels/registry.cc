// The lists of kernels and the choice among them.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <string>

#include "kernels/attend.h"
#include "kernels/attend_tiled.h"
#include "kernels/reference.h"
#include "kernels/registry.h"
#include "kernels/tile.h"
#include "ringspan/error.h"

namespace ringspan::kernels {
namespace {

bool always() { return true; }
bool machine_has_portable() { return true; }
#if defined(__x86_64__)
bool machine_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool machine_has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && machine_has_avx2();
}
bool machine_has_avx512bf16() { return __builtin_cpu_supports("avx512bf16") && machine_has_avx512(); }

// Whether dot products of bfloat16 outrun multiply-adds of float32 in vectors: they have twice their rate on AMD's processors,
// half of it on Intel's since Sapphire Rapids, the first with arithmetic of float16 (docs/performance.md).
bool dot_products_pay() { return !(__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512fp16")); }

template <DType kType>
bool always_in_16_bits() {
  return kType != DType::float32;
}

// A process has to ask the system for the registers of AMX, once for all its threads, present and future.
bool machine_has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = [] {
    constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;  // of leaf 7; not every compiler knows their names
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    return machine_has_avx512bf16() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
bool machine_has_neon() { return true; }
bool machine_has_sve256() {
#if defined(__linux__)
  constexpr unsigned long kSve = 1UL << 22;       // HWCAP_SVE
  constexpr int kGetVectorLength = 51;            // PR_SVE_GET_VL
  constexpr int kLengthMask = 0xffff, k256 = 32;  // bytes
  return (getauxval(AT_HWCAP) & kSve) != 0 && (prctl(kGetVectorLength) & kLengthMask) == k256;
#else
  return false;
#endif
}
#endif

// A tiled kernel of one storage type on one instruction set.
template <DType kType, const TileOps& kOps, bool (*kMachineHas)(), bool (*kIsDefault)() = always>
struct Tiled {
  static constexpr auto is_default = kIsDefault;
  static TileSizes forward_sizes(const AttendShape& shape) {
    return kOps.forward_sizes({static_cast<int>(shape.dtype), shape.head_dim, shape.head_dim_v, {}});
  }
  static TileSizes backward_sizes(const AttendShape& shape) {
    return kOps.backward_sizes({static_cast<int>(shape.dtype), shape.head_dim, shape.head_dim_v, {}});
  }
  static bool supports(const AttendShape& shape) { return reference_supports(shape, kType) && kMachineHas(); }
  static std::int64_t forward_bytes(const AttendShape& shape) { return attend_tiled_scratch_bytes(kOps, shape); }
  static std::int64_t keys(const AttendShape& shape) { return attend_tiled_keys_without_state(kOps, shape); }
  static std::int64_t backward_bytes(const AttendShape& shape) { return attend_backward_tiled_scratch_bytes(kOps, shape); }
  static void forward(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
    attend_tiled(kOps, params, tasks, context);
  }
  static void backward(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
    attend_backward_tiled(kOps, params, tasks, context);
  }
};

template <DType kType>
struct Reference {
  static constexpr auto is_default = always;
  static constexpr auto forward_sizes = no_tile_sizes, backward_sizes = no_tile_sizes;
  static bool supports(const AttendShape& shape) { return reference_supports(shape, kType); }
  static std::int64_t forward_bytes(const AttendShape& shape) { return reference_scratch_bytes(shape); }
  static constexpr auto keys = any_keys;
  static std::int64_t backward_bytes(const AttendShape& shape) { return reference_scratch_bytes(shape); }
  static constexpr auto forward = attend_reference<kType>;
  static constexpr auto backward = attend_backward_reference<kType>;
};

// Named like the implementations of kernels.inc.
#if defined(__x86_64__)
template <DType kType>
using amx = Tiled<kType, kTileAmx, machine_has_amx, always_in_16_bits<kType>>;
template <DType kType>
using avx512bf16 = Tiled<kType, kTileAvx512Bf16, machine_has_avx512bf16, dot_products_pay>;
template <DType kType>
using avx512 = Tiled<kType, kTileAvx512, machine_has_avx512>;
template <DType kType>
using avx2 = Tiled<kType, kTileAvx2, machine_has_avx2>;

// By tiles of AMX where a task has so many queries and keys that their planes pay, else by vectors.
template <DType kType>
struct mixed : amx<kType> {
  using Vectors = avx512<kType>;
  using Tiles = amx<kType>;
  static constexpr auto is_default = always;
  static constexpr std::int64_t kLeastQueries = 256, kLeastKeys = 512;

  static std::int64_t forward_bytes(const AttendShape& shape) {
    return std::max(Tiles::forward_bytes(shape), Vectors::forward_bytes(own_sizes(shape)));
  }
  static std::int64_t keys(const AttendShape& shape) { return std::min(Tiles::keys(shape), Vectors::keys(own_sizes(shape))); }
  static std::int64_t backward_bytes(const AttendShape& shape) {
    return std::max(Tiles::backward_bytes(shape), Vectors::backward_bytes(own_sizes(shape)));
  }
  static void forward(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
    if (any_large(tasks)) return Tiles::forward(params, tasks, context);
    Vectors::forward(with_own_sizes(params), tasks, context);
  }
  static void backward(const AttendParams& params, std::span<const AttendTask> tasks, const Context& context) {
    if (any_large(tasks)) return Tiles::backward(params, tasks, context);
    Vectors::backward(with_own_sizes(params), tasks, context);
  }

 private:
  static bool any_large(std::span<const AttendTask> tasks) {
    const auto is_large = [](const AttendTask& task) { return task.q_count >= kLeastQueries && task.k_count >= kLeastKeys; };
    return std::any_of(tasks.begin(), tasks.end(), is_large);
  }
  static AttendShape own_sizes(AttendShape shape) {  // the call's are of tiles
    shape.tile = {0, 0};
    return shape;
  }
  static AttendParams with_own_sizes(AttendParams params) {
    params.shape = own_sizes(params.shape);
    return params;
  }
};
#elif defined(__aarch64__)
template <DType kType>
using neon = Tiled<kType, kTileNeon, machine_has_neon>;
template <DType kType>
using sve256 = Tiled<kType, kTileSve256, machine_has_sve256>;
#endif
template <DType kType>
using portable = Tiled<kType, kTilePortable, machine_has_portable>;
template <DType kType>
using reference = Reference<kType>;

constexpr Implementation kImplementations[] = {
#if defined(__x86_64__)
    {"amx", "AMX with tiles of bfloat16, AVX512-BF16", "float32: used when named", machine_has_amx},
    {"mixed", "AMX, AVX-512", "float32: amx from 256 queries and 512 keys on, else avx512", machine_has_amx},
    {"avx512bf16", "AVX512-BF16", "used when named where dot products are slower than multiply-adds: Intel",
     machine_has_avx512bf16},
    {"avx512", "AVX-512 F, DQ, BW and VL", "", machine_has_avx512},
    {"avx2", "AVX2, FMA and F16C", "", machine_has_avx2},
#elif defined(__aarch64__)
    {"neon", "every AArch64 machine", "has run in an emulator only", machine_has_neon},
    {"sve256", "SVE with vectors of 256 bits", "has run in an emulator only; used when named", machine_has_sve256},
#endif
    {"portable", "any machine", "", machine_has_portable},
    {"reference", "any machine", "the contract word by word, for comparison; used when named", machine_has_portable},
};

constexpr AttendKernel kAttendKernels[] = {
#define RINGSPAN_KERNEL(dtype, short_name, implementation) \
  {"attend_" #short_name "_" #implementation,              \
   implementation<DType::dtype>::supports,                 \
   implementation<DType::dtype>::forward_bytes,            \
   implementation<DType::dtype>::forward,                  \
   implementation<DType::dtype>::forward_sizes,            \
   implementation<DType::dtype>::keys,                     \
   false,                                                  \
   implementation<DType::dtype>::is_default},
#include "kernels/kernels.inc"
#undef RINGSPAN_KERNEL
};

constexpr AttendKernel kAttendBackwardKernels[] = {
#define RINGSPAN_KERNEL(dtype, short_name, implementation) \
  {"attend_backward_" #short_name "_" #implementation,     \
   implementation<DType::dtype>::supports,                 \
   implementation<DType::dtype>::backward_bytes,           \
   implementation<DType::dtype>::backward,                 \
   implementation<DType::dtype>::backward_sizes,           \
   any_keys,                                               \
   false,                                                  \
   implementation<DType::dtype>::is_default},
#include "kernels/kernels.inc"
#undef RINGSPAN_KERNEL
};

std::string describe(const AttendShape& shape) {
  std::string text = std::string(to_string(shape.dtype)) + ", head_dim " + std::to_string(shape.head_dim) + ", head_dim_v " +
                     std::to_string(shape.head_dim_v) + ", group " + std::to_string(shape.group) + ", threads " +
                     std::to_string(shape.threads);
  if (shape.softcap) text += ", softcap";
  if (shape.alibi) text += ", alibi";
  if (shape.dropout) text += ", dropout";
  return text;
}

bool is_named(std::string_view kernel, std::string_view name) {
  if (kernel == name) return true;
  return kernel.size() > name.size() && kernel.ends_with(name) && kernel[kernel.size() - name.size() - 1] == '_';
}

// One size of shape.tile against what the kernel takes.
void check_size(const AttendKernel& kernel, const char* name, int size, int TileSize::*of, const TileSizes& sizes) {
  if (size == 0) return;
  const int step = sizes.step.*of, least = sizes.least.*of, most = sizes.most.*of;
  if (step > 0 && size % step == 0 && size >= least && size <= most) return;
  const std::string given = std::string(name) + " (" + std::to_string(size) + ")", kernel_name(kernel.name);
  if (step == 0) throw InvalidArgument(given + " must be 0: kernel '" + kernel_name + "' has no tiles");
  const int first = (least + step - 1) / step * step, last = most / step * step;
  throw InvalidArgument(given + " must be 0 or a multiple of " + std::to_string(step) + " from " + std::to_string(first) +
                        " to " + std::to_string(last) + " for kernel '" + kernel_name + "'");
}

void check_tile(const AttendKernel& kernel, const AttendShape& shape) {
  const TileSizes sizes = kernel.tile_sizes(shape);
  check_size(kernel, "the queries of a tile", shape.tile.queries, &TileSize::queries, sizes);
  check_size(kernel, "the keys of a tile", shape.tile.keys, &TileSize::keys, sizes);
}

const AttendKernel& select(std::span<const AttendKernel> kernels, const AttendShape& shape, std::string_view name) {
  bool known = name.empty();
  std::string names;
  for (const AttendKernel& kernel : kernels) {
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
    if (name.empty() ? !kernel.is_default() : !is_named(kernel.name, name)) continue;
    known = true;
    if (!kernel.supports(shape)) continue;
    check_tile(kernel, shape);
    return kernel;
  }
  if (!known) throw InvalidArgument("unknown kernel '" + std::string(name) + "': expected one of " + names);
  const std::string which = name.empty() ? "no kernel supports " : "kernel '" + std::string(name) + "' does not support ";
  throw Unsupported(which + describe(shape) + " on this machine");
}

}  // namespace

std::span<const Implementation> implementations() { return kImplementations; }

std::span<const AttendKernel> attend_kernels() { return kAttendKernels; }
std::span<const AttendKernel> attend_backward_kernels() { return kAttendBackwardKernels; }

TileSize tile_of(const AttendKernel& kernel, const AttendShape& shape) {
  const TileSize own = kernel.tile_sizes(shape).own;
  return {shape.tile.queries == 0 ? own.queries : shape.tile.queries, shape.tile.keys == 0 ? own.keys : shape.tile.keys};
}

const AttendKernel& select_attend(const AttendShape& shape, std::string_view name) {
  return select(kAttendKernels, shape, name);
}

const AttendKernel& select_attend_backward(const AttendShape& shape, std::string_view name) {
  return select(kAttendBackwardKernels, shape, name);
}

}  // namespace ringspan::kernels
