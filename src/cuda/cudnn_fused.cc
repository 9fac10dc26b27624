// cuDNN's fused attention, through cudnn-frontend, which is headers only; cuDNN itself is loaded when it is first asked.
// Compiled where the headers of both are found (cmake/Cudnn.cmake), else no_cudnn.cc is.
//
// A shape becomes a graph of one operation and an execution plan, the heuristics' first choice, which is kept. Nothing here
// waits for the device.
#include <cudnn_frontend.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#pragma GCC visibility push(default)  // what other files have too: only cudnn-frontend's is hidden
#include "cuda/cudnn.h"
#include "cuda/cudnn_library.h"
#include "ringspan/error.h"
#pragma GCC visibility pop

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where the headers look functions up
}  // namespace cudnn_frontend

namespace ringspan::cuda {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// The oldest that is asked: before it, bands and head_dim have limits that nobody has tried here.
constexpr std::size_t kOldest = 91900;
// Older ones do not read lse by its strides; cudnn-frontend refuses it then.
constexpr std::size_t kReadsStridesOfLse = 92600;

std::string version_text(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

enum Uid : std::int64_t { kQ = 1, kK, kV, kO, kLse, kDOut, kDq, kDk, kDv };

// What is set on both kinds of operation: scale and band. Of the two ways to say bottom-right causal, the one with a bound of 0
// is what more engines know.
template <typename Attributes>
void set_common(const FusedShape& s, Attributes& attributes) {
  attributes.set_name("attention").set_attn_scale(s.scale);
  if (!s.has_low && !s.has_high) return;
  const bool bottom_right = !s.has_low && s.high > 0 && s.high == s.keys - s.queries;
  attributes.set_diagonal_alignment(bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT);
  if (s.has_high) attributes.set_diagonal_band_right_bound(bottom_right ? 0 : static_cast<int>(s.high));
  if (s.has_low) attributes.set_diagonal_band_left_bound(static_cast<int>(1 - s.low));  // key u is seen where u - t > -bound
}

class GraphBuilder {
 public:
  // Operations take the graph's properties over when they are made, so that these come first.
  GraphBuilder(const FusedShape& shape, int compute_capability) : s_(shape), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_sm_version(compute_capability);
    graph_->set_io_data_type(type())
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> build() {
    s_.backward ? backward() : forward();
    return graph_;
  }

 private:
  fe::DataType_t type() const { return s_.dtype == DType::bfloat16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF; }

  struct Layout {
    std::vector<std::int64_t> dim, stride;
  };
  Layout layout(const FusedStrides& strides, bool keys, int width) const {
    return {{s_.batch, keys ? s_.kv_heads : s_.heads, keys ? s_.keys : s_.queries, width},
            {strides.batch, strides.head, strides.row, 1}};
  }
  Tensor input(Uid uid, const char* name, const FusedStrides& strides, bool keys, int width) {
    const Layout l = layout(strides, keys, width);
    return graph_->tensor(typed(fe::graph::Tensor_attributes().set_name(name).set_dim(l.dim).set_stride(l.stride), uid));
  }
  void output(const Tensor& tensor, Uid uid, const FusedStrides& strides, bool keys, int width) {
    const Layout l = layout(strides, keys, width);
    typed(tensor->set_output(true).set_dim(l.dim).set_stride(l.stride), uid);
  }
  // lse of some rows may begin at any of its elements.
  fe::graph::Tensor_attributes& typed(fe::graph::Tensor_attributes& tensor, Uid uid) const {
    if (uid != kLse) return tensor.set_uid(uid).set_data_type(type());
    return tensor.set_uid(uid).set_data_type(fe::DataType_t::FLOAT).set_alignment(sizeof(float));
  }

  void forward() {
    const Tensor q = input(kQ, "q", s_.q, false, s_.head_dim);
    const Tensor k = input(kK, "k", s_.k, true, s_.head_dim);
    const Tensor v = input(kV, "v", s_.v, true, s_.head_dim_v);
    fe::graph::SDPA_attributes attributes;
    set_common(s_, attributes);
    attributes.set_generate_stats(true);
    const auto [o, lse] = graph_->sdpa(q, k, v, attributes);
    output(o, kO, s_.o, false, s_.head_dim_v);
    output(lse, kLse, s_.lse, false, 1);
  }

  void backward() {
    const Tensor q = input(kQ, "q", s_.q, false, s_.head_dim);
    const Tensor k = input(kK, "k", s_.k, true, s_.head_dim);
    const Tensor v = input(kV, "v", s_.v, true, s_.head_dim_v);
    const Tensor o = input(kO, "o", s_.o, false, s_.head_dim_v);
    const Tensor d_out = input(kDOut, "do", s_.d_out, false, s_.head_dim_v);
    const Tensor lse = input(kLse, "lse", s_.lse, false, 1);
    fe::graph::SDPA_backward_attributes attributes;
    set_common(s_, attributes);
    attributes.set_deterministic_algorithm(s_.deterministic);
    const auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, o, d_out, lse, attributes);
    output(dq, kDq, s_.dq, false, s_.head_dim);
    output(dk, kDk, s_.dk, true, s_.head_dim);
    output(dv, kDv, s_.dv, true, s_.head_dim_v);
  }

  const FusedShape& s_;
  std::shared_ptr<fe::graph::Graph> graph_;
};

// An execution plan of a shape, or why there is none.
struct Prepared {
  std::shared_ptr<fe::graph::Graph> graph;
  std::string refusal;
  std::int64_t workspace_bytes = 0;
};

// `begin` gives the validated graph its device: a handle, or properties of a device that is elsewhere.
template <typename Begin>
Prepared prepare(const FusedShape& shape, int compute_capability, const Begin& begin) {
  Prepared prepared;
  try {
    const auto graph = GraphBuilder(shape, compute_capability).build();
    fe::error_t status = graph->validate();
    if (status.is_good()) status = begin(*graph);
    if (status.is_good()) status = graph->create_execution_plans({fe::HeurMode_t::A});
    if (status.is_good()) status = graph->check_support();
    if (status.is_good()) status = graph->build_plans();
    if (status.is_good()) status = graph->get_workspace_size(prepared.workspace_bytes);
    if (status.is_good()) prepared.graph = graph;
    if (status.is_bad()) prepared.refusal = status.get_message();
  } catch (const std::exception& error) {
    prepared.refusal = error.what();
  }
  if (prepared.graph == nullptr && prepared.refusal.empty()) prepared.refusal = "it says no more";
  for (char& character : prepared.refusal) character = character == '\n' ? ' ' : character;
  return prepared;
}

// cuDNN could not be used at all.
class NoCudnn final : public FusedAttention {
 public:
  explicit NoCudnn(std::string reason) : reason_(std::move(reason)) {}
  std::string name() const override { return "cudnn"; }
  std::string refusal(const FusedShape& /*shape*/) override { return reason_; }
  std::int64_t workspace_bytes(const FusedShape& /*shape*/) override { return 0; }
  void run(const FusedCall& /*call*/) override { throw DeviceError(reason_); }

 private:
  std::string reason_;
};

class Cudnn : public FusedAttention {
 public:
  std::string name() const override { return "cudnn"; }
  std::string refusal(const FusedShape& shape) override { return prepared(shape).refusal; }
  std::int64_t workspace_bytes(const FusedShape& shape) override { return prepared(shape).workspace_bytes; }
  bool reads_packed_lse() const override { return load_cudnn().version < kReadsStridesOfLse; }

 protected:
  virtual Prepared make(const FusedShape& shape) = 0;
  const Prepared& prepared(const FusedShape& shape) {
    const auto found = prepared_.find(shape);
    if (found != prepared_.end()) return found->second;
    return prepared_.emplace(shape, make(shape)).first->second;
  }

 private:
  std::map<FusedShape, Prepared> prepared_;
};

class CudnnOnDevice final : public Cudnn {
 public:
  CudnnOnDevice(Runtime& runtime, int compute_capability) : runtime_(runtime), compute_capability_(compute_capability) {
    runtime_.with_device([&] {
      check(fe::detail::create_handle(&handle_), "cannot start cuDNN");
      check(fe::detail::set_stream(handle_, static_cast<cudaStream_t>(runtime_.stream())), "cannot give cuDNN a stream");
    });
  }
  ~CudnnOnDevice() override {
    try {
      runtime_.with_device([&] { static_cast<void>(fe::detail::destroy_handle(handle_)); });
    } catch (const Error&) {
      return;  // the device failed; there is nothing to give back
    }
  }
  CudnnOnDevice(const CudnnOnDevice&) = delete;
  CudnnOnDevice& operator=(const CudnnOnDevice&) = delete;

  void run(const FusedCall& call) override {
    const Prepared& plan = prepared(call.shape);
    if (plan.graph == nullptr) throw DeviceError("cudnn: " + plan.refusal);
    std::unordered_map<std::int64_t, void*> tensors{{kQ, call.q}, {kK, call.k}, {kV, call.v}, {kO, call.o}, {kLse, call.lse}};
    if (call.shape.backward) {
      tensors.insert({{kDOut, call.d_out}, {kDq, call.dq}, {kDk, call.dk}, {kDv, call.dv}});
    }
    runtime_.with_device([&] {
      fe::error_t status = plan.graph->execute(handle_, tensors, call.workspace);
      if (status.is_bad()) throw DeviceError(fmt::format("cudnn failed on {}: {}", runtime_.name(), status.get_message()));
    });
  }

 private:
  static void check(cudnnStatus_t status, const char* what) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    throw DeviceError(fmt::format("{}: {}", what, fe::detail::get_error_string(status)));
  }
  Prepared make(const FusedShape& shape) override {
    Prepared result;
    runtime_.with_device([&] {
      result =
          prepare(shape, compute_capability_, [&](fe::graph::Graph& graph) { return graph.build_operation_graph(handle_); });
    });
    return result;
  }

  Runtime& runtime_;
  int compute_capability_;
  cudnnHandle_t handle_ = nullptr;
};

class CudnnElsewhere final : public Cudnn {
 public:
  CudnnElsewhere(std::string_view properties, int compute_capability)
      : properties_(std::make_shared<fe::DeviceProperties>()), compute_capability_(compute_capability) {
    fe::error_t status = properties_->deserialize({properties.begin(), properties.end()});
    if (status.is_bad()) throw DeviceError("cudnn does not take these properties of a device: " + status.get_message());
  }
  void run(const FusedCall& /*call*/) override { throw DeviceError("the device of these properties is elsewhere"); }

 private:
  Prepared make(const FusedShape& shape) override {
    return prepare(shape, compute_capability_, [&](fe::graph::Graph& graph) {
      graph.set_device_properties(properties_);
      return graph.build_operation_graph();
    });
  }

  std::shared_ptr<fe::DeviceProperties> properties_;
  int compute_capability_;
};

// Loads it once per process; empty: it can be used, else why not.
const std::string& load() {
  static const std::string reason = [] {
    const CudnnLibrary library = load_cudnn();
    if (library.handle == nullptr) return library.error;
    if (library.version < kOldest) {
      return fmt::format("{} is version {}, older than {}", library.file, version_text(library.version), version_text(kOldest));
    }
    fe::cudnn_dlhandle = library.handle;
    return std::string();
  }();
  return reason;
}

}  // namespace

std::unique_ptr<FusedAttention> make_cudnn(Runtime& runtime, int compute_capability) {
  if (!load().empty()) return std::make_unique<NoCudnn>(load());
  try {
    return std::make_unique<CudnnOnDevice>(runtime, compute_capability);
  } catch (const std::exception& error) {
    return std::make_unique<NoCudnn>(error.what());
  }
}

std::unique_ptr<FusedAttention> make_cudnn_elsewhere(std::string_view properties, int compute_capability) {
  if (!load().empty()) throw DeviceError(load());
  return std::make_unique<CudnnElsewhere>(properties, compute_capability);
}

std::string cudnn_report() {
  if (!load().empty()) return fmt::format("cudnn: {}; every kernel is our own", load());
  const CudnnLibrary library = load_cudnn();
  return fmt::format(
      "cudnn: {} is version {}; with deterministic = false, or named, it computes passes of 16 bits whose rows take one call "
      "each, with partials = storage several",
      library.file, version_text(library.version));
}

}  // namespace ringspan::cuda
