// TileOps: what an instruction set provides to the tiled kernels: packing, and the arithmetic of one tile of queries x keys.
//
// All arithmetic is float32; packing converts from the storage type. The drivers (attend_tiled.cc, attend_backward_tiled.cc)
// walk tasks, cut tiles, own the scratch and know nothing of vectors; an ISA file (tile_avx512.cc, ...) knows nothing of
// tasks. Everything crosses here as plain structs and function pointers, so that no inline function is shared between code
// compiled for different machines.
//
// Packed forms of a matrix of `rows` x `width` (w = vector width, panel = columns of one register tile):
//   columns  transposed: panels of `panel` rows, each stored [width][panel]; the last panel has round_up(rest, w) rows, the
//            added ones zero
//   panels   panels of `panel` elements, each stored [rows][panel]; the last has round_up(rest, w) elements, added ones zero
//   rows     [rows][stride]
//
// A result is the same whatever rows share a tile: every element of a product is one chain of fused multiply-adds in order
// of depth, beginning at +0, to which the zeros of masked pairs add nothing. That is why tiles may be cut anywhere.
#pragma once

#include <cstdint>

namespace ringspan::kernels {

inline constexpr int kRowBlock = 6;         // rows of a register tile
inline constexpr int kQueryTile = 96;       // forward: queries of a tile
inline constexpr int kKeyTile = 256;        // forward: keys of a tile
inline constexpr int kScorePad = 16;        // added to the row stride of scores, against cache set conflicts
inline constexpr int kGradQueryTile = 128;  // backward: queries of a tile

// Rows of the storage type: row r is at data + index[r] * stride elements (index == nullptr: r).
struct RowSource {
  const void* data;
  std::int64_t stride;
  const std::int32_t* index;
  int rows;
  int width;
};

// score = softcap tanh(score / softcap), where softcap > 0; then - slope |distance|, where slope != nullptr.
struct ForwardTile {
  int rows, keys, head_dim, head_dim_v;
  const float* q;  // rows, times scale
  std::int64_t q_stride;
  const float* k;                   // columns (of keys)
  const float* v;                   // panels (of head_dim_v)
  bool v_finite;                    // otherwise a probability of zero must not meet v
  const std::int32_t *begin, *end;  // keys that each row sees, [begin, end) within the tile; empty: the row is left alone
  float *m, *l, *acc;               // states of the rows; acc is padded to a multiple of w
  std::int64_t acc_stride;
  float* scores;  // scratch: rows x score_stride
  std::int64_t score_stride;
  float softcap;
  const float* slope;
  const std::int64_t* distance;  // per row: j - i - diagonal of the tile's first key
  std::int64_t distance_step;
  const float* factors;  // dropout: rows x score_stride, valid in [begin, end); nullptr: none
};

struct BackwardTile {
  int rows, keys, head_dim, head_dim_v;       // rows: queries
  const float *q_columns, *q_panels;          // times scale
  const float *d_out_columns, *d_out_panels;  // times output_scale
  const float *k_rows, *v_rows;
  std::int64_t k_stride, v_stride;
  const float* k_panels;                    // times scale
  bool queries_finite, keys_finite;         // otherwise a gradient of zero must not meet them
  const float *lse, *delta;                 // per row
  const std::int32_t *key_begin, *key_end;  // per row: the keys it sees
  const std::int32_t *row_begin, *row_end;  // per key: the rows that see it
  float *p, *ds;                            // scratch: keys x score_stride
  std::int64_t score_stride;
  float *dk, *dv;  // accumulators, keys x stride, padded to a multiple of w
  std::int64_t dk_stride, dv_stride;
  float* const* dq;  // per row, head_dim elements
  float softcap;
  const float* slope;
  const std::int64_t* origin;  // per row: i + diagonal
  std::int64_t key_first, key_step;
  const float* factors;  // dropout: keys x score_stride; nullptr: none
};

struct TileOps {
  int width;  // w
  int panel;
  // Indexed by DType. The source is multiplied with `scale`.
  void (*pack_columns[3])(float* out, const RowSource& source, float scale);
  bool (*pack_panels[3])(float* out, const RowSource& source, float scale);  // returns whether all elements are finite
  void (*pack_rows[3])(float* out, std::int64_t stride, const RowSource& source, float scale);
  void (*attend)(const ForwardTile& tile);
  void (*attend_backward)(const BackwardTile& tile);
};

// Only to be called where the instruction set is present.
extern const TileOps kTilePortable;
#if defined(__x86_64__)
extern const TileOps kTileAvx2;
extern const TileOps kTileAvx512;
#endif

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace ringspan::kernels
