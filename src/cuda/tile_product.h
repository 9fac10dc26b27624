// The two products that attention consists of, on tiles in shared memory, for the tile machine:
//     product_nt   C += A B^T           A and B in shared memory, both with the inner dimension dense: scores and dp
//     product_rn   C += W B             W a C fragment of an earlier product, B in shared memory: p v, ds k, p^T do, ds^T q
// 16-bit operands go through tensor cores (mma.sync); float32 ones through the ordinary units, in the same fragments, so that
// products are those of IEEE float32: a split into tf32 parts would make NaN of scores that overflow to -inf.
//
// No barrier but where said; the warp's own rows only. Cost: 2 kRows kCols kDim operations each.
#pragma once

#include "cuda/machine.h"

namespace ringspan::cuda {

// A: rows of the block, B: kCols rows; kDim inner elements.
template <typename P, typename M>
RINGSPAN_DEVICE void product_nt(M& m, typename M::template Registers<float, P::kCols / 2>& c, const typename P::Element* a,
                                const typename P::Element* b) {
  if constexpr (P::kHalf) {
    RINGSPAN_UNROLL
    for (int k = 0; k < P::kDim; k += 16) {
      typename M::template Registers<std::uint32_t, 4> a_part;
      m.template load_matrix<false>(a_part, [&](int thread) {
        const int lane = thread % 32;
        return a + (thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8) * P::kLead + k + lane / 16 * 8;
      });
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kCols; j += 16) {
        typename M::template Registers<std::uint32_t, 4> b_part;
        m.template load_matrix<false>(b_part, [&](int thread) {
          const int lane = thread % 32;
          return b + (j + lane / 16 * 8 + lane % 8) * P::kLead + k + lane / 8 % 2 * 8;
        });
        m.template mma<P::kType>(c, j / 8, a_part, b_part, 0);
        m.template mma<P::kType>(c, j / 8 + 1, a_part, b_part, 1);
      }
    }
  } else {
    m.each([&](int thread) {
      const Lane lane = lane_of(thread);
      const float* upper = a + lane.row * P::kLead;
      const float* lower = upper + 8 * P::kLead;
      float(&out)[P::kCols / 2] = c[thread];
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

// W: kRows x kCols in fragments, B: kCols rows of kDim. For float32 `stage` (kRows x kStageLead) takes the weights on the way,
// with two barriers.
template <typename P, typename M>
RINGSPAN_DEVICE void product_rn(M& m, typename M::template Registers<float, P::kDim / 2>& c,
                                typename M::template Registers<float, P::kCols / 2>& w, const typename P::Element* b,
                                float* stage) {
  if constexpr (P::kHalf) {
    RINGSPAN_UNROLL
    for (int k = 0; k < P::kCols; k += 16) {
      typename M::template Registers<std::uint32_t, 4> a_part;
      m.each([&](int thread) {
        const float* first = &w[thread][k / 2];
        a_part[thread][0] = M::template pack<P::kType>(first[0], first[1]);
        a_part[thread][1] = M::template pack<P::kType>(first[2], first[3]);
        a_part[thread][2] = M::template pack<P::kType>(first[4], first[5]);
        a_part[thread][3] = M::template pack<P::kType>(first[6], first[7]);
      });
      RINGSPAN_UNROLL
      for (int j = 0; j < P::kDim; j += 16) {
        typename M::template Registers<std::uint32_t, 4> b_part;
        m.template load_matrix<true>(b_part, [&](int thread) {
          const int lane = thread % 32;
          return b + (k + lane / 8 % 2 * 8 + lane % 8) * P::kLead + j + lane / 16 * 8;
        });
        m.template mma<P::kType>(c, j / 8, a_part, b_part, 0);
        m.template mma<P::kType>(c, j / 8 + 1, a_part, b_part, 1);
      }
    }
  } else {
    m.sync();
    stage_weights<P>(m, w, stage);
    m.sync();
    m.each([&](int thread) {
      const Lane lane = lane_of(thread);
      const float* upper = stage + lane.row * P::kStageLead;
      const float* lower = upper + 8 * P::kStageLead;
      float(&out)[P::kDim / 2] = c[thread];
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

}  // namespace ringspan::cuda
