// Sizes of the tiles that a tiled kernel cuts its work into. Plain numbers: code of every instruction set includes this.
#pragma once

namespace ringspan::kernels {

inline constexpr int kMaxHeadDim = 256;  // of q and k, and of v

// In a call, 0 stands for the implementation's own size.
struct TileSize {
  int queries;
  int keys;
};

// What an implementation takes: its own sizes, or multiples of `step` from `least` to `most`. All 0: it has no tiles.
struct TileSizes {
  TileSize own, step, least, most;
};

}  // namespace ringspan::kernels
