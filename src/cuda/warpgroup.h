// What a Hopper block (sm_90a) has beyond the tile machine of machine.h: products by whole warpgroups with operands in shared
// memory, which run on while the threads do something else, and copies into shared memory that do the same. As there, a program
// is written once: HopperMachine (device_warpgroup.h) is the block, EmulatedHopperMachine (emulated_warpgroup.h) obeys the
// rules below and throws where one is broken.
//
// Thread 128 w + i belongs to warpgroup w, whose rows of the block's tile are 64 w .. 64 w + 63. Its fragments are those of
// machine.h, four warps one below the other: lane_of() of the thread holds for accumulators, and A from registers is four of
// the m16n8k16 fragments (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").
//
//   shared_address(p)            32-bit address of shared memory
//   uniform(value)               as there: around products there must be no branch that threads might take apart
//   copy_async(...)              as there, but waited for by arrive_when_copied()
//   fence_async()                fence.proxy.async.shared::cta: what the thread wrote so far, before what the other proxy reads
//   multiply<kType, kN, kMajor>(c, a, b, accumulate)        C (+)= A B, m64nNk16, A and B in shared memory: descriptors;
//                                a(warpgroup) and b as they are built by descriptor() below, A with K dense
//   multiply_from_registers<kType, kN>(c, a, first, b, accumulate)   A from a[thread][first .. first + 3], B with N dense
//   fence_registers(r...)        wgmma.fence, before products whose registers r were touched
//   commit_products(), wait_products<n>(r...)               groups of products; r: what may be touched again
//   min_or_nan(x, y)           the least, or NaN where x is
//   fetch_add(counter, n)      atomically, of memory, by one thread; returns what was there
//   any_of_warps(r)            r[thread][0] becomes whether any of the thread's warp was not 0
//   by_warps(r, body)          body(), which has no barrier of several warps, by the warps whose r[thread][0] is not 0: the
//   same
//                              in all threads of a warp
//
// Roles: warpgroups of one block, and halves of one, may run different programs, each with a machine of its own, to which the
// above belongs (sync() meets the role's threads, thread numbers begin at 0). They meet at barriers (mbarrier), 8 bytes of
// shared memory that the block initialises before its roles begin; a phase is over when all arrivals have come.
//   init_barrier(address, arrivals)                         by one thread
//   arrive_threads(b), arrive_warps(b)                      an arrival of each thread; kArrivalsOfWarp of each warp
//   arrive_when_copied(b)                                   of each thread, when all copies that it began have arrived
//   expect_bytes(b, n)                                      by one thread before its arrival: the phase waits for n bytes too
//   prefetch_maps(count)                                    by all threads of the role: the first maps are going to be used
//   copy_box<rows>(maps, map, to, corner, b)                by one thread, cp.async.bulk.tensor: rows x 64 elements from a
//   corner
//                                                           of a tile map on, swizzled, zeros beyond its ends; its bytes count
//                                                           at b when they are there. Through the async proxy: needs no fence
//   wait(b, parity)                                         until the phase with this parity, the first has 0, is over
//   note(phase)                                             the role's first warpgroup begins a phase (phases.h): for profiles
//   begin_turns(); take_turn(), pass_turn(); end_turns()    of the two warpgroups of a role, one at a time runs from
//   take_turn()
//                                                           to pass_turn(), equally often; for speed, not for order
//
// Rules (PTX ISA, "Async proxy", "wgmma.fence", "wgmma.wait_group"), each of which the emulation checks:
//   - products read shared memory through the async proxy, cp.async and ordinary stores write through the generic one. So of
//   what
//     another role wrote each thread fences (fence_async) after its wait(); of what its own role wrote the writing thread
//     fences and only then meets the others at sync()
//   - a buffer may be written again after the products that read it were waited for, by all threads (sync), or by those of
//     every warp that then arrived at the barrier which the writer waits for
//   - accumulators and A in registers are not touched from a product to its wait, and after a touch comes fence_registers()
#pragma once

#include <cstdint>

#include "cuda/machine.h"
#include "cuda/phases.h"

namespace ringspan::cuda {

inline constexpr int kWarpgroup = 128;     // threads
inline constexpr int kWarpgroupRows = 64;  // M of every product

// Tiles of 16-bit elements in shared memory, "128-byte swizzle": panels of 64 columns one behind the other, a panel has 128
// bytes for each row, and 16-byte chunk c of row r lies at chunk c ^ (r mod 8). Eight rows are the 1,024 bytes after which the
// pattern repeats; a tile begins at a multiple of that, as the hardware takes the pattern from address bits 4-6 and 7-9.
inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;

// Where chunk `chunk` (8 elements) of a row begins, in bytes from the begin of a tile of kRows rows.
template <int kRows>
RINGSPAN_DEVICE constexpr int chunk_offset(int row, int chunk) {
  return chunk / 8 * kRows * kPanelRowBytes + row * kPanelRowBytes + ((chunk ^ row) % 8) * 16;
}

// Where a box begins in a tile map (tile_maps.h).
struct BoxCorner {
  int column, row, head, item;
};

// The matrix descriptor of wgmma ("Matrix Descriptor Format"): addresses and offsets without their last four bits, of 18.
//   bits 0-13 start address; 16-29 leading, 32-45 stride dimension byte offset; 49-51 base offset: 0, since patterns begin at
//   multiples of 1,024; 62-63 swizzle: 0 none, 1 128 bytes, 2 64, 3 32
inline constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
RINGSPAN_DEVICE constexpr std::uint64_t encode_bytes(std::uint32_t bytes) { return (bytes & 0x3ffffU) >> 4; }
RINGSPAN_DEVICE constexpr std::uint64_t descriptor(std::uint32_t address, std::uint32_t leading, std::uint32_t stride) {
  return encode_bytes(address) | encode_bytes(leading) << 16 | encode_bytes(stride) << 32 | kSwizzle128;
}

// Which dimension of an operand is dense in shared memory: its inner one, or M or N ("imm-trans").
enum class Major : std::uint8_t { k, mn };

// K dense: rows are M or N, 16 elements of K from column `column` on (a multiple of 16). Stride: from 8 rows to the next 8.
// Leading: not used by this swizzle, since 16 elements lie within the 128 bytes; 1 by custom. The address moves by 32 bytes
// within the pattern, whose bits the hardware takes from the address itself.
template <int kRows>
RINGSPAN_DEVICE constexpr int offset_k(int row, int column) {
  return column / kPanelColumns * kRows * kPanelRowBytes + row * kPanelRowBytes + column % kPanelColumns * 2;
}
RINGSPAN_DEVICE constexpr std::uint64_t descriptor_k(std::uint32_t tile) { return descriptor(tile, 16, kSwizzleBytes); }

// N dense: rows are K, 16 of them from `row` on; columns from 0. Leading: from 64 columns to the next 64, a panel. Stride: from
// 8 rows to the next 8.
template <int kRows>
RINGSPAN_DEVICE constexpr std::uint64_t descriptor_mn(std::uint32_t tile) {
  return descriptor(tile, kRows * kPanelRowBytes, kSwizzleBytes);
}

// The descriptor of what begins `bytes` later. Of the low word only, so that the high one stays a constant: an address has 18
// bits, and its field does not overflow.
RINGSPAN_DEVICE constexpr std::uint64_t advance(std::uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000U) | (static_cast<std::uint32_t>(descriptor) + static_cast<std::uint32_t>(bytes >> 4));
}

}  // namespace ringspan::cuda
