// The two products that attention consists of, on tiles in shared memory, for the tile machine:
//     product_nt   C = A B^T            A and B in shared memory, both with the inner dimension dense: scores and dp
//     product_rn   C += W B             W a C fragment of an earlier product, B in shared memory: p v, ds k, p^T do, ds^T q
// 16-bit operands go through tensor cores (mma.sync); float32 ones through the ordinary units, in the same fragments, so that
// products are those of IEEE float32: a split into tf32 parts would make NaN of scores that overflow to -inf.
//
// c(part), w(part): registers of one of the kParts parts of the block's rows, which share what is read of B (tile_policy.h).
// No barrier but where said; the warp's own rows only. Cost: 2 kParts kRows kCols kDim operations each.
#pragma once

#include "cuda/copy_tile.h"
#include "cuda/non_finite.h"

namespace ringspan::cuda {

// The place of a tile's elements, for copy_tile.h.
template <typename P>
struct PaddedTile {
  static constexpr int kPeriod = 1;
  static constexpr int kRowBytes = P::kLead * static_cast<int>(sizeof(typename P::Element));
  static RINGSPAN_DEVICE int offset(int row, int chunk) { return row * kRowBytes + chunk * 16; }
};

// kRows rows of an operand to `tile`.
template <typename P, int kRows, typename M>
RINGSPAN_DEVICE void copy_rows(M& m, typename P::Element* tile, const TileRows<typename P::Element>& from) {
  copy_tile<PaddedTile<P>, kRows, P::kDim, typename P::Element>(m, reinterpret_cast<unsigned char*>(tile), from.rows,
                                                                from.first, from.valid, from.width);
}

// Anew: C = A B^T. A: rows of the block, B: kCols rows; kDim inner elements.
template <typename P, int kParts, typename M, typename Parts>
RINGSPAN_DEVICE void product_nt(M& m, Parts&& c, const typename P::Element* a, const typename P::Element* b) {
  m.each([&](int thread) {
    RINGSPAN_UNROLL
    for (int part = 0; part < kParts; ++part) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kCols / 2; ++index) c(part)[thread][index] = 0.0F;
    }
  });
  if constexpr (P::kHalf) {
    RINGSPAN_UNROLL
    for (int k = 0; k < P::kDim; k += 16) {
      typename M::template Registers<std::uint32_t, 4> a_parts[kParts];
      RINGSPAN_UNROLL
      for (int part = 0; part < kParts; ++part) {
        m.template load_matrix<false>(a_parts[part], [&](int thread) {
          const int lane = thread % 32;
          const int row = part * P::kRows + thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
          return a + row * P::kLead + k + lane / 16 * 8;
        });
      }
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols; j += 16) {
        typename M::template Registers<std::uint32_t, 4> b_part;
        m.template load_matrix<false>(b_part, [&](int thread) {
          const int lane = thread % 32;
          return b + (j + lane / 16 * 8 + lane % 8) * P::kLead + k + lane / 8 % 2 * 8;
        });
        RINGSPAN_UNROLL
        for (int part = 0; part < kParts; ++part) {
          m.template mma<P::kType>(c(part), j / 8, a_parts[part], b_part, 0);
          m.template mma<P::kType>(c(part), j / 8 + 1, a_parts[part], b_part, 1);
        }
      }
    }
  } else {
    static_assert(kParts == 1);
    m.each([&](int thread) {
      const Lane lane = lane_of(thread);
      const float* upper = a + lane.row * P::kLead;
      const float* lower = upper + 8 * P::kLead;
      float(&out)[P::kCols / 2] = c(0)[thread];
      for (int k = 0; k < P::kDim; k += 4) {
        RINGSPAN_UNROLL
        for (int j = 0; j < P::kCols / 8; ++j) {
          RINGSPAN_UNROLL
          for (int e = 0; e < 2; ++e) {
            const float* column = b + (j * 8 + lane.column + e) * P::kLead + k;
            RINGSPAN_UNROLL
            for (int i = 0; i < 4; ++i) {
              out[j * 4 + e] += upper[k + i] * column[i];
              out[j * 4 + 2 + e] += lower[k + i] * column[i];
            }
          }
        }
      }
    });
  }
}

// The weights of a tile as rows in shared memory. No barrier.
template <typename P, typename M>
RINGSPAN_DEVICE void stage_weights(M& m, typename M::template Registers<float, P::kCols / 2>& w, float* stage) {
  m.each([&](int thread) {
    const Lane lane = lane_of(thread);
    RINGSPAN_UNROLL
    for (int j = 0; j < P::kCols / 8; ++j) {
      RINGSPAN_UNROLL
      for (int i = 0; i < 4; ++i) {
        stage[(lane.row + i / 2 * 8) * P::kStageLead + j * 8 + lane.column + i % 2] = w[thread][j * 4 + i];
      }
    }
  });
}

// W: kRows x kCols in fragments, B: kCols rows of kDim. For float32 `stage` (kRows x kStageLead floats) takes the weights on
// the way; a warp writes and reads its own rows there.
template <typename P, int kParts, typename M, typename Parts, typename WeightParts>
RINGSPAN_DEVICE void product_rn(M& m, Parts&& c, WeightParts&& w, const typename P::Element* b, unsigned char* stage) {
  if constexpr (P::kHalf) {
    RINGSPAN_UNROLL
    for (int k = 0; k < P::kCols; k += 16) {
      typename M::template Registers<std::uint32_t, 4> a_parts[kParts];
      m.each([&](int thread) {
        RINGSPAN_UNROLL
        for (int part = 0; part < kParts; ++part) {
          const float* first = &w(part)[thread][k / 2];
          RINGSPAN_UNROLL
          for (int i = 0; i < 4; ++i) {
            a_parts[part][thread][i] = M::template pack<P::kType>(first[2 * i], first[2 * i + 1]);
          }
        }
      });
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kDim; j += 16) {
        typename M::template Registers<std::uint32_t, 4> b_part;
        m.template load_matrix<true>(b_part, [&](int thread) {
          const int lane = thread % 32;
          return b + (k + lane / 8 % 2 * 8 + lane % 8) * P::kLead + j + lane / 16 * 8;
        });
        RINGSPAN_UNROLL
        for (int part = 0; part < kParts; ++part) {
          m.template mma<P::kType>(c(part), j / 8, a_parts[part], b_part, 0);
          m.template mma<P::kType>(c(part), j / 8 + 1, a_parts[part], b_part, 1);
        }
      }
    }
  } else {
    static_assert(kParts == 1);
    float* const weights = reinterpret_cast<float*>(stage);
    m.sync_warps();
    stage_weights<P>(m, w(0), weights);
    m.sync_warps();
    m.each([&](int thread) {
      const Lane lane = lane_of(thread);
      const float* upper = weights + lane.row * P::kStageLead;
      const float* lower = upper + 8 * P::kStageLead;
      float(&out)[P::kDim / 2] = c(0)[thread];
      for (int k = 0; k < P::kCols; k += 4) {
        RINGSPAN_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* row = b + (k + i) * P::kLead + lane.column;
          RINGSPAN_UNROLL
          for (int j = 0; j < P::kDim / 8; ++j) {
            RINGSPAN_UNROLL
            for (int e = 0; e < 2; ++e) {
              out[j * 4 + e] += upper[k + i] * row[j * 8 + e];
              out[j * 4 + 2 + e] += lower[k + i] * row[j * 8 + e];
            }
          }
        }
      }
    });
  }
}

// Brings what of a tile of values is not finite to the rows that see it, and 0 to shared memory in its place; kind_of as in
// non_finite.h, part by part. `pairs`: kRows x kCols bytes. Barriers.
template <typename P, int kParts, typename M, typename Parts, typename KindOf>
RINGSPAN_DEVICE void exclude_non_finite(M& m, typename P::Element* elements, const TileRows<typename P::Element>& from,
                                        Parts&& sums, unsigned char* pairs, typename M::template Registers<int, 1>& flags,
                                        KindOf&& kind_of) {
  auto* const tile = reinterpret_cast<unsigned char*>(elements);
  find_non_finite<P, PaddedTile<P>>(m, tile, flags);
  if (!m.sync_any(flags)) return;
  clear_non_finite<P, PaddedTile<P>>(m, tile);
  RINGSPAN_UNROLL
  for (int part = 0; part < kParts; ++part) {
    note_pairs<P>(m, pairs, [&](int thread) { return kind_of(part, thread); });
    m.sync();
    add_non_finite<P>(m, sums(part), pairs, from);
    m.sync();
  }
}

// Whether a sum is NaN or infinite: as it is where a value was, with whatever weight, and then nothing makes it finite again.
// So tiles need not be searched as they pass: a block whose sums are finite is done, others begin anew and look at every
// tile. A barrier.
template <typename P, int kParts, typename M, typename Parts>
RINGSPAN_DEVICE bool any_non_finite(M& m, Parts&& sums, typename M::template Registers<int, 1>& flags) {
  m.each([&](int thread) {
    flags[thread][0] = 0;
    RINGSPAN_UNROLL
    for (int part = 0; part < kParts; ++part) {
      RINGSPAN_UNROLL
      for (int index = 0; index < P::kDim / 2; ++index) {
        if (!is_finite_word<DType::float32>(bits_of(sums(part)[thread][index]))) flags[thread][0] = 1;
      }
    }
  });
  return m.sync_any(flags);
}

}  // namespace ringspan::cuda
