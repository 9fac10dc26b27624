#include "cuda/provided_fused.h"

#include <fmt/format.h>

#include <map>
#include <mutex>
#include <utility>

#include "ringspan/error.h"

namespace ringspan::cuda {
namespace {

using Shared = std::shared_ptr<const FusedProvider>;

struct Providers {
  std::mutex mutex;
  std::map<std::string, Shared, std::less<>> by_name;
};

// Never destroyed: what a provider holds may belong to an interpreter that has ended by then.
Providers& providers() {
  static auto* const all = new Providers;
  return *all;
}

class Provided final : public FusedAttention {
 public:
  Provided(std::string_view name, Shared provider, const FusedPlace& place)
      : name_(name), provider_(std::move(provider)), place_(place) {}

  std::string name() const override { return name_; }
  std::string refusal(const FusedShape& shape) override {
    if (provider_ == nullptr) return "it is a Python package, which ringspan.torch calls; this program brings none";
    const auto known = refusals_.find(shape);
    if (known != refusals_.end()) return known->second;
    return refusals_.emplace(shape, provider_->refusal(shape, place_)).first->second;
  }
  std::int64_t workspace_bytes(const FusedShape& /*shape*/) override { return 0; }
  bool takes_own_memory() const override { return true; }
  void run(const FusedCall& call) override {
    if (provider_ == nullptr) throw DeviceError(name_ + ": this program brings none");
    provider_->run(call, place_);
  }

 private:
  std::string name_;
  Shared provider_;
  FusedPlace place_;
  std::map<FusedShape, std::string> refusals_;
};

}  // namespace

void provide_fused(const std::string& name, FusedProvider provider) {
  const std::lock_guard lock(providers().mutex);
  providers().by_name[name] = std::make_shared<const FusedProvider>(std::move(provider));
}

std::unique_ptr<FusedAttention> make_provided(std::string_view name, const FusedPlace& place) {
  const std::lock_guard lock(providers().mutex);
  const auto found = providers().by_name.find(name);
  return std::make_unique<Provided>(name, found == providers().by_name.end() ? nullptr : found->second, place);
}

std::string provided_report() {
  const std::lock_guard lock(providers().mutex);
  std::string names;
  for (const auto& [name, provider] : providers().by_name) names += (names.empty() ? "" : ", ") + name;
  if (names.empty())
    return "flash_attn, flash_attn_3: this program brings neither; ringspan.torch does, where kernel= names them";
  return fmt::format("{}: by the Python packages, where kernel= names them", names);
}

}  // namespace ringspan::cuda
