#include "qkv_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "file_error.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

template <typename... Args>
[[noreturn]] void fail(const std::string& path, fmt::format_string<Args...> format, Args&&... args) {
  throw FileError(fmt::format("{}: {}", path, fmt::format(format, std::forward<Args>(args)...)));
}

constexpr std::array<std::pair<DType, std::string_view>, 3> kDTypes{
    {{DType::float32, "F32"}, {DType::bfloat16, "BF16"}, {DType::float16, "F16"}}};

std::optional<DType> dtype_of(std::string_view name) {
  for (const auto& [dtype, file_name] : kDTypes) {
    if (file_name == name) return dtype;
  }
  return std::nullopt;
}

const io::TensorInfo& required(const io::SafetensorsReader& reader, const std::string& name) {
  return *as_file_error([&] { return &reader.at(name); });
}

int small(const std::string& path, const char* name, std::int64_t value) {
  if (value > std::numeric_limits<int>::max()) fail(path, "{} ({}) is too large", name, value);
  return static_cast<int>(value);
}

// What serving systems call the map from tokens to pages of keys; taken as dense, the pages would be read in the wrong order.
void refuse_pages(const io::SafetensorsReader& reader) {
  for (const char* name : {"block_table", "block_tables", "page_table", "page_indices"}) {
    if (reader.find(name) == nullptr) continue;
    throw Unsupported(
        fmt::format("{}: {}: paged keys and values are not supported; k and v must be (batch, tokens, heads, head_dim)",
                    reader.path(), name));
  }
}

}  // namespace

io::SafetensorsReader open_safetensors(const std::string& path) {
  if (path.empty()) throw FileError("'': is not the name of a file");
  io::SafetensorsReader reader = as_file_error([&] { return io::SafetensorsReader(path); });
  watch_mapped(path, reader.mapped());
  return reader;
}

std::string_view file_dtype(DType dtype) {
  for (const auto& [known, file_name] : kDTypes) {
    if (known == dtype) return file_name;
  }
  throw InvalidArgument("unknown dtype");
}

QkvFile::QkvFile(const std::string& path) : reader_(open_safetensors(path)) {}

GlobalTensor QkvFile::tensor(const io::SafetensorsReader& reader, const std::string& name, bool per_row) const {
  const io::TensorInfo& info = required(reader, name);
  const std::string& path = reader.path();
  const std::size_t dimensions = per_row ? 3 : 4;
  if (info.shape.size() != dimensions) {
    fail(path, "{} has shape ({}), expected {} dimensions: {}", name, fmt::join(info.shape, ", "), dimensions,
         per_row                   ? "(batch, heads, tokens)"
         : layout_ == Layout::bshd ? "(batch, tokens, heads, head_dim)"
                                   : "(batch, heads, tokens, head_dim)");
  }
  const std::optional<DType> dtype = dtype_of(info.dtype);
  if (!dtype || (per_row && *dtype != DType::float32)) {
    fail(path, "{} has dtype {}, expected {}", name, info.dtype, per_row ? "F32" : "F32, BF16 or F16");
  }
  const bool heads_first = per_row || layout_ == Layout::bhsd;
  GlobalTensor tensor;
  tensor.shape = {
      info.shape[0], info.shape[heads_first ? 2 : 1],          info.shape[heads_first ? 1 : 2], per_row ? 1 : info.shape[3],
      *dtype,        heads_first ? Layout::bhsd : Layout::bshd};
  return tensor;
}

void QkvFile::load(const io::SafetensorsReader& reader, const std::string& name, GlobalTensor& tensor) {
  const io::TensorInfo& info = required(reader, name);
  tensor.data = reader.data(info);
  tensor.mapped = tensor.data == reader.raw(info).data();  // otherwise the reader made an aligned copy
}

void QkvFile::load() {
  load(reader_, "q", inputs_.q);
  load(reader_, "k", inputs_.k);
  load(reader_, "v", inputs_.v);
  const auto floats = [&](const char* name) -> const float* {
    const io::TensorInfo* info = reader_.find(name);
    return info == nullptr ? nullptr : reinterpret_cast<const float*>(reader_.data(*info));
  };
  inputs_.sinks = floats("sinks");
  inputs_.alibi_slopes = floats("alibi_slopes");
}

std::vector<std::int32_t> QkvFile::offsets(const std::string& name) const {
  const io::TensorInfo& info = required(reader_, name);
  if (info.dtype != "I32" || info.shape.size() != 1) {
    fail(reader_.path(), "{} has dtype {} and shape ({}), expected I32 and one dimension: documents + 1 offsets", name,
         info.dtype, fmt::join(info.shape, ", "));
  }
  std::vector<std::int32_t> values(static_cast<std::size_t>(info.shape[0]));
  if (!values.empty()) std::memcpy(values.data(), reader_.raw(info).data(), values.size() * sizeof(std::int32_t));
  return values;
}

std::optional<Layout> QkvFile::stated_layout(const io::SafetensorsReader& reader) {
  const auto said = reader.metadata().find("layout");
  if (said == reader.metadata().end()) return std::nullopt;
  if (said->second == "batch,tokens,heads,head_dim" || said->second == "bshd") return Layout::bshd;
  if (said->second == "batch,heads,tokens,head_dim" || said->second == "bhsd") return Layout::bhsd;
  fail(reader.path(),
       "the layout of its metadata ({}) must be bshd (batch,tokens,heads,head_dim) or bhsd (batch,heads,tokens,head_dim)",
       said->second);
}

void QkvFile::describe(ProblemOptions& options, std::optional<Layout> asked) {
  layout_ = asked ? *asked : stated_layout(reader_).value_or(Layout::bshd);
  refuse_pages(reader_);
  inputs_.q = tensor(reader_, "q");
  inputs_.k = tensor(reader_, "k");
  inputs_.v = tensor(reader_, "v");
  const TensorShape& q = inputs_.q.shape;
  const TensorShape& k = inputs_.k.shape;
  const TensorShape& v = inputs_.v.shape;
  const std::string& path = reader_.path();
  for (const auto& [name, shape] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (shape->batch != q.batch) fail(path, "{}.batch ({}) must equal q.batch ({})", name, shape->batch, q.batch);
    if (shape->dtype != q.dtype) fail(path, "{} is {}, but q is {}", name, to_string(shape->dtype), to_string(q.dtype));
  }
  if (v.tokens != k.tokens) fail(path, "v.tokens ({}) must equal k.tokens ({})", v.tokens, k.tokens);
  if (v.heads != k.heads) fail(path, "v.heads ({}) must equal k.heads ({})", v.heads, k.heads);
  if (k.width != q.width) fail(path, "k.head_dim ({}) must equal q.head_dim ({})", k.width, q.width);
  Problem& problem = options.problem;
  problem.batch = q.batch;
  problem.tokens_q = q.tokens;
  problem.tokens_k = k.tokens;
  problem.heads = small(path, "q.heads", q.heads);
  problem.kv_heads = small(path, "k.heads", k.heads);
  problem.head_dim = small(path, "q.head_dim", q.width);
  problem.head_dim_v = small(path, "v.head_dim", v.width);
  problem.dtype = q.dtype;
  options.tokens_given = options.tokens_k_given = options.kv_heads_given = options.head_dim_v_given = true;
  describe_documents(options);
  describe_heads_vectors(problem);
  for (const io::TensorInfo& info : reader_.tensors()) {
    constexpr std::array<std::string_view, 8> kRead{"q",     "k",           "v", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
                                                    "sinks", "alibi_slopes"};
    if (std::find(kRead.begin(), kRead.end(), info.name) == kRead.end())
      notes_.push_back(fmt::format("tensor {} is not read", info.name));
  }
}

void QkvFile::describe_documents(ProblemOptions& options) {
  const bool wanted = Pattern::parse(options.pattern_text).documents;
  const bool both = reader_.find("cu_seqlens") != nullptr;
  const bool separate = reader_.find("cu_seqlens_q") != nullptr || reader_.find("cu_seqlens_k") != nullptr;
  if (!wanted) {
    if (both || separate)
      notes_.emplace_back("the file has documents (cu_seqlens), but the pattern does not name them: attention crosses them");
    return;
  }
  if (both && separate)
    fail(reader_.path(), "has cu_seqlens and also cu_seqlens_q or cu_seqlens_k: which one holds is unclear");
  if (!both && !separate) fail(reader_.path(), "has no tensor cu_seqlens, which `documents` in the pattern needs");
  if (both) {
    options.problem.cu_seqlens_q = offsets("cu_seqlens");
  } else {
    options.problem.cu_seqlens_q = offsets("cu_seqlens_q");
    options.problem.cu_seqlens_k = offsets("cu_seqlens_k");
  }
}

void QkvFile::describe_heads_vectors(Problem& problem) {
  const std::string& path = reader_.path();
  const auto is_there = [&](const char* name, bool may_have_batch) {
    const io::TensorInfo* info = reader_.find(name);
    if (info == nullptr) return false;
    const bool flat = info->shape == std::vector<std::int64_t>{problem.heads};
    const bool batched = may_have_batch && info->shape == std::vector<std::int64_t>{problem.batch, problem.heads};
    if (info->dtype != "F32" || (!flat && !batched)) {
      fail(path, "{} has dtype {} and shape ({}), expected F32 and ({}){}", name, info->dtype, fmt::join(info->shape, ", "),
           problem.heads, may_have_batch ? fmt::format(" or ({}, {})", problem.batch, problem.heads) : "");
    }
    if (batched) inputs_.alibi_batch_stride = problem.heads;
    return true;
  };
  problem.sinks = is_there("sinks", false);
  problem.alibi = is_there("alibi_slopes", true);
}

void QkvFile::attach_gradient(const std::string& path, const Problem& problem) {
  gradient_reader_.emplace(open_safetensors(path));
  const bool is_short = gradient_reader_->find("do") != nullptr;
  if (is_short && gradient_reader_->find("d_out") != nullptr) fail(path, "has d_out and also do: which one holds is unclear");
  const char* name = is_short ? "do" : "d_out";
  for (const io::TensorInfo& info : gradient_reader_->tensors()) {
    if (info.name != name && info.name != "dlse") notes_.push_back(fmt::format("tensor {} of {} is not read", info.name, path));
  }
  if (stated_layout(*gradient_reader_).value_or(layout_) != layout_) {
    fail(path, "is {} by its metadata, but the input is {}", layout_ == Layout::bshd ? "bhsd" : "bshd",
         layout_ == Layout::bshd ? "bshd" : "bhsd");
  }
  inputs_.d_out = tensor(*gradient_reader_, name);
  load(*gradient_reader_, name, inputs_.d_out);
  const TensorShape expected = OutputShapes(problem, layout_).o;
  const TensorShape& shape = inputs_.d_out.shape;
  if (shape.batch != expected.batch || shape.tokens != expected.tokens || shape.heads != expected.heads ||
      shape.width != expected.width) {
    fail(path, "{} has batch {}, tokens {}, heads {}, head_dim {}; o has {}, {}, {}, {}", name, shape.batch, shape.tokens,
         shape.heads, shape.width, expected.batch, expected.tokens, expected.heads, expected.width);
  }
  if (shape.dtype != expected.dtype)
    fail(path, "{} is {}, but q is {}", name, to_string(shape.dtype), to_string(expected.dtype));
  if (gradient_reader_->find("dlse") == nullptr) return;
  inputs_.dlse = tensor(*gradient_reader_, "dlse", true);
  load(*gradient_reader_, "dlse", inputs_.dlse);
  const TensorShape& dlse = inputs_.dlse.shape;
  if (dlse.batch != expected.batch || dlse.tokens != expected.tokens || dlse.heads != expected.heads) {
    fail(path, "dlse has batch {}, heads {}, tokens {}; lse has {}, {}, {}", dlse.batch, dlse.heads, dlse.tokens,
         expected.batch, expected.heads, expected.tokens);
  }
}

}  // namespace ringspan::cli
