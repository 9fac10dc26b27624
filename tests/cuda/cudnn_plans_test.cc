// The real cuDNN's answers to the shapes that passes become, for a GPU that is not here: RINGSPAN_CUDNN_LIBRARY names the
// library and RINGSPAN_CUDNN_DEVICE a JSON file that describes a device (docs/cuda.md); skipped without. cuDNN itself wants a
// libcuda.so.1 to be there. Nothing runs: what is seen is that execution plans can be built, for which bands, strides and head
// sizes, and what workspace they ask for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cuda/cudnn.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

class CudnnPlans : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const device = std::getenv("RINGSPAN_CUDNN_DEVICE");
    if (device == nullptr) GTEST_SKIP() << "RINGSPAN_CUDNN_DEVICE names no file that describes a device";
    std::ifstream file(device);
    std::stringstream text;
    text << file.rdbuf();
    const char* const capability = std::getenv("RINGSPAN_CUDNN_CAPABILITY");
    if (capability != nullptr) capability_ = std::atoi(capability);
    cudnn_ = make_cudnn_elsewhere(text.str(), capability_);
  }

  static FusedShape shape(std::int64_t queries, std::int64_t keys, int head_dim, bool backward, std::int64_t step = 1) {
    FusedShape s;
    s.backward = backward;
    s.deterministic = false;
    s.batch = 2;
    s.heads = 16;
    s.kv_heads = 4;
    s.queries = queries;
    s.keys = keys;
    s.head_dim = s.head_dim_v = head_dim;
    s.scale = 0.125F;
    const auto rows = [&](std::int64_t count, std::int64_t heads, int width) {
      return FusedStrides{count * heads * width * step, width, heads * width * step};
    };
    s.q = s.dq = s.o = s.d_out = rows(queries, s.heads, head_dim);
    s.k = s.v = s.dk = s.dv = rows(keys, s.kv_heads, head_dim);
    s.lse = {s.heads * queries * step, queries * step, step};
    return s;
  }
  void expect_taken(FusedShape s, const char* what) {
    if (s.backward && cudnn_->reads_packed_lse()) s.lse = packed_lse(s);  // as the device calls it
    EXPECT_EQ(cudnn_->refusal(s), "") << what;
    RecordProperty(std::string(what) + (s.backward ? " backward" : " forward"), std::to_string(cudnn_->workspace_bytes(s)));
    std::printf("  %-28s %s workspace %lld\n", what, s.backward ? "backward" : "forward ",
                static_cast<long long>(cudnn_->workspace_bytes(s)));
  }

  std::unique_ptr<FusedAttention> cudnn_;
  int capability_ = 90;
};

TEST_F(CudnnPlans, BandsAndStrides) {
  for (const bool backward : {false, true}) {
    expect_taken(shape(1024, 1024, 128, backward), "full");
    FusedShape causal = shape(1024, 1024, 128, backward);
    causal.has_high = true;
    expect_taken(causal, "causal");
    FusedShape bottom_right = shape(300, 1024, 128, backward);
    bottom_right.has_high = true;
    bottom_right.high = 724;
    expect_taken(bottom_right, "bottom-right causal");
    FusedShape shifted = bottom_right;
    shifted.high = 100;
    expect_taken(shifted, "causal from key 100");
    FusedShape window = causal;
    window.has_low = true;
    window.low = -255;
    expect_taken(window, "window:255,0");
    window.high = 31;
    expect_taken(window, "window:255,31");
    window.has_high = false;
    expect_taken(window, "window:255,-1");
    FusedShape dilated = shape(512, 512, 64, backward, 4);
    dilated.has_high = true;
    expect_taken(dilated, "every fourth row");
    expect_taken(shape(1, 300, 128, backward), "one query");
    expect_taken(shape(300, 1, 128, backward), "one key");
    expect_taken(shape(129, 1001, 128, backward), "odd lengths");
    for (const int head_dim : {8, 40, 64, 96, 128, 256}) {
      if (backward && head_dim > 128 && capability_ < 90) continue;  // refused there
      expect_taken(shape(256, 256, head_dim, backward), "head_dim");
    }
    FusedShape half = causal;
    half.dtype = DType::float16;
    expect_taken(half, "float16");
  }
}

TEST_F(CudnnPlans, WhatIsRefusedIsSaid) {
  FusedShape narrow = shape(1024, 300, 128, false);
  narrow.has_low = true;
  narrow.low = -100;
  EXPECT_THAT(cudnn_->refusal(narrow), ::testing::HasSubstr("liding window"));
  EXPECT_NE(cudnn_->refusal(shape(64, 64, 12, false)), "");
  EXPECT_NE(cudnn_->refusal(shape(1, 1, 64, true)), "");
  EXPECT_NE(cudnn_->refusal(shape(64, 64, 1024, true)), "");
}

// Which is why deterministic = true does not take it.
TEST_F(CudnnPlans, WorkspaceOfBackward) {
  FusedShape s = shape(16384, 16384, 128, true);
  const std::int64_t free = cudnn_->workspace_bytes(s);
  s.deterministic = true;
  const std::int64_t deterministic = cudnn_->workspace_bytes(s);
  std::printf("  at 16,384 tokens: %lld, deterministic %lld\n", static_cast<long long>(free),
              static_cast<long long>(deterministic));
  EXPECT_GT(free, 0);
  EXPECT_GE(deterministic, free);
}

}  // namespace
}  // namespace ringspan::cuda
