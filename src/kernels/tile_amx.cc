// AMX: tiles of bfloat16 (AMX-TILE, AMX-BF16), with AVX-512 and AVX512-BF16 for everything else.
#if defined(__x86_64__)
#include "kernels/isa_avx512.h"
#include "kernels/tile_pairs.h"

namespace ringspan::kernels {
namespace {

// Palette 1; all eight tiles have 16 rows of 64 bytes. A constant: GCC does not know that the instruction reads all of it.
alignas(64) constexpr std::uint8_t kConfiguration[64] = {
    1,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  // palette
    64, 0,  64, 0,  64, 0,  64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  // row bytes
    0,  0,  0,  0,  0,  0,  0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  //
    16, 16, 16, 16, 16, 16, 16, 16};                            // rows

// The compiler does not know that a load of a tile reads memory: what it reads must have been written before this.
RINGSPAN_INLINE void to_tiles() { __asm__ volatile("" ::: "memory"); }

template <int kTile>
RINGSPAN_INLINE void load_tile(const void* data, std::int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kTile));
}
// Of 1 KiB in one piece that will not be read again soon.
template <int kTile>
RINGSPAN_INLINE void stream_tile(const void* data) {
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(std::int64_t{64}), "i"(kTile));
}
template <int kTile>
RINGSPAN_INLINE void store_tile(void* data, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
}
// Makes it zero, as sums begin and as operands end, after their last product. The two hardware threads of a core share the
// registers that stand behind their tiles, and one that is zero takes none: with all eight in use beside a thread that uses
// tiles, too, each load or product waits for a register, for twice to three times as long as it takes.
template <int kTile>
RINGSPAN_INLINE void drop_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
RINGSPAN_INLINE void begin_sums(const float* c, std::int64_t c_stride, bool add) {
  if (add) {
    load_tile<kTile>(c, c_stride * 4);
  } else {
    drop_tile<kTile>();
  }
}
template <int kSums, int kLeft, int kRight>
RINGSPAN_INLINE void add_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

// Blocks of 32 x 32.
struct Dot {
  static constexpr bool kSplits = true;
  static constexpr bool kFetchesQueries = false;
  static constexpr bool kNarrow = false;
  static constexpr bool kInRegisters = false;
  // Which forward tiles have queries along vectors (tile_amx_forward.h).
  static constexpr bool turns(const TileDims& dims) { return dims.dtype == kBFloat16Type; }

  struct Session {
    Session() { _tile_loadconfig(kConfiguration); }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <typename Products>
  static void multiply(int rows, int columns, int depth, Left left, const Right& right, float* c, std::int64_t c_stride,
                       bool add, Ahead* ahead) {
    to_tiles();
    for (; rows > 0; rows -= kPairRows, left.data += kPairRows * left.stride, c += kPairRows * c_stride) {
      if (rows > 16) {
        blocks<Products, true>(columns, depth, left, right, c, c_stride, add, ahead);
      } else {
        blocks<Products, false>(columns, depth, left, right, c, c_stride, add, ahead);
      }
    }
  }

 private:
  // Sums of a block are stored beside the first products of the next one: a store waits for the last product.
  template <typename Products, bool kTwoRows>
  static void blocks(int columns, int depth, const Left& left, const Right& right, float* c, std::int64_t c_stride, bool add,
                     Ahead* ahead) {
    float* before = nullptr;
    for (int column = 0; column < columns; column += 2 * kPanelColumns) {
      if (columns - column > kPanelColumns) {
        block<Products, kTwoRows, true>(left, right.at(column, 0), depth, c + column, c_stride, add, before);
        before = c + column;
      } else {
        store_sums<kTwoRows, true>(before, c_stride);
        block<Products, kTwoRows, false>(left, right.at(column, 0), depth, c + column, c_stride, add, nullptr);
        store_sums<kTwoRows, false>(c + column, c_stride);
        before = nullptr;
      }
      if (ahead != nullptr) fetch_lines(ahead, ahead->step);
    }
    store_sums<kTwoRows, true>(before, c_stride);
  }

  template <bool kTwoRows, bool kTwoPanels>
  RINGSPAN_INLINE static void store_sums(float* c, std::int64_t c_stride) {
    if (c == nullptr) return;
    store_tile<0>(c, c_stride * 4);
    if (kTwoPanels) store_tile<1>(c + 16, c_stride * 4);
    if (kTwoRows) store_tile<2>(c + 16 * c_stride, c_stride * 4);
    if (kTwoRows && kTwoPanels) store_tile<3>(c + 16 * c_stride + 16, c_stride * 4);
  }
  template <int kTile>
  RINGSPAN_INLINE static void switch_sums(float* before, const float* c, std::int64_t c_stride, bool add) {
    if (before != nullptr) store_tile<kTile>(before, c_stride * 4);
    begin_sums<kTile>(c, c_stride, add);
  }

  // Tiles 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right ones. before: whose sums they still hold, or nullptr.
  template <typename Products, bool kTwoRows, bool kTwoPanels>
  static void block(const Left& left, const Right& right, int depth, float* c, std::int64_t c_stride, bool add, float* before) {
    const std::int64_t left_bytes = left.stride * 2, below = 16 * c_stride;
    const auto at = [&](std::int64_t offset) { return before == nullptr ? nullptr : before + offset; };
    for (int k = 0; k < depth; k += kChunk) {
      RINGSPAN_UNROLL for (int n = 0; n < Products::kCount; ++n) {
        const int p = Products::kLeft[n], q = Products::kRight[n];
        const int previous = at_least(n - 1, 0), following = at_most(n + 1, Products::kCount - 1);
        const bool new_left = n == 0 || p != Products::kLeft[previous], new_right = n == 0 || q != Products::kRight[previous];
        const bool last_left = n == following || p != Products::kLeft[following];
        const bool last_right = n == following || q != Products::kRight[following];
        const Word* const a = left.data + p * left.plane + k;
        const Word* const b = right.data + q * right.plane + k * kPanelColumns;
        const bool begins = n == 0 && k == 0;
        if (new_right) stream_tile<6>(b);
        if (new_left) load_tile<4>(a, left_bytes);
        if (begins) switch_sums<0>(before, c, c_stride, add);
        add_product<0, 4, 6>();
        if (kTwoRows) {
          if (new_left) load_tile<5>(a + 16 * left.stride, left_bytes);
          if (begins) switch_sums<2>(at(below), c + below, c_stride, add);
          add_product<2, 5, 6>();
        }
        if (last_right) drop_tile<6>();
        if (kTwoPanels) {
          if (new_right) stream_tile<7>(b + right.panel);
          if (begins) switch_sums<1>(at(16), c + 16, c_stride, add);
          add_product<1, 4, 7>();
        }
        if (last_left) drop_tile<4>();
        if (kTwoPanels && kTwoRows) {
          if (begins) switch_sums<3>(at(below + 16), c + below + 16, c_stride, add);
          add_product<3, 5, 7>();
        }
        if (last_left) drop_tile<5>();
        if (last_right) drop_tile<7>();
      }
    }
  }
};

}  // namespace
}  // namespace ringspan::kernels

#include "kernels/tile_amx_forward.h"
#include "kernels/tile_pairs_backward.h"

namespace ringspan::kernels {
namespace {

ForwardBytes forward_bytes_amx(const TileDims& dims) {
  const ForwardBytes bytes = forward_bytes_by_type(dims);
  if (!Dot::turns(dims)) return bytes;
  const ForwardBytes turned = TurnedParts(dims).bytes(dims);  // few queries have the other forms of keys and values
  const auto larger = [](std::int64_t a, std::int64_t b) { return a < b ? b : a; };
  return {larger(bytes.keys, turned.keys), larger(bytes.values, turned.values), larger(bytes.queries, turned.queries),
          larger(bytes.work, turned.work)};
}
bool pack_keys_amx(const TileDims& dims, void* out, const RowSource& k) {
  return Dot::turns(dims) ? pack_keys_turned(out, k) : pack_keys_by_type(dims, out, k);
}
bool pack_values_amx(const TileDims& dims, void* out, const RowSource& v) {
  return Dot::turns(dims) ? pack_values_turned(dims, out, v) : pack_values_by_type(dims, out, v);
}
bool pack_queries_amx(const TileDims& dims, void* out, const RowSource& q, float scale) {
  return Dot::turns(dims) ? pack_queries_turned(dims, out, q) : pack_queries_by_type(dims, out, q, scale);
}
void attend_amx(const ForwardTile& tile) {
  if (Dot::turns(tile.dims)) {
    attend_turned(tile);
  } else {
    attend_by_type(tile);
  }
}

constexpr TileOps make_amx_tile_ops() {
  TileOps ops = make_pair_tile_ops();
  ops.forward_bytes = forward_bytes_amx;
  ops.pack_keys = pack_keys_amx, ops.pack_values = pack_values_amx, ops.pack_queries = pack_queries_amx;
  ops.attend = attend_amx;
  return ops;
}

}  // namespace

const TileOps kTileAmx = make_amx_tile_ops();
}  // namespace ringspan::kernels
#endif
