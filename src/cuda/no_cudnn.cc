// What is left of cuDNN in a library that was built without its headers, or without CUDA; compiled only then (CMakeLists.txt).
#include <utility>

#include "cuda/cudnn.h"
#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

constexpr const char* kReason = "this library was built without the headers of cuDNN and cudnn-frontend";

class NoCudnn final : public FusedAttention {
 public:
  std::string name() const override { return "cudnn"; }
  std::string refusal(const FusedShape& /*shape*/) override { return kReason; }
  std::int64_t workspace_bytes(const FusedShape& /*shape*/) override { return 0; }
  void run(const FusedCall& /*call*/) override { throw DeviceError(kReason); }
};

}  // namespace

std::unique_ptr<FusedAttention> make_cudnn(Runtime& /*runtime*/, int /*compute_capability*/) {
  return std::make_unique<NoCudnn>();
}

std::unique_ptr<FusedAttention> make_cudnn_elsewhere(std::string_view /*properties*/, int /*compute_capability*/) {
  throw DeviceError(kReason);
}

std::string cudnn_report() { return std::string("cudnn: ") + kReason + "; every kernel is our own"; }

}  // namespace ringspan::cuda
