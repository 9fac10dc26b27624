// Fused attentions that the program brings (fused.h): functions under one of the names of plan/kernel_choice.h. The Python
// front brings FlashAttention so.
//
// They take memory of their own, which is in no plan. Thread safety: any thread, and the functions of a provider may be called
// by several at a time.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "cuda/fused.h"

namespace ringspan::cuda {

// Where the tensors of a call lie, and what it is enqueued on. Memory of the emulated device is the host's: there a call
// computes before it returns.
struct FusedPlace {
  bool on_host = true;
  int device = 0;              // index of the CUDA device
  int compute_capability = 0;  // 90 for 9.0; 0 on the host
  void* stream = nullptr;      // a cudaStream_t
};

struct FusedProvider {
  std::function<std::string(const FusedShape&, const FusedPlace&)> refusal;  // in words; empty: it can
  std::function<void(const FusedCall&, const FusedPlace&)> run;              // throws Error
};

// Kept until the process ends, or until another one takes the name.
void provide_fused(const std::string& name, FusedProvider provider);

// What has the name now; where nothing has, one that refuses every shape and says so.
std::unique_ptr<FusedAttention> make_provided(std::string_view name, const FusedPlace& place);

// For people: who brings them. One line.
std::string provided_report();

}  // namespace ringspan::cuda
