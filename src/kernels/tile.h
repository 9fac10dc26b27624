// TileOps: what an instruction set provides to the tiled kernels: packing, and the arithmetic of one tile of queries x keys.
//
// The drivers (attend_tiled.cc, attend_backward_tiled.cc) walk tasks, cut tiles, own the scratch and know nothing of vectors
// nor of packed forms, which are opaque bytes to them; an ISA file (tile_avx512.cc, ...) knows nothing of tasks. Everything
// crosses here as plain structs and function pointers, so that no inline function is shared between code compiled for
// different machines.
//
// Sums are float32. Two families of operands: float32, converted when packed (tile_generic.h), and pairs of bfloat16
// (tile_pairs.h), which split a float16 into two.
//
// A result is the same whatever rows share a tile: every element of a product is one chain in order of depth, beginning at +0
// (of chunks at fixed depths, in tile_pairs.h), to which the zeros of masked pairs add nothing. That is why tiles may be cut
// anywhere between rows.
#pragma once

#include <cstdint>

#include "kernels/tile_sizes.h"

namespace ringspan::kernels {

inline constexpr int kRowBlock = 6;   // rows of a register tile
inline constexpr int kFewRows = 48;   // forward: queries up to which keys are read in place
inline constexpr int kScorePad = 16;  // added to the row stride of scores, against cache set conflicts
// Of a call's own tile sizes: what code of an instruction set has room for on the stack.
inline constexpr int kMaxQueryTile = 384, kMaxGradQueryTile = 512, kMaxKeyTile = 1024;

// What packed forms depend on.
struct TileDims {
  int dtype;  // index of the DType
  int head_dim, head_dim_v;
  TileSize tile;  // of a full tile, never 0
};

// Rows that will be read next, to be fetched into the second cache while something else is computed. Strides in bytes.
struct AheadRows {
  const char* data;
  std::int64_t stride, row_lines, rows;
  std::int64_t next;  // of the lines of all rows
};
struct Ahead {
  static constexpr int kSources = 7, kValues = 1;  // values: of few queries, after their keys
  static constexpr int kPaceBits = 16;
  AheadRows rows[kSources];            // what is needed soonest first
  int burst = 0;                       // lines per step of packing, which has less to do than products
  int step = 0;                        // lines beside a block of products of pairs
  int done = 0;                        // of the sources
  std::int64_t pace = 1 << kPaceBits;  // lines beside a depth of products that fetch evenly, times 2^kPaceBits; never 0
};

// Rows of the storage type: row r is at data + index[r] * stride elements (index == nullptr: r).
struct RowSource {
  const void* data;
  std::int64_t stride;
  const std::int32_t* index;
  int rows;
  int width;
  Ahead* ahead = nullptr;
  const void* next = nullptr;  // of attend_few: rows that will be read after these
  std::int64_t next_stride = 0;
};

// score = scale q . k; softcap tanh(score / softcap), where softcap > 0; then - slope |distance|, where slope != nullptr.
struct ForwardTile {
  TileDims dims;
  int rows, keys;
  float scale;
  const void *q, *k, *v;            // packed
  bool q_finite, k_finite;          // may be needed where a finite element is packed as a sum
  bool v_finite;                    // otherwise a probability of zero must not meet v
  const std::int32_t *begin, *end;  // keys that each row sees, [begin, end) within the tile; empty: the row is left alone
  float *m, *l, *acc;               // states of the rows; acc is padded to a multiple of w
  std::int64_t acc_stride;
  void* work;
  float softcap;
  const float* slope;
  const std::int64_t* distance;  // per row: j - i - diagonal of the tile's first key
  std::int64_t distance_step;
  const float* factors;  // dropout: rows x factor_stride, valid in [begin, end); nullptr: none
  std::int64_t factor_stride;
  Ahead* ahead;   // nullptr: nothing to fetch
  int task_rows;  // of attend_few: rows of the task, which decide how, so that bits do not depend on how rows are dealt
};

struct BackwardTile {
  TileDims dims;
  int rows, keys;  // rows: queries
  float scale, output_scale;
  void *key_side, *query_side, *work;       // packed operands, with the gradients of the keys; scratch
  bool queries_finite, keys_finite;         // otherwise a gradient of zero must not meet them
  const float *lse, *delta;                 // per row
  const std::int32_t *key_begin, *key_end;  // per row: the keys it sees
  const std::int32_t *row_begin, *row_end;  // per key: the rows that see it
  float* const* dq;                         // per row, head_dim elements
  float softcap;
  const float* slope;
  const std::int64_t* origin;  // per row: i + diagonal
  std::int64_t key_first, key_step;
  const float* factors;  // dropout: rows x factor_stride, valid in [key_begin, key_end); nullptr: none
  std::int64_t factor_stride;
  Ahead* ahead;  // nullptr: nothing to fetch
};

// Sizes in bytes, multiples of 64.
struct ForwardBytes {
  std::int64_t keys, values, queries, work;  // of one tile each
};
struct BackwardBytes {
  std::int64_t key_side, query_side, work;
};

struct TileOps {
  int width;                                         // w
  TileSizes (*forward_sizes)(const TileDims& dims);  // whatever dims.tile is
  ForwardBytes (*forward_bytes)(const TileDims& dims);
  // Each returns whether all elements are finite.
  bool (*pack_keys)(const TileDims& dims, void* out, const RowSource& k);
  bool (*pack_values)(const TileDims& dims, void* out, const RowSource& v);
  bool (*pack_queries)(const TileDims& dims, void* out, const RowSource& q, float scale);
  void (*attend)(const ForwardTile& tile);
  // The same for at most kFewRows queries that all see every key of the tile, without ALiBi and dropout, from rows that are not
  // packed; k_space and v_space have room for packed ones. few_pays: of which dtypes; packing pays with others.
  bool few_pays[3];
  void (*attend_few)(const ForwardTile& tile, const RowSource& k, const RowSource& v, void* k_space, void* v_space);

  TileSizes (*backward_sizes)(const TileDims& dims);
  BackwardBytes (*backward_bytes)(const TileDims& dims);
  // Packs the keys of a tile and clears their gradients; then any number of query tiles; then adds the gradients to rows.
  void (*begin_keys)(BackwardTile& tile, const RowSource& k, const RowSource& v);
  void (*begin_queries)(BackwardTile& tile, const RowSource& q, const RowSource& d_out);
  void (*attend_backward)(const BackwardTile& tile);
  void (*end_keys)(const BackwardTile& tile, float* dk, std::int64_t dk_stride, float* dv, std::int64_t dv_stride);
};

// Only to be called where the instruction set is present.
extern const TileOps kTilePortable;
#if defined(__x86_64__)
extern const TileOps kTileAvx2;
extern const TileOps kTileAvx512;
extern const TileOps kTileAvx512Bf16;  // bfloat16 only
extern const TileOps kTileAmx;         // every type
#elif defined(__aarch64__)
extern const TileOps kTileNeon;
extern const TileOps kTileSve256;
#endif

}  // namespace ringspan::kernels
