// AVX-512 (F, DQ, BW, VL).
#if defined(__x86_64__)
#include "kernels/isa_avx512.h"

// The algorithm, over the Isa above.
#include "kernels/tile_generic.h"
#include "kernels/tile_generic_backward.h"

namespace ringspan::kernels {
const TileOps kTileAvx512 = make_tile_ops();
}
#endif
