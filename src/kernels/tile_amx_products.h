// Operands and products of the forward tile of bfloat16 in AMX (tile_amx_forward.h). Everything is turned, so that 16 queries
// lie along vectors:
//     s^T = k q^T        o^T += v^T p^T
// Keys are left operands as rows, values as columns, queries right ones; two rows of probabilities, side by side, are a row of
// the right operand of o^T.
#pragma once

#include "kernels/tile_pairs_product.h"

namespace ringspan::kernels {
namespace {

constexpr int kLanes = 16, kTileWords = 512, kTileFloats = 256;

// Where sums of values are, o^T, and with them of how many queries and keys steps are.
enum class Sums {
  kInTiles,  // of 16 queries and up to 64 columns
  kNear,     // of 32 queries, in the first cache, beside the weights of a step in tiles: 64 keys
  kFar,      // of 32 queries and many columns, which leave the first cache: loaded and stored once per 128 keys
};
constexpr int kColumnsInTiles = 64, kColumnsNear = 160;

constexpr int groups_of(Sums sums) { return sums == Sums::kInTiles ? 1 : 2; }  // of 16 queries
constexpr int step_keys_of(Sums sums) { return sums == Sums::kNear ? 64 : 128; }

// Where everything of a tile lies. Values: chunks of 32 keys, [columns][32] each.
struct TurnedParts {
  int depth, columns;  // of queries and keys, of values; padded
  Sums sums;
  int groups;  // of 16 queries in a step
  int step_keys;
  std::int64_t chunk, scores;  // words of a chunk; floats of the scores of a step
  explicit TurnedParts(const TileDims& dims)
      : depth(up32(dims.head_dim)),
        columns(up16(dims.head_dim_v)),
        sums(depth <= kColumnsInTiles && columns <= kColumnsInTiles ? Sums::kInTiles
             : columns <= kColumnsNear                              ? Sums::kNear
                                                                    : Sums::kFar),
        groups(groups_of(sums)),
        step_keys(step_keys_of(sums)),
        chunk(columns * std::int64_t{kChunk}),
        scores(groups * step_keys * std::int64_t{kLanes}) {}

  ForwardBytes bytes(const TileDims& dims) const {
    const std::int64_t keys = (dims.tile.keys + step_keys - 1) / step_keys * step_keys;
    return {to_line(2 * keys * depth), to_line(2 * keys * columns), to_line(2 * dims.tile.queries * depth),
            to_line(4 * 2 * scores + 4 * groups * columns * kLanes + 2 * chunk)};
  }
};

// The queries from `row` on and the keys from `key` on.
template <Sums kSums>
struct TurnedStep {
  static constexpr int kRows = groups_of(kSums) * kLanes, kMostKeys = step_keys_of(kSums);

  const ForwardTile* tile;
  int row, key;
  int keys;       // a multiple of 32, or 0: none
  bool is_first;  // of these queries
  Range seen;     // keys that any of them sees, rounded to multiples of 32
  Range common;   // keys that all of them see

  bool is_last() const { return key + keys >= seen.end; }
  bool is_whole() const { return common.begin <= key && key + keys <= common.end; }

  // The first one of queries from `row` on that see a key.
  static TurnedStep first_of_rows(const ForwardTile& tile, int row) {
    for (; row < tile.rows; row += kRows) {
      const int end = at_most(row + kRows, tile.rows);
      const Range range = union_of(tile.begin, tile.end, row, end);
      if (range.empty()) continue;
      Range common{tile.begin[row], tile.end[row]};
      for (int r = row + 1; r < end; ++r) common = {at_least(common.begin, tile.begin[r]), at_most(common.end, tile.end[r])};
      const Range seen{down32(range.begin), up32(range.end)};
      return TurnedStep{&tile, row, seen.begin, 0, true, seen, common}.cut();
    }
    return {};
  }
  TurnedStep next() const {
    if (is_last()) return first_of_rows(*tile, row + kRows);
    return TurnedStep{tile, row, key + keys, 0, false, seen, common}.cut();
  }

  __mmask16 present(int group) const { return first_of(tile->rows - row - group * kLanes); }
  __m512i begins(int group) const { return bounds(tile->begin, group); }
  __m512i ends(int group) const { return bounds(tile->end, group); }
  // Queries that see a key.
  __mmask16 seeing(int group, int at) const {
    return _mm512_cmple_epi32_mask(begins(group), _mm512_set1_epi32(at)) &
           _mm512_cmplt_epi32_mask(_mm512_set1_epi32(at), ends(group));
  }

 private:
  // They end at multiples of their length, whatever part of them is seen: results do not depend on the other queries.
  TurnedStep cut() const {
    TurnedStep step = *this;
    step.keys = at_most((key / kMostKeys + 1) * kMostKeys, seen.end) - key;
    return step;
  }
  // Absent rows are as the first one.
  __m512i bounds(const std::int32_t* list, int group) const {
    return _mm512_mask_loadu_epi32(_mm512_set1_epi32(list[row]), present(group), list + row + group * kLanes);
  }
};

// Products of a step; beside() after each slot of them, of which all take about as long. What is read once per step is loaded
// past the first cache, where scores stay. Sums are stored beside the products of the next ones: a store waits for the last
// product.
template <Sums kSums>
class TurnedProducts {
 public:
  using Step = TurnedStep<kSums>;
  static constexpr bool kHeld = kSums == Sums::kInTiles;  // in tiles 0 to 3, with queries in 4 and 5
  static constexpr int kGroups = groups_of(kSums);
  static constexpr std::int64_t kScores = Step::kMostKeys * std::int64_t{kLanes};  // of a group

  TurnedProducts(const ForwardTile& tile, const TurnedParts& parts)
      : tile_(tile),
        parts_(parts),
        sums_(static_cast<float*>(tile.work) + 2 * parts.scores),
        copy_(reinterpret_cast<Word*>(sums_ + kGroups * sums_stride())) {}

  int columns() const { return parts_.columns; }
  // Of a group, where they are in memory: [columns][16].
  float* sums(int group) const { return sums_ + group * sums_stride(); }

  int key_slots(const Step& step) const { return step.keys / kLanes * (parts_.depth / kChunk); }
  int value_slots(const Step& step) const {
    return step.keys / kChunk * (kSums == Sums::kFar ? (parts_.columns + 31) / 32 * 2 : parts_.columns / 16);
  }

  // s: [groups][keys of a step][16].
  template <typename Beside>
  RINGSPAN_INLINE void multiply_keys(const Step& step, float* s, const Beside& beside) {
    to_tiles();
    const std::int64_t group = kLanes * std::int64_t{parts_.depth};  // words of 16 queries or keys
    const Word* const queries = static_cast<const Word*>(tile_.q) + step.row * std::int64_t{parts_.depth};
    const Word* k = static_cast<const Word*>(tile_.k) + step.key * std::int64_t{parts_.depth};
    float* const end = s + step.keys * kLanes;
    float* before = nullptr;
    if constexpr (kHeld) {
      if (held_queries_ != queries) {
        held_queries_ = queries;
        load_tile<4>(queries, 64);
        if (parts_.depth > kChunk) load_tile<5>(queries + kTileWords, 64);
      }
      for (; s < end; before = s, s += kTileFloats, k += group) {
        if (before != nullptr) store_tile<6>(before, 64);
        drop_tile<6>();
        add_rows<6, 4>(k);
        beside();
        if (parts_.depth > kChunk) add_rows<6, 5>(k + kTileWords), beside();
      }
      store_tile<6>(before, 64);
      drop_tile<6>();
    } else {
      for (; s < end; before = s, s += 2 * kTileFloats, k += group) {
        for (int e = 0; e < parts_.depth; e += kChunk, k += kTileWords) {
          const Word* const q = queries + e * kLanes;
          stream_tile<4>(k);
          load_tile<6>(q, 64);
          if (e == 0) begin_scores<0>(before);
          add_product<0, 4, 6>();
          load_tile<7>(q + group, 64);
          if (e == 0) begin_scores<1>(before);
          add_product<1, 4, 7>();
          drop_tile<4>();
          beside();
          stream_tile<5>(k + group);
          if (e == 0) begin_scores<2>(before);
          add_product<2, 5, 6>();
          drop_tile<6>();
          if (e == 0) begin_scores<3>(before);
          add_product<3, 5, 7>();
          drop_tile<5>(), drop_tile<7>();
          beside();
        }
      }
      begin_scores<0>(before);
      begin_scores<1>(before);
      begin_scores<2>(before);
      begin_scores<3>(before);
    }
  }
  // weights: as s, words of two keys side by side at the beginning of each group.
  template <typename Beside>
  RINGSPAN_INLINE void multiply_values(const Step& step, const float* weights, const Beside& beside) const {
    to_tiles();
    const Word* const values = static_cast<const Word*>(tile_.v) + step.key / kChunk * parts_.chunk;
    const auto* const p = reinterpret_cast<const Word*>(weights);
    if constexpr (kHeld) {
      if (step.is_first) drop_tile<0>(), drop_tile<1>(), drop_tile<2>(), drop_tile<3>();
      const Word* v = values;
      for (int c = 0; c < step.keys; c += kChunk, v += parts_.chunk) {
        load_tile<6>(p + c * kLanes, 64);
        add_rows<0, 6>(v);
        beside();
        if (parts_.columns > 16) add_rows<1, 6>(v + kTileWords), beside();
        if (parts_.columns > 32) add_rows<2, 6>(v + 2 * kTileWords), beside();
        if (parts_.columns > 48) add_rows<3, 6>(v + 3 * kTileWords), beside();
      }
      drop_tile<6>();
    } else if constexpr (kSums == Sums::kNear) {
      const bool two = step.keys > kChunk;
      load_tile<4>(p, 64), load_tile<5>(p + 2 * kScores, 64);
      if (two) load_tile<6>(p + kTileWords, 64), load_tile<7>(p + 2 * kScores + kTileWords, 64);
      float *before = nullptr, *sums = sums_;
      for (const Word* v = values; v < values + parts_.chunk; before = sums, sums += kTileFloats, v += kTileWords) {
        stream_tile<2>(v);
        begin_values<0>(before, step, sums);
        add_product<0, 2, 4>();
        begin_values<1>(before, step, sums);
        add_product<1, 2, 5>();
        drop_tile<2>();
        beside();
        if (two) {
          stream_tile<3>(v + parts_.chunk);
          add_product<0, 3, 6>();
          add_product<1, 3, 7>();
          drop_tile<3>();
          beside();
        }
      }
      store_values<0>(before), store_values<1>(before);
      drop_tile<4>(), drop_tile<5>(), drop_tile<6>(), drop_tile<7>();
    } else {
      float *before = nullptr, *sums = sums_;
      for (int e = 0; e < parts_.columns; e += 32, before = sums, sums += 2 * kTileFloats) {
        const Word* v = values + e * kChunk;
        const bool two = e + 16 < parts_.columns;
        for (int c = 0; c < step.keys; c += kChunk, v += parts_.chunk) {
          stream_tile<4>(v);
          load_tile<6>(p + c * kLanes, 64);
          if (c == 0) begin_values<0>(before, step, sums);
          add_product<0, 4, 6>();
          load_tile<7>(p + 2 * kScores + c * kLanes, 64);
          if (c == 0) begin_values<1>(before, step, sums);
          add_product<1, 4, 7>();
          drop_tile<4>();
          if (c == 0) store_values<2>(before), store_values<3>(before);
          beside();
          if (two) {
            stream_tile<5>(v + kTileWords);
            if (c == 0) begin_values<2>(nullptr, step, sums);
            add_product<2, 5, 6>();
            if (c == 0) begin_values<3>(nullptr, step, sums);
            add_product<3, 5, 7>();
          }
          drop_tile<5>(), drop_tile<6>(), drop_tile<7>();
          beside();
        }
      }
      store_values<0>(before);
      store_values<1>(before);
      if (parts_.columns % 32 == 0) store_values<2>(before), store_values<3>(before);
    }
  }
  // Where values are not all finite: first without those, so that other queries keep their bits, then they alone.
  void multiply_visible_values(const Step& step, const float* s) {
    for (int g = 0; g < kGroups; ++g) {
      float* const sums = this->sums(g);
      if (step.is_first) fill(sums, 0, static_cast<int>(sums_stride()), 0.0F);
      for (int c = 0; c < step.keys; c += kChunk) {
        const Word* const values = static_cast<const Word*>(tile_.v) + (step.key + c) / kChunk * parts_.chunk;
        const Right p{reinterpret_cast<const Word*>(s + g * kScores) + c * kLanes, 0, 0};
        for (std::int64_t i = 0; i < parts_.chunk; i += 32)
          _mm512_storeu_si512(copy_ + i, finite_or_zero(_mm512_loadu_si512(values + i)));
        Dot::multiply<AllProducts<1>>(parts_.columns, kLanes, kChunk, Left{copy_, kChunk, 0}, p, sums, kLanes, true, nullptr);
        held_queries_ = nullptr;
        for (int e = 0; e < parts_.columns; ++e) {
          for (int i = 0; i < kChunk; ++i) {
            const Word value = values[e * kChunk + i];
            if (is_finite(value)) continue;
            const Reg product = Isa::fma(low_half(_mm512_set1_epi32(value)), columns_of<1>(p, i), Isa::load(sums + e * kLanes));
            _mm512_mask_storeu_ps(sums + e * kLanes, step.seeing(g, step.key + c + i), product);
          }
        }
      }
    }
  }

  // Sums that stay in tiles, in memory.
  void store_held() const {
    store_tile<0>(sums_, 64);
    if (parts_.columns > 16) store_tile<1>(sums_ + kTileFloats, 64);
    if (parts_.columns > 32) store_tile<2>(sums_ + 2 * kTileFloats, 64);
    if (parts_.columns > 48) store_tile<3>(sums_ + 3 * kTileFloats, 64);
  }
  void load_held() const {
    to_tiles();
    load_tile<0>(sums_, 64);
    if (parts_.columns > 16) load_tile<1>(sums_ + kTileFloats, 64);
    if (parts_.columns > 32) load_tile<2>(sums_ + 2 * kTileFloats, 64);
    if (parts_.columns > 48) load_tile<3>(sums_ + 3 * kTileFloats, 64);
  }

  // After some 1,500 cycles without a product they take twice as long for a while.
  static void keep_awake() {
    drop_tile<7>();
    add_product<6, 7, 4>();
  }

 private:
  std::int64_t sums_stride() const { return parts_.columns * std::int64_t{kLanes}; }

  // Tiles of two times 16 keys, and two groups.
  template <int kTile>
  RINGSPAN_INLINE static void begin_scores(float* before) {
    if (before != nullptr) store_tile<kTile>(before + kTile / 2 * kTileFloats + kTile % 2 * kScores, 64);
    drop_tile<kTile>();
  }
  // Products with rows of keys or values, which are in one piece.
  template <int kTile, int kRight>
  RINGSPAN_INLINE static void add_rows(const Word* rows) {
    stream_tile<7>(rows);
    add_product<kTile, 7, kRight>();
    drop_tile<7>();
  }
  // Tiles of two times 16 columns, and two groups.
  template <int kTile>
  RINGSPAN_INLINE void store_values(float* before) const {
    if (before != nullptr) store_tile<kTile>(before + kTile / 2 * kTileFloats + kTile % 2 * sums_stride(), 64);
  }
  template <int kTile>
  RINGSPAN_INLINE void begin_values(float* before, const Step& step, const float* sums) const {
    store_values<kTile>(before);
    begin_sums<kTile>(sums + kTile / 2 * kTileFloats + kTile % 2 * sums_stride(), kLanes, !step.is_first);
  }

  const ForwardTile& tile_;
  const TurnedParts& parts_;
  float* sums_;
  Word* copy_;
  const Word* held_queries_ = nullptr;  // in tiles 4 and 5
};

// Chunks of 16 keys in one piece each.
template <bool kPlain>
RINGSPAN_INLINE Word* pack_keys_turned(Word* to, const RowSource& k, int first, __m512i& top) {
  const int rows = kPlain ? kLanes : at_most(kLanes, k.rows - first);
  for (int e = 0; e < up32(k.width); e += kChunk, to += kTileWords) {
    for (int r = 0; r < rows; ++r) {
      __m512i words[1];
      load_wide<BFloat16, kPlain>(k, first + r, e, words, top);
      _mm512_storeu_si512(to + r * kChunk, words[0]);
    }
  }
  return to;
}
bool pack_keys_turned(void* out, const RowSource& k) {
  const bool plain = is_plain(k);
  __m512i top = _mm512_setzero_si512();
  Word* to = static_cast<Word*>(out);
  for (int first = 0; first < k.rows; first += kLanes)
    to = plain && first + kLanes <= k.rows ? pack_keys_turned<true>(to, k, first, top)
                                           : pack_keys_turned<false>(to, k, first, top);
  return within_limit<BFloat16>(top);
}
bool pack_values_turned(const TileDims& dims, void* out, const RowSource& v) {
  const TurnedParts parts(dims);
  bool finite = true;
  for (int row = 0; row < v.rows; row += kChunk) {
    if (v.ahead != nullptr) fetch_lines(v.ahead, 4 * v.ahead->burst);
    RowSource chunk = v;
    chunk.rows = at_most(kChunk, v.rows - row);
    chunk.data = static_cast<const Word*>(v.data) + row * v.stride;
    finite &= pack_left_columns<false>(static_cast<Word*>(out) + row / kChunk * parts.chunk, kChunk, chunk);
  }
  return finite;
}
bool pack_queries_turned(const TileDims& dims, void* out, const RowSource& q) {
  return pack_right_columns<BFloat16>(static_cast<Word*>(out), TurnedParts(dims).depth * std::int64_t{kLanes}, 0, q);
}

}  // namespace
}  // namespace ringspan::kernels
